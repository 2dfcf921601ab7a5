"""SIGKILL from outside at every named point of a run; the finished run must equal an undisturbed one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from conftest import PATIENCE, make_once
from mutualrl.tasks import TaskSource, get_task
from runs import SHORT, FinishedRun, Run, members, stop_at, stopped, verify_intact, wait_until

LOGS = ("rescues.jsonl", "samples.jsonl")


class Kind(NamedTuple):
    """A kind of run. `of`: options of `train`; `policies`: the second one is killed; `logs`: files that must be equal
    and not empty; `keys`: metrics that must be equal."""

    of: tuple[str, ...]
    policies: tuple[str, str]
    keys: tuple[str, ...]
    logs: tuple[str, ...] = LOGS


def hinted(*options: str) -> tuple[str, ...]:
    """Return the options of a run of `hinted`, with two samples per hint."""
    return ("--regime", "hinted", "--set", "regime.samples=2", *options)


#: an environment whose reset depends on its row only, and which is the judge
ROOM = '''
from mutualrl.tasks.calculator import calculate as compute


class Room:
    def reset(self, answer: str = "", **row) -> None:
        self.answer, self.result = answer, None

    def calculate(self, operation: str, a: int, b: int) -> int:
        """Calculate.

        Args:
            operation: Either plus or times.
            a: First.
            b: Second.
        """
        self.result = compute(operation, a, b)
        return self.result

    def get_reward(self) -> float:
        return float(str(self.result) == self.answer)
'''
#: replaced by a file with ROOM
ROOM_FILE = "ROOM_FILE"
#: replaced by a file with 16 problems, all of them in every round
ROWS_FILE = "ROWS_FILE"
RECURRING = (
    *("--set", "task.name=dataset", "--set", f"task.data={ROWS_FILE}", "--set", f"task.validation_data={ROWS_FILE}"),
    *("--set", "task.tools=mutualrl.tasks.calculator:calculate"),
)
IN_A_ROOM = ("--set", f"task.environment={ROOM_FILE}:Room", "--set", "task.tools=[]", "--set", "task.reward=[]")
TAUGHT = ("loss", "reward", "num_tokens", "ppo_kl", "hinted/samples", "hinted/confirmed")
CALLED = (*TAUGHT, "tools/turns", "tools/over_calls", "tools/call_frequency")
KINDS: dict[str, Kind] = {
    "text": Kind(
        ("--regime", "sgt", "--pool", "tiny"),
        ("ada", "bob"),
        ("loss", "reward", "sgt/pairs", "see/bytes", "num_tokens", "ppo_kl"),
    ),
    "fsdp2": Kind(
        (
            *("--regime", "sgt", "--pool", "tiny", "--set", "launch.strategy=fsdp2", "--set", "launch.processes=2"),
            *("--set", "trainer.per_device_train_batch_size=16"),
        ),
        ("ada", "bob"),
        ("loss", "reward", "sgt/pairs", "see/bytes", "num_tokens", "ppo_kl"),
    ),
    "tools": Kind(hinted("--pool", "tiny-tools"), ("jan", "kim"), CALLED),
    "environment": Kind(hinted("--pool", "tiny-tools", *IN_A_ROOM), ("jan", "kim"), CALLED),
    "learnt runs": Kind(
        ("--regime", "sgt", "--pool", "tiny-tools", *RECURRING, "--set", "regime.memory=2"),
        ("jan", "kim"),
        ("loss", "reward", "num_tokens", "ppo_kl", "sgt/pairs", "sgt/unrenderable", "tools/turns"),
    ),
    "replayed runs": Kind(
        ("--regime", "guided", "--pool", "tiny-tools", *RECURRING, *IN_A_ROOM),
        ("jan", "kim"),
        ("loss", "reward", "num_tokens", "replays/made", "guided/guided_reward", "guided/prefix_tokens"),
        LOGS[1:],
    ),
    "hints": Kind(hinted("--pool", "tiny-hints"), ("hal", "ivy"), (*TAUGHT, "hinted/hint_nll"), LOGS[:1]),
    "hints by gradient": Kind(
        hinted("--pool", "tiny-hints", "--set", "regime.loss=policy_gradient"), ("hal", "ivy"), TAUGHT, LOGS[:1]
    ),
}

#: kills of one run, in order: the point (of a process of the second policy), the victim (the worker at the point, its
#: agent or the supervisor), and how often the process passes the point before
Kills = tuple[tuple[str, str, int], ...]
CHAINS: dict[str, Kills] = {
    "exchange": (
        ("before-shard", "worker", 2),
        ("mid-shard", "worker", 0),
        ("mid-shard", "supervisor", 0),
        ("between-shard-and-marker", "worker", 0),
        ("between-shard-and-marker", "supervisor", 0),
        ("after-marker", "worker", 0),
        ("in-the-wait", "worker", 0),
        ("in-the-wait", "supervisor", 0),
        ("in-the-wait", "agent", 0),
        ("checkpoint-marked", "agent", 0),
        ("checkpoint-latest", "worker", 0),
    ),
    "checkpoint": (
        ("checkpoint-begin", "worker", 0),
        ("checkpoint-marked", "supervisor", 0),
        ("checkpoint-files", "worker", 0),
        ("checkpoint-summed", "worker", 0),
        ("checkpoint-renamed", "worker", 0),
        ("in-validation", "worker", 0),
        ("before-the-result", "supervisor", 0),
    ),
    "training": (
        ("in-generation", "worker", 1),
        ("in-the-loss", "worker", 3),
        ("checkpoint-written", "worker", 0),
        ("checkpoint-half-pruned", "supervisor", 0),
        ("model-staged", "worker", 0),
        ("model-committed", "worker", 0),
        ("before-the-result", "worker", 0),
    ),
    "last checkpoint": (
        ("checkpoint-marked", "worker", 1),
        ("checkpoint-half-pruned", "worker", 0),
    ),
}
SINGLE: Kills = (("mid-shard", "worker", 2),)
#: rounds have 64 rollouts, of which kim calls the tool for about half; the second kill is in the samples, which follow
IN_CALLS: Kills = (("in-a-tool-call", "worker", 100), ("in-a-tool-call", "supervisor", 45))
#: TRL generates twice per round: own rollouts, then the samples with hints
IN_SAMPLES: Kills = (("in-generation", "worker", 3), ("after-generation", "supervisor", 1))


#: after a replay's calls, in the second round and in the third
IN_REPLAYS: Kills = (("in-a-replay", "worker", 3), ("in-a-replay", "supervisor", 12))

#: in a call of the second round, and in an update with rows learnt of a run
IN_UPDATES: Kills = (("in-a-tool-call", "worker", 40), ("in-the-loss", "supervisor", 3))


def case(kind: str, name: str, kills: Kills, *marks: pytest.MarkDecorator) -> object:
    return pytest.param(KINDS[kind], kills, id=f"{kind}: {name}", marks=marks)


CASES = [
    case("text", "single", SINGLE, pytest.mark.slow),
    case("tools", "calls", IN_CALLS, pytest.mark.slow),
    case("environment", "calls", IN_CALLS, pytest.mark.extended),
    case("replayed runs", "replays", IN_REPLAYS, pytest.mark.extended),
    case("learnt runs", "updates", IN_UPDATES, pytest.mark.release),
    case("hints", "samples", IN_SAMPLES, pytest.mark.release),
    case("hints by gradient", "samples", IN_SAMPLES, pytest.mark.release),
    *(
        case(kind, name, kills, pytest.mark.release)
        for kind in ("text", "fsdp2", "tools")
        for name, kills in CHAINS.items()
    ),
]


@pytest.fixture
def unbroken_of(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Callable[[Kind], FinishedRun]:
    """Return the undisturbed run of a kind, made once."""

    def run_of(kind: Kind) -> FinishedRun:
        if kind is KINDS["text"]:
            return request.getfixturevalue("unbroken")

        def make(directory: Path) -> None:
            run = Run(directory, *SHORT, *options_of(kind, directory), of=())
            assert run.process.wait(PATIENCE) == 0, run.errors.read_text()[-3000:]

        (name,) = [name for name, each in KINDS.items() if each is kind]
        return FinishedRun(make_once(tmp_path_factory, f"unbroken {name}".replace(" ", "-"), make))

    return run_of


def options_of(kind: Kind, directory: Path) -> list[str]:
    """Return its options, with the files of the environment and of the problems where they name them."""
    files = {ROOM_FILE: directory / "room.py", ROWS_FILE: directory / "rows.jsonl"}
    files[ROOM_FILE].write_text(ROOM)
    problems = get_task("calculator").read("train", TaskSource()).prompts[:16]
    rows = [{"prompt": [{"role": "user", "content": each.text}], "answer": each.answer} for each in problems]
    files[ROWS_FILE].write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = []
    for option in kind.of:
        for name, path in files.items():
            option = option.replace(name, str(path))  # noqa: PLW2901
        options.append(option)
    return options


def assert_equals_undisturbed(kind: Kind, run: Run, unbroken: FinishedRun) -> None:
    assert not members(run.path)
    assert verify_intact(run.path)["damaged"] == []
    assert run.weights() == unbroken.weights()
    assert len(run.weights()) == 2
    for policy in kind.policies:
        rows = run.metrics(policy)
        assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
        assert [row["see/round"] for row in rows if "see/round" in row] == [0, 1, 2]  # each round used once
        expected = unbroken.metrics(policy)
        for log in kind.logs:
            logs = [each.path / "policies" / policy / log for each in (run, unbroken)]
            assert logs[0].read_bytes() == logs[1].read_bytes() != b""  # each text and each sample once
        for key in kind.keys:
            assert [row.get(key) for row in rows] == [row.get(key) for row in expected], key
    for key in kind.keys:
        assert any(key in row for policy in kind.policies for row in unbroken.metrics(policy)), key


def kill(run: Run, victim: str, worker: psutil.Process, environment: dict[str, str]) -> None:
    """Kill the stopped worker, its agent, or the supervisor; after the supervisor, resume the run."""
    if victim == "supervisor":
        run.process.kill()
        run.process.wait()
        wait_until(lambda: not members(run.path))
        run.begin("--resume", **environment)
    else:
        (worker if victim == "worker" else worker.parent()).kill()


@pytest.mark.parametrize(("kind", "kills"), CASES)
def test_killed_runs_equal_an_undisturbed_run(
    unbroken_of: Callable[[Kind], FinishedRun],
    tmp_path: Path,
    kind: Kind,
    kills: Kills,
    record_property: Callable[[str, object], None],
) -> None:
    record_property("kills", json.dumps(kills))  # read by benchmarks/kill_matrix.py
    unbroken = unbroken_of(kind)
    victim_policy = kind.policies[1]
    environment = stop_at(*(f"{point}:{victim_policy}:{nth}" for point, _, nth in kills), mark=tmp_path / "mark")
    options = (*SHORT, "--set", "run.max_restarts=9", *options_of(kind, tmp_path))
    run = Run(tmp_path, *options, of=(), **environment)
    try:
        for number, (_, victim, _) in enumerate(kills):
            kill(run, victim, stopped(tmp_path / "mark", run, number), environment)
        assert run.process.wait(PATIENCE) == 0, run.errors.read_text()
        assert_equals_undisturbed(kind, run, unbroken)
    finally:
        run.end()
