"""Restarts, back-off, causes and consequences, over process groups that a test scripts."""

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
from mutualrl.machine.devices import Machine
from mutualrl.mwra.placement import Allocation, place
from mutualrl.mwra.policy_supervisor import PolicySupervisor
from mutualrl.process.status import StatusReader, StatusWriter
from mutualrl.recipes import Recipe, Request, resolve
from mutualrl.see import Heartbeat
from mutualrl.storage.rundir import RunDirectory


class Scripted:
    """Process group without processes: it ends when a test says so."""

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
    """Start of scripted groups, written down."""

    def __init__(self) -> None:
        self.started: list[tuple[str, int]] = []
        self.groups: dict[str, Scripted] = {}

    def start(self, run: RunDirectory, allocation: Allocation, attempt: int) -> Scripted:
        group = Scripted(allocation.policy, run.policy(allocation.policy).logs / f"attempt-{attempt}.log")
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
        allocations = place(self.recipe, Machine((), 2)).allocations
        self.supervisor = PolicySupervisor(
            self.run,
            self.recipe,
            allocations,
            writer,
            console,
            self.launcher.start,  # type: ignore[arg-type]
        )
        self.supervisor.start()

    def states(self) -> dict[str, str]:
        return {managed.name: managed.state for managed in self.supervisor.managed_policies}

    def dies(self, policy: str, code: int = -9, failure: tuple[str, str] | None = None) -> None:
        if failure is not None:
            path = self.run.policy(policy).failure
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"kind": failure[0], "message": failure[1]}))
        self.launcher.groups[policy].code = code


@pytest.fixture
def supervised(tmp_path: Path, clock: Clock) -> Callable[..., Supervised]:
    return lambda *assignments: Supervised(tmp_path, *assignments)


def test_a_policy_that_dies_is_restarted_after_a_pause_that_doubles(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    n = supervised("run.max_restarts=3")
    for attempt, pause in enumerate((1, 2, 4), 1):
        n.dies("bob")
        n.supervisor.poll()
        assert n.states() == {"ada": "running", "bob": "restarting"}
        clock.sleep(pause - 0.1)
        n.supervisor.poll()
        assert n.states()["bob"] == "restarting"
        clock.sleep(0.2)
        n.supervisor.poll()
        assert n.states()["bob"] == "running"
        assert n.launcher.started[-1] == ("bob", attempt)
        assert f"Restarting in {pause} s from step 0 (restart {attempt} of 3)" in n.screen.getvalue()
    n.dies("bob")
    with pytest.raises(PeerLostError, match=r"policy 'bob' died \(exit code -9, no error recorded\).*3 restart"):
        n.supervisor.poll()
    assert n.supervisor.lost()["bob"].startswith("policy 'bob' died")
    assert [name for name, _ in n.launcher.started] == ["ada", "bob", "bob", "bob", "bob"]


def result_of(n: Supervised, policy: str) -> None:
    path = n.run.policy(policy).result
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{}")


def test_exit_0_without_a_result_is_a_death(supervised: Callable[..., Supervised], clock: Clock) -> None:
    n = supervised("run.max_restarts=1", "run.on_peer_loss=continue")
    n.dies("bob", 0)
    n.supervisor.poll()
    assert n.states() == {"ada": "running", "bob": "restarting"}
    assert "exit code 0, before its result was written" in n.screen.getvalue()
    clock.sleep(1.1)
    n.supervisor.poll()
    n.dies("bob", 0)
    n.supervisor.poll()
    assert n.states() == {"ada": "running", "bob": "lost"}
    n.dies("ada", 0)
    n.supervisor.poll()
    clock.sleep(1.1)
    n.supervisor.poll()
    n.dies("ada", 0)
    with pytest.raises(PeerLostError, match="policy 'ada' died"):  # nobody is left
        n.supervisor.poll()


def test_a_policy_with_a_result_is_finished_however_it_ends(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    n = supervised("run.max_restarts=0")
    result_of(n, "bob")
    n.dies("bob", -6)
    n.supervisor.poll()
    assert n.states() == {"ada": "running", "bob": "finished"}
    Heartbeat(n.run.exchange, "ada").beat()
    n.supervisor.poll()
    result_of(n, "ada")
    clock.sleep(n.recipe.run.peer_timeout + 400)
    n.supervisor.poll()
    assert n.states() == {"ada": "finished", "bob": "finished"}
    assert "did not exit: no heartbeat" in n.screen.getvalue()


def test_the_pause_between_restarts_is_at_most_a_minute(supervised: Callable[..., Supervised], clock: Clock) -> None:
    n = supervised("run.max_restarts=12")
    for _ in range(9):
        n.dies("bob")
        n.supervisor.poll()
        clock.sleep(61)
        n.supervisor.poll()
        assert n.states()["bob"] == "running"
    assert "Restarting in 60 s" in n.screen.getvalue()
    assert "Restarting in 64 s" not in n.screen.getvalue()


def test_an_error_of_a_policy_ends_the_run_with_its_kind_and_is_not_restarted(
    supervised: Callable[..., Supervised],
) -> None:
    n = supervised("run.max_restarts=3")
    n.dies("ada", 4, ("environment", "no space left"))
    with pytest.raises(MutualRLError, match=r"policy 'ada' failed \(exit code 4\): no space left") as caught:
        n.supervisor.poll()
    assert (caught.value.kind, caught.value.exit_code) == ("environment", 4)
    assert [name for name, _ in n.launcher.started] == ["ada", "bob"]


def test_a_kind_that_nobody_knows_is_a_lost_peer(supervised: Callable[..., Supervised]) -> None:
    n = supervised()
    n.dies("ada", 1, ("from another version", "what is this"))
    with pytest.raises(MutualRLError, match="what is this") as caught:
        n.supervisor.poll()
    assert caught.value.exit_code == PeerLostError.exit_code


def test_who_only_lost_its_peer_is_not_blamed(supervised: Callable[..., Supervised]) -> None:
    n = supervised("run.max_restarts=0")
    n.dies("ada", 5, ("peer-lost", "ada lost bob"))
    n.dies("bob", -9)
    with pytest.raises(PeerLostError, match="policy 'bob' died"):
        for _ in range(2):
            n.supervisor.poll()
    assert "ada lost bob" not in n.supervisor.lost().get("bob", "")


def test_who_lost_a_peer_that_is_restarted_is_restarted_too(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    n = supervised("run.max_restarts=1")
    n.dies("ada", 5, ("peer-lost", "ada lost bob"))
    n.dies("bob", -9)
    n.supervisor.poll()
    assert n.states() == {"ada": "restarting", "bob": "restarting"}
    clock.sleep(2)
    n.supervisor.poll()
    assert n.states() == {"ada": "running", "bob": "running"}


def test_a_frozen_policy_is_found_by_its_heartbeat(supervised: Callable[..., Supervised], clock: Clock) -> None:
    n = supervised("run.max_restarts=1", "run.peer_timeout=30")
    beats = {name: Heartbeat(n.run.exchange, name) for name in ("ada", "bob")}
    for name, beat in beats.items():
        beat.set("training", 3)
        beat.beat()
        assert name in n.states()
    clock.every(1, beats["ada"].beat)
    n.supervisor.poll()
    clock.sleep(29)
    n.supervisor.poll()
    assert n.states()["bob"] == "running"
    clock.sleep(2)
    n.supervisor.poll()
    assert n.states() == {"ada": "running", "bob": "restarting"}
    assert "policy 'bob' is frozen: no heartbeat for" in n.screen.getvalue()
    assert "(last seen: training)" in n.screen.getvalue()


def test_a_policy_that_lives_and_makes_no_progress_is_named_with_what_it_does(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    n = supervised("run.max_restarts=1", "run.peer_timeout=30", "run.step_timeout=400")
    beats = {name: Heartbeat(n.run.exchange, name) for name in ("ada", "bob")}
    second_rank = Heartbeat(n.run.exchange, "bob", rank=1)
    beats["ada"].set("generating", 3)
    beats["bob"].set("scoring", 3)
    second_rank.set("scoring: reward function judge.py:score", 3)
    for beat in (*beats.values(), second_rank):
        beat.beat()
        clock.every(1, beat.beat)
    clock.every(20, beats["ada"].advance)  # a forward pass, say: slow, and going on
    n.supervisor.poll()
    clock.sleep(199)
    n.supervisor.poll()
    assert "no progress" not in n.screen.getvalue()
    for _ in range(3):
        clock.sleep(20)
        n.supervisor.poll()
    words = "in scoring: reward function judge.py:score"
    assert n.screen.getvalue().count("policy 'bob': no progress for") == 1
    assert f"{words}; it is terminated after 400 s (run.step_timeout)" in n.screen.getvalue()
    assert n.states() == {"ada": "running", "bob": "running"}
    clock.sleep(150)
    n.supervisor.poll()
    assert n.states() == {"ada": "running", "bob": "restarting"}
    assert "policy 'bob' is alive but hangs: no progress for 4" in n.screen.getvalue()


@pytest.mark.parametrize("phase", ["waiting for round 3 of ada", "loading"])
def test_waiting_for_a_peer_and_loading_have_other_limits(
    supervised: Callable[..., Supervised], clock: Clock, phase: str
) -> None:
    n = supervised("run.max_restarts=0", "run.step_timeout=100")
    for name in ("ada", "bob"):
        beat = Heartbeat(n.run.exchange, name)
        beat.set(phase, 3)
        clock.every(1, beat.beat)
    for _ in range(10):
        clock.sleep(50)
        n.supervisor.poll()
    assert n.states() == {"ada": "running", "bob": "running"}


def test_a_policy_that_falls_silent_on_a_full_disk_is_the_disks_fault_and_not_restarted(
    supervised: Callable[..., Supervised], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    n = supervised("run.max_restarts=5", "run.peer_timeout=30")
    for name in ("ada", "bob"):
        beat = Heartbeat(n.run.exchange, name)
        beat.set("training", 3)
        beat.beat()
    n.supervisor.poll()

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    clock.sleep(31)
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        DiskError, match=r"exchange/.*: 4,096 bytes cannot be written .*files free.*No space left"
    ) as error:
        n.supervisor.poll()
    assert error.value.exit_code == 4
    assert "Restarting in" not in n.screen.getvalue()
    assert not list(n.run.root.rglob("*.tmp"))


def test_what_a_killed_writer_left_is_removed_before_the_next_attempt(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    n = supervised("run.max_restarts=1")
    left = n.run.exchange / "bob" / ".000003.parquet.17.18.tmp"
    left.parent.mkdir(parents=True, exist_ok=True)
    left.write_bytes(b"half of it")
    n.dies("bob")
    n.supervisor.poll()
    clock.sleep(1.1)
    n.supervisor.poll()
    assert n.states()["bob"] == "running"
    assert not left.exists()


def test_a_policy_that_is_starting_has_five_minutes_to_its_first_heartbeat(
    supervised: Callable[..., Supervised], clock: Clock
) -> None:
    n = supervised("run.max_restarts=0", "run.peer_timeout=30")
    n.supervisor.poll()
    clock.sleep(290)
    n.supervisor.poll()
    assert n.states() == {"ada": "running", "bob": "running"}
    clock.sleep(20)
    with pytest.raises(PeerLostError, match="is frozen"):
        n.supervisor.poll()


def test_under_continue_the_others_go_on_and_the_last_one_is_an_error(supervised: Callable[..., Supervised]) -> None:
    n = supervised("run.on_peer_loss=continue", "run.max_restarts=0")
    n.dies("bob")
    n.supervisor.poll()
    assert n.states() == {"ada": "running", "bob": "lost"}
    assert "the others continue without it" in n.screen.getvalue()
    assert StatusReader(n.run.root).of("bob").state == "unknown"  # nobody has seen this supervisor move yet
    n.dies("ada")
    with pytest.raises(PeerLostError, match="policy 'ada' died"):
        n.supervisor.poll()


def test_under_wait_restarts_go_on_until_the_round_timeout(supervised: Callable[..., Supervised], clock: Clock) -> None:
    n = supervised("run.on_peer_loss=wait", "run.max_restarts=0", "run.round_timeout=100")
    with pytest.raises(PeerLostError):
        for _ in range(200):
            if n.states()["bob"] == "running":
                n.dies("bob")
            n.supervisor.poll()
            clock.sleep(1)
    restarts = sum(name == "bob" for name, _ in n.launcher.started) - 1
    assert restarts == 6  # after 1, 2, 4, 8, 16 and 32 s; the next pause would end after the limit
    assert "(restart until run.round_timeout)" in n.screen.getvalue()


def test_a_finished_policy_is_not_started_again_and_stopping_restarts_nobody(tmp_path: Path, clock: Clock) -> None:
    result = RunDirectory(tmp_path).policy("ada").result
    result.parent.mkdir(parents=True)
    result.write_text("{}")
    n = Supervised(tmp_path, "run.max_restarts=3")
    assert n.states() == {"ada": "finished", "bob": "running"}
    assert n.launcher.started == [("bob", 0)]
    n.supervisor.stopping = True
    n.dies("bob", 130)
    n.supervisor.poll()
    assert n.states()["bob"] == "stopped"
    assert not n.supervisor.active


def test_a_policy_that_is_to_be_restarted_is_stopped_when_the_run_stops(supervised: Callable[..., Supervised]) -> None:
    n = supervised("run.max_restarts=3")
    n.dies("bob")
    n.supervisor.poll()
    n.supervisor.stopping = True
    n.supervisor.poll()
    assert n.states()["bob"] == "stopped"


def test_what_a_supervisor_publishes_is_what_another_reads(supervised: Callable[..., Supervised]) -> None:
    n = supervised("run.max_restarts=1")
    reader = StatusReader(n.run.root)
    reader.of("bob")
    n.dies("bob")
    n.supervisor.poll()
    status = reader.of("bob")
    assert (status.state, status.attempt) == ("restarting", 0)
