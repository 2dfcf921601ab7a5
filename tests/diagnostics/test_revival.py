"""What a file would revive: only what the model can learn, recounted with the tokenizer alone."""

from __future__ import annotations

import json
import re
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


def test_an_own_reward_judges_texts_beside_a_dump(cli_here: Cli, tmp_path: Path) -> None:
    """As the printed advice says; one that takes a tokenizer's ids is refused with what works."""
    asked = [f"{number}+1?" for number in range(8)]
    rows = [{"prompt": prompt, "completion": "x", "reward": 0.0} for prompt in asked for _ in range(2)]
    write(tmp_path / "dump.jsonl", rows)
    write(tmp_path / "rows.jsonl", [{"prompt": each, "gold": str(n + 1)} for n, each in enumerate(asked)])
    write(tmp_path / "book.jsonl", [{"prompt": each, "solution": str(n + 1)} for n, each in enumerate(asked)])
    (tmp_path / "own.py").write_text(
        "def exact(completions, gold, **_):\n    return [float(c == g) for c, g in zip(completions, gold)]\n"
        "def by_ids(completions, completion_ids, **_):\n    return [float(len(ids)) for ids in completion_ids]\n"
    )
    command = ("complementarity", "--rollouts", "dump.jsonl", "--source", "book=recorded:book.jsonl", "--json")
    task = ("--task", "dataset", "--data", "rows.jsonl", "--set", "task.answer=gold")
    result = cli_here(*command, *task, "--set", "task.reward=own.py:exact")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["sources"][0]["confirmed"] == 7  # one prompt is held out
    refused = cli_here(*command, *task, "--set", "task.reward=own.py:by_ids")
    assert refused.returncode == 2
    assert "own.py:by_ids: takes completion_ids" in refused.stderr
    assert "--model MODEL, without --rollouts" in refused.stderr


def test_a_missing_file_and_too_many_new_tokens_are_said_before_sampling(cli_here: Cli) -> None:
    missing = cli_here("complementarity", "--model", "tiny:ada", "--source", "x=recorded:nofile.jsonl")
    assert (missing.returncode, "recorded texts not found: " in missing.stderr) == (2, True)
    assert "sampling" not in missing.stdout + missing.stderr
    long = cli_here("complementarity", "--model", "tiny:ada", "--source", "book=recorded:tiny:book")
    (room,) = re.findall(r"expected at most (\d+): --max-new-tokens \1", long.stderr)
    fits = ("--max-new-tokens", room, "--samples", "1", "--prompts", "2")
    result = cli_here("complementarity", "--model", "tiny:ada", "--source", "book=recorded:tiny:book", *fits)
    assert result.returncode == 0, result.stderr


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


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("completion", "padding", "recommended", "expected"),
    [
        ("x" * 40, 11_500, "none", ("0", "23")),
        ("x" * 40, 0, "sgt", ("23", "0")),
        (None, 0, "none", ("unknown", "unknown")),
    ],
)
def test_a_dump_without_a_tokenizer_bounds_what_can_be_learnt_by_its_longest_rollout(
    cli_here: Cli, tmp_path: Path, completion: str | None, padding: int, recommended: str, expected: tuple[str, str]
) -> None:
    tasks = [{"prompt": f"{i}+1?", "answer": str(i + 1)} for i in range(32)]
    rows = write(tmp_path / "rows.jsonl", list(tasks))
    texts = [{"prompt": row["prompt"], "completion": "y" * padding + f"\\boxed{{{row['answer']}}}"} for row in tasks]
    book = write(tmp_path / "book.jsonl", list(texts))
    written = {} if completion is None else {"completion": completion}
    dump = write(
        tmp_path / "dump.jsonl",
        [{"prompt": row["prompt"], "reward": float(n % 4 == 0), **written} for n, row in enumerate(tasks)],
    )
    options = ("--rollouts", dump, "--source", f"book=recorded:{book}", "--task", "dataset", "--data", rows)
    result = cli_here("complementarity", *options)
    assert result.returncode == 0, result.stderr
    found = json.loads(cli_here("complementarity", *options, "--json").stdout)
    (row,) = found["revival"]
    cells = [
        cell.strip()
        for cell in next(
            each for each in result.stdout.splitlines() if each.startswith("| dump") and "book" in each
        ).split("|")
    ]
    assert (cells[5], cells[7]) == expected, cells
    assert (row["known"], row["bound"]) == (completion is not None, None if completion is None else 40)
    assert found["recommended"] == recommended
    if completion is None:
        assert "can learn of the texts is unknown, and nothing is recommended on it" in found["recommendation"]
    else:
        assert "more characters than its longest rollout (dump 40)" in " ".join(result.stdout.split())
        assert ("by their length in characters alone" in found["recommendation"]) == (recommended == "sgt")
    if padding:
        assert "has written no rollout as long as the confirmed texts of book on 23 dead prompts" in result.stdout


def test_runs_that_only_an_environment_could_judge_are_not_called_verified(cli_here: Cli, tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(
        "class Game:\n    def reset(self, **row): pass\n    def get_reward(self) -> float: return 0.0\n"
        '    def move(self, to: int) -> str:\n        """Move.\n\n        Args:\n            to: Where.\n        """\n'
        "        return 'wrong'\n"
    )
    tasks = [{"prompt": f"{i}?", "answer": str(i)} for i in range(32)]
    rows = write(tmp_path / "rows.jsonl", list(tasks))
    call = {"id": "1", "function": {"name": "move", "arguments": {"to": 99}}}
    runs: list[dict[str, object]] = [
        {
            "messages": [
                {"role": "user", "content": row["prompt"]},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "1", "content": "won"},
                {"role": "assistant", "content": "I won"},
            ]
        }
        for row in tasks
    ]
    book = write(tmp_path / "book.jsonl", runs)
    dump = write(
        tmp_path / "dump.jsonl", [{"prompt": row["prompt"], "reward": 0.0, "completion": "x"} for row in tasks]
    )
    options = ("--rollouts", dump, "--source", f"book=recorded:{book}", "--task", "dataset", "--data", rows)
    keys = ("--set", "task.environment=game.py:Game", "--set", "task.reward=[]")
    result = cli_here("complementarity", *options, *keys)
    assert result.returncode == 0, result.stderr
    assert "Recorded texts, not verified" in result.stdout
    assert "Recorded texts, verified" not in result.stdout
    assert " by the file, not verified |" in result.stdout
    assert "if what their file says of them is true: nothing here has acted them" in " ".join(result.stdout.split())


def test_rollouts_on_held_out_prompts_are_called_so(cli_here: Cli, tmp_path: Path) -> None:
    tasks = [{"prompt": f"{i} plus one?", "answer": str(i + 1)} for i in range(64)]
    rows = write(tmp_path / "rows.jsonl", list(tasks))
    texts = [{"prompt": row["prompt"], "completion": f"\\boxed{{{row['answer']}}}"} for row in tasks]
    book = write(tmp_path / "book.jsonl", list(texts))
    other: dict[str, object] = {"prompt": "another question", "reward": 0.0, "completion": "x" * 40}
    dump = write(
        tmp_path / "dump.jsonl",
        [other, *({"prompt": row["prompt"], "reward": 0.0, "completion": "x" * 40} for row in tasks)],
    )
    options = ("--rollouts", dump, "--source", f"book=recorded:{book}", "--task", "dataset", "--data", rows)
    result = cli_here("complementarity", *options, "--set", "task.hold_out=0.25")
    assert result.returncode == 0, result.stderr
    assert "rollouts that are left out: 16 held out for validation, 1 not the task's" in result.stderr


def test_a_length_beyond_the_models_context_is_no_cure(cli_here: Cli, tmp_path: Path) -> None:
    tasks = [{"prompt": f"{i} plus one?", "answer": str(i + 1)} for i in range(32)]
    rows = write(tmp_path / "rows.jsonl", list(tasks))
    texts = [{"prompt": row["prompt"], "completion": "y" * 11_000 + f"\\boxed{{{row['answer']}}}"} for row in tasks]
    book = write(tmp_path / "book.jsonl", list(texts))
    options = ("--model", "tiny:ada", "--source", f"book=recorded:{book}", "--task", "dataset", "--data", rows)
    result = cli_here("complementarity", *options, "--samples", "1", "--prompts", "8", "--max-new-tokens", "8")
    said = " ".join(result.stdout.split())
    assert "positions" in said, said
    assert "would do" not in said
