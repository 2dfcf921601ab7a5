"""Rollouts of files are grouped by all that identifies a prompt, and a response counts once."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mutualrl.diagnostics.rollout_reader import read_rollouts
from mutualrl.errors import DataError

Row = Mapping[str, Any]


def jsonl(path: Path, rows: Sequence[Row]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def parquet(path: Path, rows: Sequence[Row]) -> Path:
    path = path.with_suffix(".parquet")
    pq.write_table(pa.Table.from_pylist([dict(row) for row in rows]), path)
    return path


def groups(*paths: Path, reward: str | None = None) -> dict[tuple[str, str], list[float]]:
    """Return the rewards of each policy and prompt."""
    found: dict[tuple[str, str], list[float]] = {}
    for row in read_rollouts(list(paths), reward).to_pylist():
        found.setdefault((row["policy"], row["prompt_id"]), []).append(row["reward"])
    return found


@pytest.mark.parametrize("write", [jsonl, parquet])
@pytest.mark.parametrize("field", ["id", "example_id", "doc_id"])
@pytest.mark.parametrize("environment", ["env_name", "env_id", "environment", "task", "data_source"])
def test_an_id_counts_within_its_environment(tmp_path: Path, write: Any, field: str, environment: str) -> None:
    rows = [
        {field: number, environment: name, "reward": reward, "policy": "a"}
        for name, reward in (("math", 1.0), ("code", 0.0))
        for number in (0, 1)
        for _ in range(2)
    ]
    expected = {
        ("a", f"{name}/{number}"): [reward] * 2 for name, reward in (("math", 1.0), ("code", 0.0)) for number in (0, 1)
    }
    assert groups(write(tmp_path / "r.jsonl", rows)) == expected


def test_ids_of_one_environment_stay_as_they_are(tmp_path: Path) -> None:
    files = [
        jsonl(tmp_path / f"{name}.jsonl", [{"id": "p", "task": "math", "reward": 1.0, "policy": name}]) for name in "ab"
    ]
    assert groups(*files) == {("a", "p"): [1.0], ("b", "p"): [1.0]}


def test_an_id_of_several_prompts_is_refused_with_what_to_add(tmp_path: Path) -> None:
    rows = [{"id": 0, "prompt": f"{name}?", "reward": 1.0} for name in ("a", "b")]
    with pytest.raises(
        DataError, match=r"prompt id '0' has several prompts: 'a\?' and 'b\?'.*column prompt_id.*env_name"
    ):
        read_rollouts([jsonl(tmp_path / "r.jsonl", rows)])


def test_a_text_with_another_space_is_the_same_prompt(tmp_path: Path) -> None:
    rows = [{"prompt": text, "reward": 1.0} for text in ("a b?", "a  b?", "a b?\r\n")]
    assert groups(jsonl(tmp_path / "r.jsonl", rows)) == {("r", "a b?"): [1.0] * 3}


def test_ids_of_rollouts_are_no_ids_of_prompts(tmp_path: Path) -> None:
    rows = [{"id": f"r{n}", "prompt": f"What is {n % 2}?", "reward": float(n % 2)} for n in range(8)]
    assert groups(jsonl(tmp_path / "r.jsonl", rows)) == {("r", "What is 0?"): [0.0] * 4, ("r", "What is 1?"): [1.0] * 4}


def trace(key: str, question: str, reward: float, **more: Any) -> Row:
    nodes = [
        {"parent": None, "message": {"role": "user", "content": question}},
        {"parent": 0, "message": {"role": "assistant", "content": "x"}, "sampled": True},
    ]
    return {"id": key, "task": {"type": "T", "data": {}}, "nodes": nodes, "rewards": {"r": {"score": reward}}, **more}


def test_the_id_of_a_trace_is_not_its_prompts(tmp_path: Path) -> None:
    rows = [trace(f"t{n}", f"q{n % 2}", float(n % 2)) for n in range(4)]
    assert groups(jsonl(tmp_path / "r.jsonl", rows)) == {("r", "q0"): [0.0, 0.0], ("r", "q1"): [1.0, 1.0]}
    keyed = [{**row, "task": {"type": "T", "data": {}, "key": f"k{n % 2}"}} for n, row in enumerate(rows)]
    assert sorted(groups(jsonl(tmp_path / "r.jsonl", keyed))) == [("r", "k0"), ("r", "k1")]


def test_traces_of_models_that_are_not_trained_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [
        trace("t0", "q", 1.0, agent={"name": "solver", "trainable": True, "config": {}}, calls=[{"model": "m"}]),
        trace("t1", "judge it", 1.0, agent={"name": "judge", "trainable": False, "config": {}}),
    ]
    assert groups(jsonl(tmp_path / "r.jsonl", rows)) == {("m", "q"): [1.0]}
    assert "r.jsonl: 1 rows are left out: of a model that is not trained" in capsys.readouterr().err


def test_the_steps_of_prime_rl_are_of_one_model_and_its_last_step_counts(tmp_path: Path) -> None:
    for step, reward in ((0, 0.0), (10, 1.0), (9, 0.5)):
        where = tmp_path / "qwen" / "rollouts" / f"step_{step}"
        jsonl(where / "train" / "math" / "traces.jsonl", [trace(f"t{step}", "q0", reward)])
        jsonl(where / "train" / "code" / "traces.jsonl", [trace(f"u{step}", "q1", reward)])
    assert groups(tmp_path / "qwen") == {("qwen", "q0"): [1.0], ("qwen", "q1"): [1.0]}


def test_two_verdicts_on_one_response_are_one_rollout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """lm-evaluation-harness writes a row per document and filter."""
    rows = [
        {"doc_id": n, "resps": [["x"]], "filter": name, "exact_match": score}
        for n in range(3)
        for name, score in (("strict-match", 0.0), ("flexible-extract", 1.0))
    ]
    for write in (jsonl, parquet):
        path = write(tmp_path / "samples.jsonl", rows)
        assert groups(path, reward="exact_match") == {("samples", str(n)): [0.0] for n in range(3)}
    assert (
        "3 rows are left out: of another filter than 'strict-match', on the same responses" in capsys.readouterr().err
    )


def test_a_run_that_can_teach_nothing_keeps_its_reward_and_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "x"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "y"},
    ]
    assert groups(jsonl(tmp_path / "r.jsonl", [{"messages": messages, "reward": 1.0}])) == {("r", "q"): [1.0]}
    said = "r.jsonl: 1 that are no run (1 with a result without a call before it): their rewards count"
    assert said in capsys.readouterr().err
