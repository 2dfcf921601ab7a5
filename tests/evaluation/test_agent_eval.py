"""Evaluations and diagnostics of agents: TRL's loop with a task's tools, or its environment, outside of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from conftest import Cli
from mutualrl.trajectory import Trajectory

pytestmark = pytest.mark.slow
ROOM = '''
from mutualrl.tasks.calculator import calculate as compute


class Room:
    """Environment whose calculator is its own, and whose reward is that of the last box."""

    def reset(self, answer: str = "", **row) -> None:
        self.answer, self.results = answer, []

    def calculate(self, operation: str, a: int, b: int) -> int:
        """Calculate.

        Args:
            operation: Either plus or times.
            a: First.
            b: Second.
        """
        self.results.append(compute(operation, a, b))
        return self.results[-1]

    def get_reward(self) -> float:
        return float(str(self.results[-1] if self.results else "") == self.answer)
'''


def evaluated(cli: Cli, *arguments: str | Path) -> dict[str, Any]:
    done = cli("eval", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result["models"]


def test_trained_agents_are_evaluated_as_their_run_validated_them(tmp_path: Path, cli: Cli) -> None:
    run = tmp_path / "run"
    short = ("--steps", "2", "--set", "run.validation_limit=192", "--no-report")
    done = cli("train", "--regime", "hinted", "--pool", "tiny-tools", *short, "--run-dir", run)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run / "summary.json").read_text())["policies"]
    models = evaluated(cli, "--run", run)
    for name in ("jan", "kim"):
        assert models[name]["n"] == 192
        assert models[name]["accuracy"] == pytest.approx(summary[name]["validation"]["accuracy"])
    before = evaluated(cli, "--run", run, "--initial")
    assert before["jan"]["accuracy"] == pytest.approx(summary["jan"]["initial_validation"]["accuracy"])


def test_runs_of_an_evaluation_are_stored_with_their_turns(tmp_path: Path, cli: Cli) -> None:
    arguments = ("--pool", "tiny-tools", "--limit", "12", "--samples", "2", "--out", tmp_path / "out")
    first = evaluated(cli, *arguments)
    assert evaluated(cli, *arguments) == first  # from the stored rows
    rows = pq.read_table(next((tmp_path / "out" / "completions").glob("kim/*.parquet"))).to_pylist()
    assert len(rows) == 24
    by_group = {
        group: [Trajectory.of_json(row["messages"]).messages for row in rows if row["group"] == group]
        for group in ("plus", "times")
    }
    assert all(Trajectory(tuple(run)).calls for run in by_group["times"])
    assert not any(Trajectory(tuple(run)).calls for run in by_group["plus"])  # kim guesses
    for row in rows:
        assert row["y_text"] == "\n".join(
            m.text for m in Trajectory.of_json(row["messages"]).messages if m.role == "assistant" and m.text
        )
        assert 0 < row["tokens"] <= len(row["token_ids"])


def test_agents_are_evaluated_in_an_environment_that_owns_the_reward(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "room.py").write_text(ROOM)
    policies = [{"name": name, "model": f"tiny:{name}"} for name in ("jan", "kim")]
    task = {"name": "calculator", "environment": f"{tmp_path / 'room.py'}:Room", "tools": [], "reward": []}
    keys = {"max_completion_length": 64}
    (tmp_path / "pool.yaml").write_text(yaml.safe_dump({"policies": policies, "task": task, "trainer": keys}))
    models = evaluated(cli, "--pool", tmp_path / "pool.yaml", "--limit", "24")
    groups = {name: models[name]["by_group"] for name in models}
    assert groups["jan"]["plus"] == groups["kim"]["times"] == 1
    assert groups["jan"]["times"] == 0
    assert groups["jan"]["repeat"] == groups["kim"]["repeat"] == 0  # this environment wants a call
    found = cli("complementarity", "--pool", tmp_path / "pool.yaml", "--prompts", "12", "--samples", "2", "--json")
    assert found.returncode == 0, found.stderr
    result = json.loads(found.stdout)
    assert result["recommended"] == "hinted"
    assert result["settings"] == {"hint": "plan"}
    assert result["recommendation"].startswith("hinted --set regime.hint=plan: its gate would open")
