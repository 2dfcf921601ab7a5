# One model and an endpoint ($ENDPOINT): docs/one-model.md.
mutualrl train --regime sgt --model tiny:ada --source teacher=served:$ENDPOINT --dry-run
mutualrl train --regime sgt --model tiny:ada --source teacher=served:$ENDPOINT --set sources.teacher.budget_tokens=60 --steps 4 --run-dir runs/served
mutualrl report runs/served
mutualrl runs verify runs/served
if mutualrl train --regime sgt --model tiny:ada --source teacher=served:http://127.0.0.1:9/v1 --steps 1 --run-dir runs/wrong 2> wrong.txt; then exit 1; fi
grep -q "is the server running" wrong.txt
