# A study of three rules, one of them one's own, to the board's check: docs/sweeps.md, docs/extending.md, docs/board.md.
cp "$EXAMPLES/own_regime.py" own_regime.py
mutualrl regimes check own_regime.py:Shortest
cat > sweep.yaml <<'E'
seeds: 3
pools: [tiny]
set: {run.steps: 3, run.validate_every: 0, run.validation_limit: 32}
arms:
  grpo: {regime: grpo}
  sgt: {regime: sgt}
  shortest: {regime: "own_regime.py:Shortest"}
E
mutualrl sweep sweep.yaml --out runs/study --dry-run
mutualrl sweep sweep.yaml --out runs/study
mutualrl compare runs/study
mutualrl report runs/study
mutualrl compare runs/study --json > mine.json
if python "$BENCHMARKS/board.py" --check mine.json 2> asked.txt; then exit 1; fi
grep -q '"entry": ' asked.txt
python - <<'E'
import json
content = json.load(open("mine.json"))
content["entry"] = {"rule": "the shortest success", "author": "a user", "code": "own_regime.py"}
json.dump(content, open("mine.json", "w"))
E
python "$BENCHMARKS/board.py" --check mine.json
