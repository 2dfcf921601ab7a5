"""Restarts, back-off, causes and consequences, with scripted process groups."""

from __future__ import annotations

import errno
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from fake_clock import Clock
from mutualrl.errors import DiskError, MutualRLError, PeerLostError
from mutualrl.launch.policy_supervisor import PolicySupervisor
from mutualrl.machine.devices import Machine
from mutualrl.mwra.placement import place
from mutualrl.process.status import StatusReader, StatusWriter
from mutualrl.recipes import Recipe, Request, resolve
from mutualrl.see import Heartbeat
from mutualrl.storage.allocation import Allocation
from mutualrl.storage.rundir import RunDirectory


class ScriptedGroup:
    """Process group without processes, which exits when a test sets its exit code."""

    def __init__(self, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        self.code: int | None = None
        self.closed = False
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"the log of {log.name}\n")

    def exit_code(self) -> int | None:
        return self.code

    def processes(self) -> list[object]:
        return []

    def close(self) -> None:
        self.closed = True


class Launcher:
    """Launcher of scripted groups that records every start."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.groups: dict[str, ScriptedGroup] = {}

    def start(self, run: RunDirectory, allocation: Allocation, attempt: int) -> ScriptedGroup:
        group = ScriptedGroup(allocation.policy, run.policy(allocation.policy).logs / f"attempt-{attempt}.log")
        self.started.append((allocation.policy, attempt))
        self.groups[allocation.policy] = group
        return group


class Supervised:
    """Supervisor with its launcher, console and run directory."""

    def __init__(self, root: Path, *assignments: str) -> None:
        self.run = RunDirectory(root)
        self.recipe: Recipe = resolve(Request(pool="tiny", regime="sgt", assignments=assignments))
        self.launcher = Launcher()
        self.screen = io.StringIO()
        writer = StatusWriter(root, session=0)
        console = Console(file=self.screen, width=400)
        self.supervisor = PolicySupervisor(
            self.run,
            self.recipe,
            place(self.recipe, Machine((), 2)),
            writer,
            console,
            self.launcher.start,  # type: ignore[arg-type]
        )
        self.supervisor.start()

    def states(self) -> dict[str, str]:
        return {managed.name: managed.state for managed in self.supervisor.managed_policies}

    def end(self, policy: str, code: int = -9, failure: tuple[str, str] | None = None) -> None:
        if failure is not None:
            path = self.run.policy(policy).failure
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"kind": failure[0], "message": failure[1]}))
        self.launcher.groups[policy].code = code


@pytest.fixture
def supervised(tmp_path: Path, clock: Clock) -> Callable[..., Supervised]:
    return lambda *assignments: Supervised(tmp_path, *assignments)


def test_dead_policy_is_restarted_after_a_pause_that_doubles(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    pool = supervised("run.max_restarts=3")
    for attempt, pause in enumerate((1, 2, 4), 1):
        pool.end("bob")
        pool.supervisor.poll()
        assert pool.states() == {"ada": "running", "bob": "restarting"}
        clock.sleep(pause - 0.1)
        pool.supervisor.poll()
        assert pool.states()["bob"] == "restarting"
        clock.sleep(0.2)
        pool.supervisor.poll()
        assert pool.states()["bob"] == "running"
        assert pool.launcher.started[-1] == ("bob", attempt)
        assert f"Restarting in {pause} s from step 0 (restart {attempt} of 3)" in pool.screen.getvalue()
    pool.end("bob")
    with pytest.raises(PeerLostError, match=r"policy 'bob' died \(exit code -9, no error recorded\).*3 restart"):
        pool.supervisor.poll()
    assert pool.supervisor.lost()["bob"].startswith("policy 'bob' died")
    assert [name for name, _ in pool.launcher.started] == ["ada", "bob", "bob", "bob", "bob"]


def write_result(pool: Supervised, policy: str) -> None:
    path = pool.run.policy(policy).result
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def test_exit_code_0_without_a_result_counts_as_a_death(supervised: Callable[..., Supervised], clock: Clock) -> None:
    pool = supervised("run.max_restarts=1", "run.on_peer_loss=continue")
    pool.end("bob", 0)
    pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "restarting"}
    assert "exit code 0, before its result was written" in pool.screen.getvalue()
    clock.sleep(1.1)
    pool.supervisor.poll()
    pool.end("bob", 0)
    pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "lost"}
    pool.end("ada", 0)
    pool.supervisor.poll()
    clock.sleep(1.1)
    pool.supervisor.poll()
    pool.end("ada", 0)
    with pytest.raises(PeerLostError, match="policy 'ada' died"):  # no policy is left
        pool.supervisor.poll()


def test_policy_with_a_result_is_finished_however_it_ends(supervised: Callable[..., Supervised], clock: Clock) -> None:
    pool = supervised("run.max_restarts=0")
    write_result(pool, "bob")
    pool.end("bob", -6)
    pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "finished"}
    Heartbeat(pool.run.exchange, "ada").beat()
    pool.supervisor.poll()
    write_result(pool, "ada")
    clock.sleep(pool.recipe.run.peer_timeout + 400)
    pool.supervisor.poll()
    assert pool.states() == {"ada": "finished", "bob": "finished"}
    assert "did not exit: no heartbeat" in pool.screen.getvalue()


def test_pause_between_restarts_is_at_most_a_minute(supervised: Callable[..., Supervised], clock: Clock) -> None:
    pool = supervised("run.max_restarts=12")
    for _ in range(9):
        pool.end("bob")
        pool.supervisor.poll()
        clock.sleep(61)
        pool.supervisor.poll()
        assert pool.states()["bob"] == "running"
    assert "Restarting in 60 s" in pool.screen.getvalue()
    assert "Restarting in 64 s" not in pool.screen.getvalue()


def test_error_of_a_policy_ends_the_run_with_its_kind_and_without_a_restart(
    supervised: Callable[..., Supervised],
) -> None:
    pool = supervised("run.max_restarts=3")
    pool.end("ada", 4, ("environment", "no space left"))
    with pytest.raises(MutualRLError, match=r"policy 'ada' failed \(exit code 4\): no space left") as caught:
        pool.supervisor.poll()
    assert (caught.value.kind, caught.value.exit_code) == ("environment", 4)
    assert [name for name, _ in pool.launcher.started] == ["ada", "bob"]


def test_unknown_error_kind_is_treated_as_a_lost_peer(supervised: Callable[..., Supervised]) -> None:
    pool = supervised()
    pool.end("ada", 1, ("from another version", "what is this"))
    with pytest.raises(MutualRLError, match="what is this") as caught:
        pool.supervisor.poll()
    assert caught.value.exit_code == PeerLostError.exit_code


def test_policy_that_only_lost_its_peer_is_not_the_cause(supervised: Callable[..., Supervised]) -> None:
    pool = supervised("run.max_restarts=0")
    pool.end("ada", 5, ("peer-lost", "ada lost bob"))
    pool.end("bob", -9)
    with pytest.raises(PeerLostError, match="policy 'bob' died"):
        for _ in range(2):
            pool.supervisor.poll()
    assert "ada lost bob" not in pool.supervisor.lost().get("bob", "")


def test_policy_that_lost_a_restarting_peer_is_also_restarted(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    pool = supervised("run.max_restarts=1")
    pool.end("ada", 5, ("peer-lost", "ada lost bob"))
    pool.end("bob", -9)
    pool.supervisor.poll()
    assert pool.states() == {"ada": "restarting", "bob": "restarting"}
    clock.sleep(2)
    pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "running"}


ASKED = "sources=[{name: teacher, served: 'http://127.0.0.1:9/v1', on_source_loss: continue}]"


@pytest.mark.parametrize(
    ("assignments", "failure", "ends"),
    [
        ((ASKED,), ("environment", "it cannot be reached"), False),
        ((ASKED,), ("reward", "the reward function is broken"), True),
        ((ASKED.replace("continue", "fail"),), ("environment", "it cannot be reached"), True),
    ],
)
def test_own_error_of_a_source_is_a_death_where_the_run_continues_without_it(
    supervised: Callable[..., Supervised],
    clock: Clock,
    assignments: tuple[str, ...],
    failure: tuple[str, str],
    ends: bool,
) -> None:
    pool = supervised("run.max_restarts=1", *assignments)
    for _ in range(2):
        pool.end("teacher", 4, failure)
        if ends:
            with pytest.raises(MutualRLError, match=failure[1]):
                pool.supervisor.poll()
            return
        pool.supervisor.poll()
        clock.sleep(2)
        pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "running", "teacher": "lost"}
    assert "The run continues without it (sources.teacher.on_source_loss: continue)" in pool.screen.getvalue()


def test_frozen_policy_is_detected_by_its_heartbeat(supervised: Callable[..., Supervised], clock: Clock) -> None:
    pool = supervised("run.max_restarts=1", "run.peer_timeout=30")
    beats = {name: Heartbeat(pool.run.exchange, name) for name in ("ada", "bob")}
    for name, beat in beats.items():
        beat.set("training", 3)
        beat.beat()
        assert name in pool.states()
    clock.every(1, beats["ada"].beat)
    pool.supervisor.poll()
    clock.sleep(29)
    pool.supervisor.poll()
    assert pool.states()["bob"] == "running"
    clock.sleep(2)
    pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "restarting"}
    assert "policy 'bob' is frozen: no heartbeat for" in pool.screen.getvalue()
    assert "(last seen: training)" in pool.screen.getvalue()


def test_live_policy_without_progress_is_reported_with_its_phase(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    pool = supervised("run.max_restarts=1", "run.peer_timeout=30", "run.step_timeout=400")
    beats = {name: Heartbeat(pool.run.exchange, name) for name in ("ada", "bob")}
    second_rank = Heartbeat(pool.run.exchange, "bob", rank=1)
    beats["ada"].set("generating", 3)
    beats["bob"].set("scoring", 3)
    second_rank.set("scoring: reward function judge.py:score", 3)
    for beat in (*beats.values(), second_rank):
        beat.beat()
        clock.every(1, beat.beat)
    clock.every(20, beats["ada"].advance)  # slow but advancing, e.g. a forward pass
    pool.supervisor.poll()
    clock.sleep(199)
    pool.supervisor.poll()
    assert "no progress" not in pool.screen.getvalue()
    for _ in range(3):
        clock.sleep(20)
        pool.supervisor.poll()
    phase = "in scoring: reward function judge.py:score"
    assert pool.screen.getvalue().count("policy 'bob': no progress for") == 1
    assert f"{phase}; it is terminated after 400 s (run.step_timeout)" in pool.screen.getvalue()
    assert pool.states() == {"ada": "running", "bob": "running"}
    clock.sleep(150)
    pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "restarting"}
    assert "policy 'bob' is alive but hangs: no progress for 4" in pool.screen.getvalue()


@pytest.mark.parametrize("phase", ["waiting for round 3 of ada", "loading"])
def test_waiting_for_a_peer_and_loading_have_other_limits(
    supervised: Callable[..., Supervised], clock: Clock, phase: str
) -> None:
    pool = supervised("run.max_restarts=0", "run.step_timeout=100")
    for name in ("ada", "bob"):
        beat = Heartbeat(pool.run.exchange, name)
        beat.set(phase, 3)
        clock.every(1, beat.beat)
    for _ in range(10):
        clock.sleep(50)
        pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "running"}


def test_silent_policy_on_a_full_disk_is_a_disk_error_and_not_restarted(
    supervised: Callable[..., Supervised], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = supervised("run.max_restarts=5", "run.peer_timeout=30")
    for name in ("ada", "bob"):
        beat = Heartbeat(pool.run.exchange, name)
        beat.set("training", 3)
        beat.beat()
    pool.supervisor.poll()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock.sleep(31)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        DiskError, match=r"exchange/.*: 4,096 bytes cannot be written .*files free.*No space left"
    ) as error:
        pool.supervisor.poll()
    assert error.value.exit_code == 4
    assert "Restarting in" not in pool.screen.getvalue()
    assert not list(pool.run.root.rglob("*.tmp"))


def test_files_left_by_a_killed_writer_are_removed_before_the_next_attempt(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    pool = supervised("run.max_restarts=1")
    leftover = pool.run.exchange / "bob" / ".000003.parquet.17.18.tmp"
    leftover.parent.mkdir(parents=True, exist_ok=True)
    leftover.write_bytes(b"half of it")
    pool.end("bob")
    pool.supervisor.poll()
    clock.sleep(1.1)
    pool.supervisor.poll()
    assert pool.states()["bob"] == "running"
    assert not leftover.exists()


def test_starting_policy_has_five_minutes_until_its_first_heartbeat(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    pool = supervised("run.max_restarts=0", "run.peer_timeout=30")
    pool.supervisor.poll()
    clock.sleep(290)
    pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "running"}
    clock.sleep(20)
    with pytest.raises(PeerLostError, match="is frozen"):
        pool.supervisor.poll()


def test_under_continue_the_others_go_on_and_losing_the_last_is_an_error(supervised: Callable[..., Supervised]) -> None:
    pool = supervised("run.on_peer_loss=continue", "run.max_restarts=0")
    pool.end("bob")
    pool.supervisor.poll()
    assert pool.states() == {"ada": "running", "bob": "lost"}
    assert "the others continue without it" in pool.screen.getvalue()
    assert StatusReader(pool.run.root).of("bob").state == "unknown"  # no beat of this supervisor was observed yet
    pool.end("ada")
    with pytest.raises(PeerLostError, match="policy 'ada' died"):
        pool.supervisor.poll()


def test_under_wait_restarts_continue_until_the_round_timeout(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    pool = supervised("run.on_peer_loss=wait", "run.max_restarts=0", "run.round_timeout=100")
    with pytest.raises(PeerLostError):
        for _ in range(200):
            if pool.states()["bob"] == "running":
                pool.end("bob")
            pool.supervisor.poll()
            clock.sleep(1)
    restarts = sum(name == "bob" for name, _ in pool.launcher.started) - 1
    assert restarts == 6  # after 1, 2, 4, 8, 16 and 32 s; the next pause would end after the limit
    assert "(restart until run.round_timeout)" in pool.screen.getvalue()


def test_finished_policy_is_not_restarted_and_stopping_restarts_no_policy(tmp_path: Path, clock: Clock) -> None:
    result = RunDirectory(tmp_path).policy("ada").result
    result.parent.mkdir(parents=True)
    result.write_text("{}")
    pool = Supervised(tmp_path, "run.max_restarts=3")
    assert pool.states() == {"ada": "finished", "bob": "running"}
    assert pool.launcher.started == [("bob", 0)]
    pool.supervisor.stop()
    pool.end("bob", 130)
    pool.supervisor.poll()
    assert pool.states()["bob"] == "stopped"
    assert not pool.supervisor.active


def test_policy_awaiting_its_restart_is_stopped_when_the_run_stops(supervised: Callable[..., Supervised]) -> None:
    pool = supervised("run.max_restarts=3")
    pool.end("bob")
    pool.supervisor.poll()
    pool.supervisor.stop()
    pool.supervisor.poll()
    assert pool.states()["bob"] == "stopped"


def test_published_status_is_read_by_another_supervisor(supervised: Callable[..., Supervised]) -> None:
    pool = supervised("run.max_restarts=1")
    reader = StatusReader(pool.run.root)
    reader.of("bob")
    pool.end("bob")
    pool.supervisor.poll()
    status = reader.of("bob")
    assert (status.state, status.attempt) == ("restarting", 0)
