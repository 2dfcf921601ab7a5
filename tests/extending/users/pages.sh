# Four pages: a pool alone, beside its baseline, one model with a source, and a run that was stopped.
mutualrl train --regime sgt --pool tiny --steps 4 --run-dir runs/sgt
mutualrl train --regime grpo --pool tiny --steps 4 --run-dir runs/grpo
mutualrl train --regime sgt --pool tiny-recorded --steps 4 --run-dir runs/with-book
mutualrl report runs/sgt
mutualrl report runs/sgt runs/grpo --out both
mutualrl report runs/with-book
rm runs/grpo/summary.json runs/grpo/policies/*/result.json
mutualrl report runs/grpo
