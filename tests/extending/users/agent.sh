# An agent with tools, an environment and a file of runs of one's own: docs/agents.md, docs/sweeps.md.
mkdir shop
python - <<'E2'
import json
open("shop/prices.py", "w").write('PRICES = {f"item {i}": i + 2 for i in range(200)}\n')
open("shop/tools.py", "w").write('''from prices import PRICES


def price(item: str) -> str:
    """Look a price up.

    Args:
        item: What to look for.
    """
    return str(PRICES[item])
''')
with open("tasks.jsonl", "w") as tasks, open("runs.jsonl", "w") as runs:
    for i in range(200):
        question = f"What is the price of item {i}?"
        print(json.dumps({"prompt": question, "answer": str(i + 2)}), file=tasks)
        call = {"id": "c1", "type": "function", "function": {"name": "price", "arguments": json.dumps({"item": f"item {i}"})}}
        act = {"role": "assistant", "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": "c1" if i % 10 else "c2", "content": str(i + 2)}
        answer = {"role": "assistant", "content": f"\\boxed{{{i + 2}}}"}
        print(json.dumps({"messages": [{"role": "user", "content": question}, act, result, answer]}), file=runs)
E2
cat > pool.yaml <<'E2'
policies: [{name: jan, model: "tiny:jan"}, {name: kim, model: "tiny:kim"}]
task: {name: dataset, data: tasks.jsonl, tools: ["shop/tools.py:price"], hold_out: 0.2}
run: {steps: 2, validation_limit: 16}
round: {prompts: 8}
trainer: {num_generations: 4, per_device_train_batch_size: 32, max_completion_length: 48, learning_rate: 1.0e-4}
E2
mutualrl thl-check --suite turns --source tiny:jan --target tiny:kim --conversations runs.jsonl || test $? = 3
mutualrl complementarity --pool pool.yaml --source book=recorded:runs.jsonl --prompts 8 --samples 2
mutualrl train --regime hinted --pool pool.yaml --source book=recorded:runs.jsonl --dry-run
mutualrl train --regime hinted --pool pool.yaml --source book=recorded:runs.jsonl --run-dir runs/plans
mutualrl train --regime grpo --pool pool.yaml --run-dir runs/grpo
mutualrl compare runs/plans runs/grpo
mutualrl report runs/plans
mutualrl exchange show runs/plans --limit 2
if mutualrl train --regime grpo --pool pool.yaml --set 'task.tools=[shop/tools.py:price, shop/tools.py:price]' --dry-run 2> twice.txt; then exit 1; fi
grep -q "two tools called 'price'" twice.txt
