# One model, rows with columns and a reward of its own, and a file of solutions: docs/one-model.md, docs/your-own.md.
python - <<'E'
import json
with open("rows.jsonl", "w") as rows, open("book.jsonl", "w") as book:
    for i in range(200):
        print(json.dumps({"question": f"What is {i} plus 1?", "gold": str(i + 1)}), file=rows)
        print(json.dumps({"question": f"What is {i} plus 1?", "solution": f"It is {i + 1}."}), file=book)
open("own.py", "w").write("def reward(completions, gold, **_):\n    return [float(g in c) for c, g in zip(completions, gold)]\n")
E
keys="--set task.template={question} --set task.answer=gold --set task.reward=own.py:reward"
mutualrl complementarity --model tiny:ada --source book=recorded:book.jsonl --task dataset --data rows.jsonl $keys --samples 2 --prompts 32 --max-new-tokens 16
mutualrl init mine --model tiny:ada --source book=recorded:book.jsonl --data rows.jsonl --prompt-column question --answer-column gold --reward own --max-completion-length 16 --gpus 0 --yes
mutualrl train --regime sgt --model tiny:ada --source book=recorded:book.jsonl --task dataset --data rows.jsonl $keys --set task.hold_out=0.25 --steps 4 --set trainer.max_completion_length=16 --run-dir runs/with-book
mutualrl report runs/with-book
mutualrl train --regime grpo --model tiny:ada --source book=recorded:book.jsonl --task dataset --data rows.jsonl $keys --set task.hold_out=0.25 --steps 4 --set trainer.max_completion_length=16 --run-dir runs/without
mutualrl compare runs/with-book runs/without
