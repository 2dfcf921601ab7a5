"""Pruning deletes only rounds that no policy needs; absences, attempts and statuses are kept."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_clock import Clock
from mutualrl.errors import ExchangeDamagedError, FencedError, PeerLostError, RoundAbortedError, WaitTimeoutError
from mutualrl.process.status import PolicyState, PolicyStatus, StatusReader, StatusWriter
from mutualrl.records import Rollout
from mutualrl.see import Exchange, Heartbeat, MissingPeers, WaitCallbacks, WaitTimeouts, open_store
from mutualrl.see.files import committed_rounds, round_of
from mutualrl.see.inspection import inspect_policy
from mutualrl.see.retention import CURSOR, deletable, prune_rounds, publish_cursor, published_need
from mutualrl.trajectory import Trajectory

ROWS = [Rollout("p", 0, 1.0, True, trajectory=Trajectory.of_text("yes"))]


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(1, 20))
def test_deletable_rounds_are_not_needed_and_not_among_the_newest(rounds: set[int], needed: int, keep: int) -> None:
    deleted = deletable(rounds, needed, keep)
    remaining = rounds - set(deleted)
    assert set(deleted) <= rounds
    assert all(round_index < needed for round_index in deleted)
    assert len(remaining) >= min(keep, len(rounds))
    assert not deleted or max(deleted) < min(remaining)
    assert all(r >= needed or len([s for s in rounds if s > r]) < keep for r in remaining)  # and no other round is kept


def test_pruning_deletes_parts_of_all_ranks_and_attempts(tmp_path: Path) -> None:
    writer = Exchange(tmp_path, "bob", "run")
    for round_index in range(6):
        writer.commit(round_index, [writer.write_part(round_index, ROWS, rank) for rank in (0, 1)], 0)
    Exchange(tmp_path, "bob", "run", attempt=1).publish(2, ROWS * 3, 0)
    size = sum(
        p.stat().st_size for p in (tmp_path / "bob").iterdir() if (round_of(p.name) or 9) < 4 or p.name[:6] == "0" * 6
    )
    assert prune_rounds(tmp_path, "bob", 4, 1, dry_run=True) == ([0, 1, 2, 3], size)
    assert committed_rounds(open_store(tmp_path), "bob") == [0, 1, 2, 3, 4, 5]
    assert prune_rounds(tmp_path, "bob", 4, 1) == ([0, 1, 2, 3], size)
    assert {round_of(p.name) for p in (tmp_path / "bob").iterdir()} == {4, 5}
    result = inspect_policy(tmp_path, "run", "bob", verify=True)
    assert (result.rounds, result.pruned, result.gaps, result.damaged, result.orphaned) == ([4, 5], 4, [], [], [])


def test_need_of_policies_that_do_not_see_each_other_is_the_smallest_that_all_have_published(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    assert published_need(store, ("ada", "bob"), "run") == 0
    publish_cursor(store, "ada", "run", 7)
    assert published_need(store, ("ada", "bob"), "run") == 0  # bob may need any
    publish_cursor(store, "bob", "run", 4)
    assert published_need(store, ("ada", "bob"), "run") == 4
    publish_cursor(store, "bob", "another", 9)
    assert published_need(store, ("ada", "bob"), "run") == 0
    (tmp_path / "bob" / CURSOR).write_bytes(b"{")
    assert published_need(store, ("ada", "bob"), "run") == 0
    assert inspect_policy(tmp_path, "run", "bob", verify=True).damaged == []


def test_inspection_names_gaps_damage_and_uncommitted_parts(tmp_path: Path) -> None:
    writer = Exchange(tmp_path, "bob", "run")
    for round_index in (0, 1, 4):
        writer.publish(round_index, ROWS, 0)
    writer.write_part(5, ROWS)
    result = inspect_policy(tmp_path, "run", "bob", verify=True)
    assert (result.gaps, result.damaged, result.orphaned) == ([2, 3], [], ["000005.parquet"])
    (tmp_path / "bob" / "000001.parquet").write_bytes(b"")
    (line,) = inspect_policy(tmp_path, "run", "bob", verify=True).damaged
    assert "000001.parquet: 0 bytes" in line
    assert inspect_policy(tmp_path, "run", "bob", verify=False).damaged == []


def test_older_attempt_is_fenced_once_a_newer_one_has_claimed_the_policy(tmp_path: Path) -> None:
    old, new = (Exchange(tmp_path, "bob", "run", attempt=n) for n in (0, 1))
    old.claim()
    part = old.write_part(0, ROWS)
    new.claim()
    with pytest.raises(FencedError, match="attempt 1 has started; this is attempt 0"):
        old.commit(0, [part], 0)
    with pytest.raises(FencedError):
        old.claim()
    with pytest.raises(FencedError):
        old.write_part(1, ROWS)
    new.publish(0, ROWS, 0)
    (tmp_path / "bob" / "attempt.json").write_text('{"attempt": 7}')
    with pytest.raises(ExchangeDamagedError, match="not an attempt's claim"):
        new.publish(1, ROWS, 0)


def test_absences_are_stored_and_end_when_the_run_resumes(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = MissingPeers(store, "ada")
    assert not first.is_missing("bob", 3)
    first.mark_missing("bob", 3)
    second = MissingPeers(store, "ada")
    assert [second.is_missing("bob", r) for r in (2, 3, 99)] == [False, True, True]
    assert second.current() == {"bob": 3}
    second.readmit_all(7)
    third = MissingPeers(store, "ada")
    assert [third.is_missing("bob", r) for r in (2, 3, 6, 7)] == [False, True, True, False]
    assert third.current() == {}
    third.mark_missing("bob", 9)
    assert [MissingPeers(store, "ada").is_missing("bob", r) for r in (6, 8, 9)] == [True, False, True]


def reader(root: Path, status_reader: StatusReader | None = None, **timeouts: object) -> Exchange:
    return Exchange(root / "exchange", "ada", "run", timeouts=WaitTimeouts(**timeouts), status_reader=status_reader)  # type: ignore[arg-type]


def test_lost_peer_is_left_out_under_continue(tmp_path: Path, clock: Clock) -> None:
    Exchange(tmp_path / "exchange", "cyd", "run").publish(0, ROWS, 0)
    Exchange(tmp_path / "exchange", "bob", "run")
    Heartbeat(tmp_path / "exchange", "bob").beat()
    began = clock.now
    shards = reader(tmp_path, peer_timeout=60.0, on_peer_loss="continue").wait(["bob", "cyd"], 0)
    assert list(shards) == ["cyd"]
    assert 60 < clock.now - began < 62
    with pytest.raises(PeerLostError, match="no heartbeat for"):
        reader(tmp_path, peer_timeout=60.0).wait(["bob", "cyd"], 0)


def test_reader_under_wait_waits_beyond_the_peer_timeout(tmp_path: Path, clock: Clock) -> None:
    began = clock.now
    with pytest.raises(WaitTimeoutError):
        reader(tmp_path, peer_timeout=6.0, round_timeout=120.0, on_peer_loss="wait").wait(["bob"], 0)
    assert 120 < clock.now - began < 122


def test_status_of_a_live_supervisor_counts_and_of_a_dead_one_does_not(tmp_path: Path, clock: Clock) -> None:
    status_writer = StatusWriter(tmp_path, session=0)
    status_writer.publish("bob", PolicyStatus(PolicyState("lost"), 2))
    status_reader = StatusReader(tmp_path)
    assert status_reader.of("bob") == PolicyStatus()  # no beat observed yet: it may be of an earlier session
    status_writer.publish("bob", PolicyStatus(PolicyState("restarting"), 2))
    assert status_reader.of("bob") == PolicyStatus(PolicyState("restarting"), 2)
    assert status_reader.of("zoe") == PolicyStatus()
    exchange = reader(tmp_path, status_reader, peer_timeout=10.0)
    began = clock.now
    clock.every(0.5, status_writer.beat)
    clock.at(100, lambda: status_writer.publish("bob", PolicyStatus(PolicyState("lost"), 2)))
    with pytest.raises(PeerLostError, match="its supervisor gave it up"):
        exchange.wait(["bob"], 0)
    assert 100 < clock.now - began < 102  # the reader waits for a restarting policy
    clock.sleep(60)
    status_reader.of("bob")
    second_reader = StatusReader(tmp_path)
    second_reader.of("bob")
    clock.sleep(1)  # it beats
    assert second_reader.of("bob").state == "lost"
    clock.now += 60  # the supervisor died
    assert second_reader.of("bob") == PolicyStatus()


def test_starting_policy_without_a_heartbeat_is_not_lost_under_a_supervisor(tmp_path: Path, clock: Clock) -> None:
    status_writer = StatusWriter(tmp_path, session=0)
    status_reader = StatusReader(tmp_path)
    status_writer.publish("bob", PolicyStatus(PolicyState("running"), 1))
    status_reader.of("bob")
    clock.every(0.5, status_writer.beat)
    with pytest.raises(WaitTimeoutError):  # the supervisor watches the start
        reader(tmp_path, status_reader, peer_timeout=1.0, round_timeout=45.0).wait(["bob"], 0)


def test_supervised_peer_gets_three_more_seconds_for_its_supervisor_to_report(tmp_path: Path, clock: Clock) -> None:
    Heartbeat(tmp_path / "exchange", "bob").beat()
    status_writer = StatusWriter(tmp_path, session=0)
    status_reader = StatusReader(tmp_path)
    status_writer.publish("bob", PolicyStatus(PolicyState("running"), 0))
    status_reader.of("bob")
    clock.every(0.5, status_writer.beat)
    began = clock.now
    with pytest.raises(PeerLostError, match=r"no heartbeat for 1[34] s \(last seen: starting\)"):
        reader(tmp_path, status_reader, peer_timeout=10.0).wait(["bob"], 0)
    assert 13 < clock.now - began < 15


def test_wait_ends_when_the_run_is_stopping_and_reports_slow_peers(tmp_path: Path, clock: Clock) -> None:
    for peer in ("bob", "cyd"):
        clock.every(1.0, Heartbeat(tmp_path / "exchange", peer).beat)
    waiting, slow = list[str](), list[str]()
    end = clock.now + 25
    with pytest.raises(RoundAbortedError):
        reader(tmp_path, peer_timeout=10.0).wait(
            ["bob", "cyd"],
            3,
            WaitCallbacks(waiting=waiting.append, slow=slow.append, stopping=lambda: clock.now > end),
        )
    assert waiting[0] == "waiting for round 3 of bob, cyd"
    (message,) = slow  # said once, with what each of them does
    assert "bob: its heartbeat continues; cyd: its heartbeat continues (until" in message
    seconds = [int(re.findall(r"for (\d+) s;", each)[0]) for each in (message, *waiting[1:])]
    assert seconds == sorted(seconds), "the phase tells how long the wait has been, while it lasts"
    assert (seconds[0], seconds[-1] >= 20) == (10, True)


def test_a_peer_that_was_killed_does_not_beat_on(tmp_path: Path, clock: Clock) -> None:
    """Before its time-out, too: twenty seconds of silence are no heartbeat."""
    beat, messages = Heartbeat(tmp_path / "exchange", "bob"), list[str]()
    killed, end = clock.now + 30, clock.now + 55
    clock.every(1.0, lambda: beat.beat() if clock.now < killed else None)
    with pytest.raises(RoundAbortedError):
        reader(tmp_path, peer_timeout=50.0).wait(
            ["bob"], 3, WaitCallbacks(waiting=messages.append, slow=messages.append, stopping=lambda: clock.now > end)
        )
    assert not any("its heartbeat continues" in message for message in messages)
    assert any("no heartbeat for 2" in message for message in messages)


def test_arrival_of_each_peer_is_reported_with_its_seconds(tmp_path: Path, clock: Clock) -> None:
    Exchange(tmp_path / "exchange", "bob", "run").publish(0, ROWS, 0)
    clock.at(7, lambda: Exchange(tmp_path / "exchange", "cyd", "run").publish(0, ROWS, 0))
    arrivals: dict[str, float] = {}
    reader(tmp_path).wait(["bob", "cyd"], 0, WaitCallbacks(arrived=arrivals.__setitem__))
    assert arrivals["bob"] == 0
    assert arrivals["cyd"] == pytest.approx(7, abs=0.06)  # one polling interval


def test_rounds_that_have_arrived_can_be_worked_on_while_others_are_awaited(tmp_path: Path, clock: Clock) -> None:
    Exchange(tmp_path / "exchange", "bob", "run").publish(0, ROWS, 0)
    clock.at(7, lambda: Exchange(tmp_path / "exchange", "cyd", "run").publish(0, ROWS, 0))
    seen: list[list[str]] = []
    callbacks = WaitCallbacks(meanwhile=lambda arrived: seen.append(sorted(arrived)))
    assert list(reader(tmp_path).wait(["bob", "cyd"], 0, callbacks)) == ["bob", "cyd"]
    assert seen
    assert all(peers == ["bob"] for peers in seen)
    seen.clear()
    reader(tmp_path).wait(["bob", "cyd"], 0, callbacks)
    assert not seen  # nobody is awaited


def test_store_and_its_commands_do_not_import_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from mutualrl.see import Exchange; from mutualrl.see.inspection import inspect_policy, export;"
        "import mutualrl.storage.checkpoints, mutualrl.cli.exchange, mutualrl.see.retention;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
