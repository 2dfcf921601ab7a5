"""Two policies in training scripts of their own: `examples/two_scripts.py`, started as its header says."""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from endpoint import Endpoint, served, teacher
from trl import GRPOConfig

from conftest import PATIENCE, REPOSITORY, Cli, on_core, xdist_worker_number
from mutualrl.errors import PlanMismatchError, RunDirectoryError, SourceLostError, UsageError
from mutualrl.records import Rollout
from mutualrl.regimes import get_regime
from mutualrl.see import Exchange, Heartbeat, MissingPeers
from mutualrl.sources.answers import read_account
from mutualrl.sources.script import served_source
from mutualrl.storage.accounts import Account
from mutualrl.storage.rundir import RunDirectory, hold
from mutualrl.training import MutualGRPOTrainer, Sharing
from mutualrl.training.member import Member
from mutualrl.training.script_callback import ScriptRun, ScriptRunCallback, cut_after
from runs import wait_until

SCRIPT = str(REPOSITORY / "examples" / "two_scripts.py")
STEPS = 8


class Scripts:
    """The scripts of one run, each in a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, policy: str, *arguments: str, program: tuple[str, ...] = ()) -> subprocess.Popen[bytes]:
        """Start the script of a policy, under `program` (a launcher)."""
        command = [sys.executable, *program, SCRIPT, policy, "--steps", str(STEPS), *arguments]
        with on_core(xdist_worker_number()), (self.directory / f"{policy}.log").open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.directory, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self.processes.append(process)
        return process

    def finish(self) -> None:
        """Wait for all scripts that have not been killed; fail if one failed."""
        for process in self.processes:
            assert process.wait(PATIENCE) in (0, -signal.SIGKILL), self.logs()

    def logs(self) -> str:
        return "".join(path.read_text() for path in sorted(self.directory.glob("*.log")))

    @property
    def run(self) -> Path:
        return self.directory / "runs" / "two-scripts"

    def lines(self, policy: str, name: str = "metrics.jsonl") -> list[dict[str, object]]:
        path = self.directory / "runs" / "two-scripts" / "policies" / policy / name
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def weights(self) -> dict[str, str]:
        """Return the sha256 of each policy's trained weights."""
        models = self.directory.glob("checkpoints/*/trained/model.safetensors")
        return {path.parts[-3]: hashlib.sha256(path.read_bytes()).hexdigest() for path in models}


@pytest.fixture
def scripts(tmp_path: Path) -> Iterator[Scripts]:
    started = Scripts(tmp_path)
    yield started
    for process in started.processes:
        process.kill()


@pytest.mark.extended
@pytest.mark.slow
def test_killed_script_resumes_while_its_peer_waits_and_ends_in_the_same_weights(
    scripts: Scripts, tmp_path_factory: pytest.TempPathFactory, cli: Cli
) -> None:
    undisturbed = Scripts(tmp_path_factory.mktemp("undisturbed"))
    for policy in ("ada", "bob"):
        undisturbed.start(policy)
    undisturbed.finish()
    ada = scripts.start("ada")
    wait_until(lambda: "waiting for bob, which has published nothing yet. Start its script" in scripts.logs())
    bob = scripts.start("bob")
    wait_until(lambda: len(scripts.lines("bob")) >= 2)
    bob.kill()  # before its first checkpoint
    bob.wait()
    assert not list(scripts.directory.glob("checkpoints/bob/checkpoint-*"))
    scripts.start("bob", "--resume")
    wait_until(lambda: "there is no checkpoint in checkpoints/bob yet: training starts at step 0" in scripts.logs())
    wait_until(lambda: len(scripts.lines("ada")) >= 7)  # past the checkpoint of step 5
    ada.kill()
    ada.wait()
    scripts.start("ada", "--resume")
    scripts.finish()
    for policy in ("ada", "bob"):
        assert [line["step"] for line in scripts.lines(policy)] == list(range(1, STEPS + 1))
        assert scripts.lines(policy, "rescues.jsonl") == undisturbed.lines(policy, "rescues.jsonl") != []
    assert scripts.weights() == undisturbed.weights()
    assert set(scripts.weights()) == {"ada", "bob"}

    run = scripts.directory / "runs" / "two-scripts"
    (row,) = json.loads(cli("runs", "ls", run, "--json").stdout)["runs"]
    assert (row["state"], row["regime"], row["steps"]) == ("finished", "sgt", STEPS)
    assert json.loads(cli("runs", "verify", run, "--json").stdout)["damaged"] == []
    assert "has finished; its scripts measure no accuracy" in cli("watch", run).stdout
    report = cli("report", run, "--json", MUTUALRL_REPORT="1")
    assert "was trained by scripts" in Path(json.loads(report.stdout)["page"]).read_text()
    refused = cli("complementarity", "--run", run)
    assert (refused.returncode, "trained by scripts (Sharing.over)" in refused.stderr) == (2, True)


@pytest.mark.extended
@pytest.mark.slow
def test_a_served_model_is_asked_by_one_script_for_both_and_by_the_other_once_that_is_killed(
    scripts: Scripts, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The script that asks is killed while its questions are in flight: the other takes over, and a question is asked
    again only where it was in flight. Weights and rescues are those of an undisturbed run."""
    pytest.importorskip("openai")
    undisturbed = Scripts(tmp_path_factory.mktemp("undisturbed"))
    with served(Endpoint(teacher)) as endpoint:
        for policy in ("ada", "bob"):
            undisturbed.start(policy, "--served", endpoint.url)
        undisturbed.finish()
        questions = endpoint.seeds()
    assert set(questions.values()) == {1}, "one member asks for both"
    with served(Endpoint(teacher, delay=0.05)) as endpoint:
        ada = scripts.start("ada", "--served", endpoint.url)
        wait_until((scripts.run / "sources" / "teacher" / "lock").exists)
        scripts.start("bob", "--served", endpoint.url)
        wait_until(lambda: len(scripts.lines("ada")) >= 6 and endpoint.in_flight > 0)
        ada.kill()
        ada.wait()
        wait_until(lambda: str(scripts.processes[1].pid) in (scripts.run / "sources/teacher/lock").read_text())
        scripts.start("ada", "--served", endpoint.url, "--resume")
        scripts.finish()
        assert set(endpoint.seeds()) == set(questions)
        assert sum(endpoint.seeds().values()) <= len(questions) + 8  # those in flight
    assert scripts.weights() == undisturbed.weights()
    for policy in ("ada", "bob"):
        rescues = scripts.lines(policy, "rescues.jsonl")
        assert rescues == undisturbed.lines(policy, "rescues.jsonl")
        assert "teacher" in {row["peer"] for row in rescues}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"after": "book"}, "found after, which only a recipe can have"),
        ({"sample": 2}, "sample: Extra inputs are not permitted"),
        ({"api_key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is not set"),
    ],
)
def test_what_a_served_source_of_a_script_cannot_have_is_refused(keys: dict[str, Any], message: str) -> None:
    pytest.importorskip("openai")
    with pytest.raises(UsageError, match=message):
        served_source("teacher", "http://127.0.0.1:9/v1", [{"prompt": "2+3:"}], **keys)


@pytest.mark.release
@pytest.mark.slow
def test_a_script_ends_with_its_source_where_that_must_not_fail(tmp_path: Path) -> None:
    """Nobody listens at the address: under `on_source_loss: fail` the reason is the script's error."""
    pytest.importorskip("openai")
    rows = [{"prompt": "2+3:"}]
    source = served_source("teacher", "http://127.0.0.1:9/v1", rows, on_source_loss="fail", model="m")
    sharing = Sharing.over(tmp_path, "ada", [], "sgt", sources=[source])
    (thread,) = sharing.threads
    sharing.link.exchange.publish(0, [Rollout("p", 0, 0.0, ended=True)], 0)
    thread.rows.prompts["p"] = thread.rows.prompts.pop(next(iter(thread.rows.prompts)))
    thread.settle(8)
    thread.start()
    wait_until(lambda: thread.failure is not None)
    with pytest.raises(SourceLostError, match="gave no answer on 'p'"):
        sharing.link.read(0)
    thread.stop()


@pytest.mark.slow
def test_no_round_waits_for_a_served_model_that_is_away_or_has_other_rows(tmp_path: Path) -> None:
    """Under `on_source_loss: continue` a round without an endpoint has no answers; other rows are named at once."""
    pytest.importorskip("openai")
    rows = [{"prompt": "2+3:"}]
    away = served_source("teacher", "http://127.0.0.1:9/v1", rows, retries=0)
    sharing = Sharing.over(tmp_path, "ada", [], "sgt", sources=[away])
    (thread,) = sharing.threads
    (prompt_id,) = away.prompts
    sharing.link.exchange.publish(0, [Rollout(prompt_id, 0, 0.0, ended=True)], 0)
    sharing.link.exchange.publish(1, [Rollout("another", 0, 0.0, ended=True)], 1)
    thread.settle(8)
    thread.start()
    assert len(sharing.link.read(0).current["teacher"]) == 0
    with pytest.raises(PlanMismatchError, match="no row of prompt 'another'"):
        sharing.link.read(1)
    thread.stop()
    store = sharing.link.exchange.store
    assert read_account(store, "teacher", 0) == Account(prompts=1, questions=1, left_out=1)


@pytest.mark.release
@pytest.mark.slow
def test_policy_over_two_processes_shares_with_a_single_process(scripts: Scripts) -> None:
    scripts.start("ada", program=("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"))
    scripts.start("bob")
    scripts.finish()
    for policy in ("ada", "bob"):
        lines = scripts.lines(policy)
        assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
        assert sum(line["sgt/pairs"] for line in lines) > 0  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"policy": "a", "peers": ["a"]}, "has policy='a' itself"),
        ({"peers": ["b", "b"]}, "names 'b' twice"),
        ({"peers": []}, "shares between policies"),
        ({"policy": "run.json"}, "looks like a file of a run"),
        ({"policy": "../a"}, "expected lower-case letters"),
        ({"wieght": 0.1}, "wieght: found 0.1; expected one of: "),
        ({"weight": "heavy"}, "weight: found 'heavy'; "),
    ],
)
def test_wrong_names_and_settings_are_refused(tmp_path: Path, changed: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {"policy": "a", "peers": ["b"], "regime": "sgt", **changed}
    with pytest.raises(UsageError) as error:
        Sharing.over(tmp_path, **arguments)  # type: ignore[arg-type]
    assert message in str(error.value)


def script_run(root: Path, run_id: str = "script", **settings: object) -> ScriptRun:
    run = RunDirectory(root)
    exchange = Exchange(run.exchange, "a", run_id)
    member = Member(run=run, exchange=exchange, heartbeat=Heartbeat(exchange.store, "a"))
    return ScriptRun(member, ("a", "b"), get_regime("sgt")(**settings), seed=0)


def test_scripts_that_differ_are_refused_by_key(tmp_path: Path) -> None:
    first = script_run(tmp_path)
    first.join(first.info(10, ["exact"]))
    first.join(first.info(10, ["exact"]))  # a second script that agrees
    for other, steps, key in (
        (script_run(tmp_path, weight=0.5), 10, "regime.weight"),
        (script_run(tmp_path), 11, "run.steps"),
        (script_run(tmp_path, run_id="x"), 10, "run_id"),
    ):
        with pytest.raises(UsageError, match=rf"must agree and differ: {re.escape(key)}: found .*, here "):
            other.join(other.info(steps, ["exact"]))
    assert RunDirectory(tmp_path).info().scripts


def test_a_script_that_starts_again_at_step_0_expects_all_peers(tmp_path: Path) -> None:
    """Before its first checkpoint: what it had given up is in the exchange, and holds for rounds that it now repeats."""
    exchange = Exchange(tmp_path / "exchange", "a", "script")
    MissingPeers(exchange.store, "a").mark_missing("b", 1)
    sharing = Sharing.over(tmp_path, policy="a", peers=["b"], regime="sgt", resume=True)
    assert sharing.script is not None
    assert sharing.link.missing_peers.is_missing("b", 4)
    callback = ScriptRunCallback(sharing, sharing.script, lambda: ["exact"])
    args = SimpleNamespace(
        gradient_accumulation_steps=1, steps_per_generation=1, num_iterations=1, max_completion_length=8
    )
    state = SimpleNamespace(is_world_process_zero=True, global_step=0, max_steps=4)
    callback.on_train_begin(args, state, None)
    assert not any(sharing.link.missing_peers.is_missing("b", number) for number in range(6))
    callback.on_train_end(args, state, None)
    assert not sharing.script.member.files.result.exists()  # steps are left


def test_policy_is_trained_by_one_script_at_a_time(tmp_path: Path) -> None:
    lock = RunDirectory(tmp_path).policy("a").lock
    lock.parent.mkdir(parents=True)
    code = (
        "import sys\nfrom pathlib import Path\nfrom mutualrl.storage.rundir import hold\n"
        "with hold(Path(sys.argv[1]), 'x'):\n    print('held', flush=True)\n    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(RunDirectoryError, match="is in use"), hold(lock, "r, policy 'a',"):
            raise AssertionError
        other.communicate("")


def test_logs_are_cut_after_the_step_of_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 5}\n{"step": 6}\n{"step"')
    cut_after(path, 5)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 5}\n'
    cut_after(tmp_path / "absent.jsonl", 5)


def test_rows_with_one_id_are_refused_before_training(tiny: dict[str, Path], tmp_path: Path) -> None:
    rows = [{"prompt": text, "answer": "1"} for text in ("a", "b", "a")]
    with pytest.raises(UsageError, match="rows 0 and 2 of train_dataset have the same prompt id"):
        MutualGRPOTrainer(
            model=str(tiny["ada"]),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=GRPOConfig(output_dir=str(tmp_path / "o"), use_cpu=True, bf16=False, num_generations=2),
            train_dataset=Dataset.from_list(rows),
            sharing=Sharing.over(tmp_path / "r", policy="a", peers=["b"], regime="sgt"),
        )
