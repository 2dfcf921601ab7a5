"""User rewards: the example in the docs, and the message for a reward that fails."""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import PATIENCE, REPOSITORY, Cli
from made_runs import made_summary
from mutualrl.cli.results import show_summary
from mutualrl.errors import RewardError, UsageError
from mutualrl.launch.death import reward_failure
from mutualrl.records import Prompt
from mutualrl.see.liveness import Heartbeat, Phase
from mutualrl.storage.run_info import Validation, is_accuracy
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tasks.rewards import adapt, distinct_names, load_rewards, weighted
from mutualrl.tasks.scoring import score_rewards
from mutualrl.tasks.section import TaskSection


def test_docs_example_accepts_texts_and_conversations() -> None:
    page = (REPOSITORY / "docs" / "your-own.md").read_text()
    block = next(code for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def near" in code)
    names: dict[str, Any] = {}
    exec(block, names)
    near = names["near"]
    assert near(["it is 12", "no"], answer=["12", "3"]) == [1.0, 0.0]
    assert near(["it is 15", "5"], answer=["5", 5]) == [0.0, 1.0]
    assert near(["so 1,000", "1000.0", "x"], answer=["1000", "1,000", "Paris"]) == [1.0, 1.0, None]
    chats = [[{"role": "assistant", "content": text}] for text in ("it is 12", "no")]
    assert near(chats, answer=["12", "3"]) == [1.0, 0.0]


def test_error_in_a_reward_is_reported_with_file_and_line() -> None:
    def broken(completions: list[str], **columns: object) -> list[float]:
        raise KeyError("no such column")

    line = broken.__code__.co_firstlineno + 1
    with pytest.raises(RewardError, match=rf"KeyError: 'no such column' \(test_own_rewards.py, line {line}\)"):
        adapt(broken, "broken")(completions=["x"])


def test_the_built_in_reward_measures_accuracy_as_a_recipe_and_its_record_have_it() -> None:
    assert all(
        is_accuracy(reward) for reward in (None, "boxed", ["boxed"], ("boxed",), TaskSection(name="math").reward)
    )
    assert not any(is_accuracy(reward) for reward in ("r.py:f", ("boxed", "r.py:f"), []))


@pytest.mark.parametrize(("mean", "measure"), [(False, "Greedy accuracy"), (True, "Mean reward of greedy completions")])
def test_mean_reward_is_not_labelled_accuracy(mean: bool, measure: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Runs with tools have no boxed answer either way."""
    validation = Validation(n=6, accuracy=0.1, by_group={"all": 0.1}, no_box=None)
    show_summary(made_summary(validation, task="dataset", mean_reward=mean, resumed=mean), "runs/x")
    output = capsys.readouterr().out
    assert f"1 s {'since it was resumed' if mean else 'in total'}; the run is in runs/x" in output
    assert "texts taught" not in output and "waited" not in output, "one policy, taught nothing"
    assert f"{measure} on held-out dataset" in output
    header = next(line for line in output.splitlines() if "dead prompts" in line)
    assert header.count("all") == 1  # a single group is not shown twice


def leaves(completions: list[str], **columns: object) -> list[float]:
    sys.exit(0)


def ends(completions: list[str], **columns: object) -> list[float]:
    os._exit(0)


def loud(completions: list[str], **columns: object) -> list[float]:
    print("sample")
    return [1.0] * len(completions)


@pytest.mark.parametrize(
    ("function", "message"), [(leaves, r"called sys\.exit\(0\)"), (ends, r"called os\._exit\(0\)")]
)
def test_reward_that_ends_the_process_is_named(function: Any, message: str) -> None:
    with pytest.raises(RewardError, match=rf"reward function f: {message} \(test_own_rewards.py, line \d+\)"):
        adapt(function, "f")(completions=["x"])


def interrupts(completions: list[str], **columns: object) -> list[float]:
    raise KeyboardInterrupt


def test_keyboard_interrupt_of_a_reward_is_its_error() -> None:
    with pytest.raises(RewardError, match=r"reward function f: raised KeyboardInterrupt \(test_own_rewards.py"):
        adapt(interrupts, "f")(completions=["x"])


def test_reward_is_blamed_only_for_a_crash_while_it_runs(tmp_path: Path) -> None:
    phases: list[str] = []
    adapt(lambda completions, **_: [1.0], "f", phases.append, lambda: phases.append("returned"))(completions=["x"])
    assert phases == ["f", "returned"]
    run = RunDirectory(tmp_path)
    run.exchange.mkdir()
    heartbeat = Heartbeat(run.exchange, "ada")
    abort, segv = 128 + signal.SIGABRT, 128 + signal.SIGSEGV
    for phase, code, blamed in (
        (f"{Phase.SCORING}: reward function f", abort, True),
        (f"{Phase.SCORING}: reward function f", segv, True),
        (f"{Phase.SCORING}: reward function f", -signal.SIGKILL, False),  # the agent was killed
        (f"{Phase.SCORING}: reward function f", 128 + signal.SIGKILL, False),  # the rank was
        (f"{Phase.SCORING}: reward function f", 4, False),  # e.g. a full disk
        (Phase.SCORING, segv, False),  # it had returned
        ("updating", segv, False),
    ):
        heartbeat.set(phase)
        heartbeat.beat()
        assert (reward_failure(run, "ada", code) is not None) == blamed, (phase, code)


def test_ctrl_c_while_a_reward_runs_stays_an_interrupt() -> None:
    def waits(completions: list[str], **columns: object) -> list[float]:
        os.kill(os.getpid(), signal.SIGINT)
        return [1.0]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            adapt(waits, "f")(completions=["x"])
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_completion_that_no_function_scores_has_no_reward_and_others_the_sum_of_those_that_do() -> None:
    def first(completions: list[str], **columns: object) -> list[float | None]:
        return [None, None, 2.0]

    def second(completions: list[str], **columns: object) -> list[float | None]:
        return [None, 3.0, 5.0]

    functions = [adapt(function, function.__name__) for function in (first, second)]
    total = weighted(functions, ["first", "second"], [1.0, 0.5], {"completions": ["a", "b", "c"]})
    assert math.isnan(total[0])
    assert total[1:] == [1.5, 4.5]


def test_validation_counts_completions_without_a_reward() -> None:
    prompts = [Prompt(str(i), "x", "1", "all") for i in range(4)]
    validation = score_rewards(prompts, [1.0, math.nan, 0.5, math.nan])
    assert (validation.unscorable, validation.accuracy, validation.solved) == (2, 0.375, "1000")


def test_forked_child_of_a_reward_may_exit() -> None:
    def forks(completions: list[str], **columns: object) -> list[float]:
        child = os.fork()
        if child == 0:
            os._exit(7)
        return [float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))]

    assert adapt(forks, "forks")(completions=["x"]) == [7.0]


def test_prints_of_a_reward_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert adapt(loud, "loud")(completions=["x"]) == [1.0]
    assert capsys.readouterr() == ("", "sample\n")


def test_overlapping_async_rewards_restore_stdout_and_exit() -> None:
    order: list[str] = []

    async def slow(completions: list[str], **columns: object) -> list[float]:
        await asyncio.sleep(0.05)
        order.append("slow")
        return [1.0]

    async def quick(completions: list[str], **columns: object) -> list[float]:
        order.append("quick")
        return [2.0]

    async def both() -> list[Any]:
        return await asyncio.gather(adapt(slow, "slow")(completions=["x"]), adapt(quick, "quick")(completions=["x"]))

    before = (sys.stdout, os._exit)
    assert asyncio.run(both()) == [[1.0], [2.0]]
    assert order == ["quick", "slow"]
    assert (sys.stdout, os._exit) == before


@pytest.mark.parametrize(
    ("returned", "rewards"),
    [
        ([1, True, 0.5, None], [1.0, 1.0, 0.5, None]),
        ([math.nan, math.inf, -math.inf, 1e39], [None] * 4),
        (np.array([1, 2, 3, 4]), [1.0, 2.0, 3.0, 4.0]),
        ([np.float32(0.5), np.int64(2), np.bool_(True), 0], [0.5, 2.0, 1.0, 0.0]),
        ((value for value in (1, 2, 3, 4)), [1.0, 2.0, 3.0, 4.0]),
    ],
)
def test_rewards_are_floats_or_unscorable(returned: Any, rewards: list[float | None]) -> None:
    assert adapt(lambda completions, **_: returned, "f")(completions=["x"] * 4) == rewards


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (["1", "2"], "returned str '1' for completion 0, expected a number or None"),
        ([1.0, 1j], "returned complex 1j for completion 1"),
        ([1.0], "1 rewards for 2 completions, expected one each"),
        (None, "returned NoneType None, expected a list of 2 numbers"),
        ("ab", "returned str 'ab', expected a list of 2 numbers"),
        ({"a": 1, "b": 2}, "returned dict"),
    ],
)
def test_result_that_is_not_rewards_is_refused(returned: Any, message: str) -> None:
    with pytest.raises(RewardError, match=re.escape(message)):
        adapt(lambda completions, **_: returned, "f")(completions=["x", "y"])


def test_infinite_reward_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    function = adapt(lambda completions, **_: [-math.inf, 1.0], "log_score_said_once")
    function(completions=["x", "y"])
    function(completions=["x", "y"])
    errors = capsys.readouterr().err
    assert errors.count("reward function log_score_said_once: returned float -inf for 1 of 2 completions") == 1


def test_rewards_under_one_name_get_their_own(tmp_path: Path) -> None:
    code = "import functools\ndef constant(completions, value, **_): return [value] * len(completions)\n"
    code += "low = functools.partial(constant, value=0.25)\nhigh = functools.partial(constant, value=0.75)\n"
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(code)

    def names(*paths: str) -> list[str]:
        return [function.__name__ for function in load_rewards([f"{tmp_path}/{path}" for path in paths])]

    assert names("a.py:low") == ["constant"]
    assert names("a.py:low", "a.py:high") == ["low", "high"]
    assert names("a.py:low", "b.py:low") == ["a.low", "b.low"]
    with pytest.raises(UsageError, match="is listed twice"):
        names("a.py:low", "a.py:low")
    assert distinct_names(["f", "g", "f"]) == ["f 1", "g", "f 2"]


@pytest.mark.slow
def test_reward_that_swallows_everything_ends_with_its_process(tmp_path: Path) -> None:
    (tmp_path / "stuck.py").write_text(
        "def stuck(completions, **_):\n"
        "    while True:\n"
        "        try:\n"
        "            while True: pass\n"
        "        except BaseException: pass\n"
    )
    code = (
        "from mutualrl.process import limits; limits.REPEAT_SECONDS = 0.05\n"
        "from mutualrl.tasks.rewards import load_rewards, weighted\n"
        f"weighted(load_rewards('{tmp_path}/stuck.py:stuck'), ['stuck'], [1.0], {{'completions': ['x']}}, 0.1)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE)
    assert result.returncode == RewardError.exit_code
    assert "reward function stuck: no progress for 0.1 s" in result.stderr.splitlines()[-1]


class OwnError(BaseException):
    """An exception that is no Exception."""


def raises_its_own(completions: list[str], **columns: object) -> list[float]:
    raise OwnError("mine")


def test_an_exception_that_is_none_is_named() -> None:
    with pytest.raises(
        RewardError, match=r"reward function raises_its_own: OwnError: mine \(test_own_rewards.py, line"
    ):
        adapt(raises_its_own, "raises_its_own")(completions=["x"])


def test_what_a_reward_changes_of_the_process_is_put_back() -> None:
    """Its random numbers are its own, and the same where ours are the same."""
    drawn: list[tuple[float, float]] = []

    def changes(completions: list[str], **columns: object) -> list[float]:
        drawn.append((random.random(), float(torch.rand(()))))
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        torch.set_grad_enabled(False)
        return [1.0] * len(completions)

    def state() -> tuple[object, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()

    for _ in range(2):
        random.seed(5)
        np.random.seed(5)
        torch.manual_seed(5)
        before = state()
        adapt(changes, "changes")(completions=["x"])
        assert state() == before
        assert (torch.get_default_dtype(), torch.is_grad_enabled()) == (torch.float32, True)
        random.random()
        adapt(changes, "changes")(completions=["x"])
    assert drawn[0] == drawn[2] != drawn[1] == drawn[3]


EVALUATED = """
import os, posix, threading, time

def leaves_a_thread(completions, **_):
    threading.Thread(target=time.sleep, args=(600,)).start()
    return [1.0] * len(completions)

def ends(completions, **_):
    posix._exit(0)

def becomes_another(completions, **_):
    os.execv("/bin/true", ["true"])

def huge(completions, **_):
    return [10**400] * len(completions)

def forks(completions, **_):
    os.fork()
    return [1.0] * len(completions)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reward", "code", "said"),
    [
        ("leaves_a_thread", 0, ""),
        ("forks", 0, "a process that a reward function forked returned from it"),
        ("ends", 1, "ended without a result"),
        ("becomes_another", 1, "ended without a result"),
        ("huge", 1, "no completion of task 'arithmetic' has a reward"),
    ],
)
def test_eval_has_a_result_or_an_exit_code(cli: Cli, tmp_path: Path, reward: str, code: int, said: str) -> None:
    (tmp_path / "own.py").write_text(EVALUATED)
    (tmp_path / "p.yaml").write_text(
        "policies: [{name: a, model: 'tiny:ada'}, {name: b, model: 'tiny:bob'}]\n"
        f"task: {{name: arithmetic, reward: 'own.py:{reward}'}}\n"
    )
    result = cli("eval", "--pool", "p.yaml", "--limit", "2", "--max-new-tokens", "4", "--json", timeout=300)
    assert (result.returncode, said in result.stderr) == (code, True), result.stderr
    value = json.loads(result.stdout)
    if code:
        assert value["error"]["kind"] == "reward"
    else:
        assert {name: model["accuracy"] for name, model in value["models"].items()} == {"a": 1.0, "b": 1.0}
