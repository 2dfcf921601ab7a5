# Two training scripts of one's own, and a dump of TRL's: docs/scripts.md, docs/one-model.md.
python "$EXAMPLES/two_scripts.py" ada --steps 6 > ada.txt 2>&1 &
python "$EXAMPLES/two_scripts.py" bob --steps 6 > bob.txt 2>&1
wait
mutualrl runs ls
mutualrl report runs/two-scripts
python - <<'E'
import pandas
rows = [{"step": 1, "prompt": f"q{i}", "completion": "x", "my_reward": float(i % 3 == k), "advantage": 0.0} for i in range(9) for k in range(2)]
pandas.DataFrame(rows).to_parquet("completions_00001.parquet")
E
mutualrl complementarity --rollouts completions_00001.parquet
