"""What a file would revive: only what the model can learn, recounted with the tokenizer alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from conftest import Cli

MODEL = Path(__file__).resolve().parents[2] / "src" / "mutualrl" / "tiny" / "models" / "ada"


@pytest.mark.slow
@pytest.mark.parametrize("limit", [6, 20])
def test_revived_means_could_be_learnt(cli_here: Cli, tmp_path: Path, limit: int) -> None:
    """The book has one confirmed text per problem: its tokens, and the one that ends it, are within the limit or not."""
    saved = tmp_path / "rollouts.parquet"
    options = ("--samples", "2", "--prompts", "60", "--max-new-tokens", str(limit), "--save", saved, "--json")
    result = cli_here("complementarity", "--model", "tiny:ada", "--source", "book=recorded:tiny:book", *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    (row,) = found["revival"]
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))

    from mutualrl.sources.recorded import embedded
    from mutualrl.tasks import TaskSource, get_task
    from mutualrl.tasks.boxed import boxed_score

    prompts = {prompt.id: prompt for prompt in get_task("arithmetic").read("train", TaskSource()).prompts}
    lengths: dict[str, int] = {}
    for line in embedded("tiny:book").read_text().splitlines():
        recorded = json.loads(line)
        for prompt in prompts.values():
            for text in recorded["generations"] if recorded["problem"].split() == prompt.text.split() else ():
                if boxed_score(text, prompt.answer) > 0.8:
                    length = len(tokenizer.encode(text, add_special_tokens=False).ids) + 1
                    lengths[prompt.id] = min(length, lengths.get(prompt.id, length))

    import pyarrow.parquet as pq

    best: dict[str, float] = {}
    for rollout in pq.read_table(saved).to_pylist():
        best[rollout["prompt_id"]] = max(rollout["reward"], best.get(rollout["prompt_id"], -1.0))
    dead = {key for key, reward in best.items() if reward < 0.2}
    within = {key for key in dead & lengths.keys() if lengths[key] <= limit}
    beyond = (dead & lengths.keys()) - within
    assert (row["failed"], row["revived"], row["out_of_reach"]) == (len(dead), len(within), len(beyond))
    assert row["needed_length"] == max((lengths[key] for key in beyond), default=None)
    assert bool(beyond) == (limit == 6)
    assert found["recommended"] == ("sgt" if limit == 20 else "none"), "two of 57 may be chance"
    assert f"({'ada' if limit == 20 else 'book'} {len(within)} of {len(dead)})" in found["recommendation"]
    assert "peer" not in found["recommendation"], "one model has none"


@pytest.mark.slow
def test_two_models_alike_are_advised_to_learn_from_the_file(cli_here: Cli) -> None:
    """They solve the same prompts, and the file has texts for those that they fail."""
    models = ("--model", "tiny:ada", "--model", "tiny:ada", "--source", "book=recorded:tiny:book")
    sampling = ("--samples", "4", "--prompts", "16", "--max-new-tokens", "20", "--json")
    result = cli_here("complementarity", *models, *sampling)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert all(row["revived"] for row in found["revival"])
    assert found["recommended"] == "sgt"
    assert "recorded texts" in found["recommendation"].lower()


def test_task_keys_are_taken_as_by_train(cli_here: Cli, tmp_path: Path) -> None:
    rows = [{"question": f"{i}+1?", "gold": str(i + 1), "solution": f"\\boxed{{{i + 1}}}"} for i in range(32)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "own.py").write_text(
        "def reward(completions, gold, **_):\n    return [float(g in c) for c, g in zip(completions, gold)]\n"
    )
    options = (
        "--model",
        "tiny:ada",
        "--source",
        "book=recorded:rows.jsonl",
        "--task",
        "dataset",
        "--data",
        "rows.jsonl",
    )
    small = ("--samples", "1", "--prompts", "4", "--max-new-tokens", "8", "--json")
    assert cli_here("complementarity", *options, *small).returncode == 2  # no column `prompt`
    keys = ("--set", "task.template={question}", "--set", "task.answer=gold", "--set", "task.reward=own.py:reward")
    result = cli_here("complementarity", *options, *small, *keys)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["sources"][0]["confirmed"] > 0
    refused = cli_here("complementarity", *options, *small, "--set", "run.steps=3")
    assert (refused.returncode, "keys of the task and of its sources" in refused.stderr) == (2, True)


def test_rollouts_that_an_error_ended_are_no_failures(cli_here: Cli, tmp_path: Path) -> None:
    rows = []
    for example in range(4):
        for k in range(2):
            lost = example < 2
            ended = (
                {"error": {"error": "SandboxError"}} if lost and k else {"stop_condition": "has_error"} if lost else {}
            )
            rows.append({"example_id": example, "reward": 0.0 if lost else float(k), "completion": "x", **ended})
    (tmp_path / "results.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = cli_here("complementarity", "--rollouts", "results.jsonl", "--json")
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["dead_prompts"]
    assert (row["dead"], row["between"], row["unscored"]) == (0, 2, 2)
    assert "4 of 8 rollouts were ended by an error" in result.stderr


@pytest.mark.parametrize("columns", [("prompt", "completion", "reward_fn"), ("input", "output", "score")])
def test_the_step_is_the_unit_of_a_dump(cli_here: Cli, tmp_path: Path, columns: tuple[str, str, str]) -> None:
    """Old tables have the step as text, and no `advantage`; the prompt differs in white space between steps."""
    asked, said, scored = columns
    directory = tmp_path / "trainer" / "completions"
    directory.mkdir(parents=True)
    for step, reward in ((1, 0.0), (2, 1.0)):
        rows = [{"step": str(step), asked: "What is" + " " * step + "2?", said: "x", scored: reward} for _ in range(2)]
        path = directory / f"step_{step}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    result = cli_here("complementarity", "--rollouts", directory, "--reward", scored, "--json")
    assert result.returncode == 0, result.stderr
    (row,) = json.loads(result.stdout)["dead_prompts"]
    assert (row["prompts"], row["dead"], row["solved"]) == (1, 0, 1)
