# A cluster: each policy its own job, a mounted directory between them, a teacher that joins: docs/operations.md.
share=file://$PWD/mount/runs/one
mkdir -p mount/runs
settings="--regime sgt --pool tiny --source teacher=served:$ENDPOINT --set run.steps=3 --set run.validation_limit=16 --set exchange.heartbeat_seconds=1"
mutualrl train $settings --set exchange.url=$share --dry-run
mutualrl join $share --policy ada $settings --run-dir ada > ada.txt 2>&1 &
mutualrl join $share --policy bob $settings --run-dir bob > bob.txt 2>&1 &
mutualrl join $share --policy teacher $settings --run-dir teacher > teacher.txt 2>&1 &
wait
cat ada.txt bob.txt teacher.txt
mutualrl report $share --out whole
mutualrl report ada
mutualrl runs ls .
mutualrl runs verify ada
mutualrl exchange ls ada
if mutualrl join $share --policy teacher --regime sgt --pool tiny --run-dir wrong 2> wrong.txt; then exit 1; fi
grep -q -- "--source teacher=served:URL" wrong.txt
