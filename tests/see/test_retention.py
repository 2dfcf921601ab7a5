"""Nothing is deleted that somebody may still need; absences, attempts and standings are what they were."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mutualrl.errors import ExchangeDamagedError, FencedError, PeerLostError, RoundAbortedError, WaitTimeoutError
from mutualrl.process.status import Standing, Voice, Word
from mutualrl.records import Rollout
from mutualrl.see import Absences, Exchange, Heartbeat, Listener, Patience, open_store
from mutualrl.see.files import committed_rounds, round_of
from mutualrl.see.retention import collect, deletable
from mutualrl.see.survey import survey

ROWS = [Rollout("p", 0, 1.0, True, text="yes")]


@given(st.sets(st.integers(0, 60)), st.integers(0, 60), st.integers(1, 20))
def test_what_goes_is_old_passed_and_not_among_the_newest(rounds: set[int], needed: int, keep: int) -> None:
    gone = deletable(rounds, needed, keep)
    stays = rounds - set(gone)
    assert set(gone) <= rounds
    assert all(round_ < needed for round_ in gone)
    assert len(stays) >= min(keep, len(rounds))
    assert not gone or max(gone) < min(stays)
    assert all(r >= needed or len([s for s in rounds if s > r]) < keep for r in stays)  # and no more is kept than that


def test_collecting_takes_parts_of_all_ranks_and_attempts(tmp_path: Path) -> None:
    writer = Exchange(tmp_path, "bob", "run")
    for round_ in range(6):
        writer.commit(round_, [writer.write_part(round_, ROWS, rank) for rank in (0, 1)], 0)
    Exchange(tmp_path, "bob", "run", attempt=1).publish(2, ROWS * 3, 0)
    size = sum(
        p.stat().st_size for p in (tmp_path / "bob").iterdir() if (round_of(p.name) or 9) < 4 or p.name[:6] == "0" * 6
    )
    assert collect(tmp_path, "bob", 4, 1, dry_run=True) == ([0, 1, 2, 3], size)
    assert committed_rounds(open_store(tmp_path), "bob") == [0, 1, 2, 3, 4, 5]
    assert collect(tmp_path, "bob", 4, 1) == ([0, 1, 2, 3], size)
    assert {round_of(p.name) for p in (tmp_path / "bob").iterdir()} == {4, 5}
    found = survey(tmp_path, "run", "bob", verify=True)
    assert (found.rounds, found.freed, found.gaps, found.damaged, found.stray) == ([4, 5], 4, [], [], [])


def test_a_survey_names_gaps_damage_and_parts_that_nobody_committed(tmp_path: Path) -> None:
    writer = Exchange(tmp_path, "bob", "run")
    for round_ in (0, 1, 4):
        writer.publish(round_, ROWS, 0)
    writer.write_part(5, ROWS)
    found = survey(tmp_path, "run", "bob", verify=True)
    assert (found.gaps, found.damaged, found.stray) == ([2, 3], [], ["000005.parquet"])
    (tmp_path / "bob" / "000001.parquet").write_bytes(b"")
    (line,) = survey(tmp_path, "run", "bob", verify=True).damaged
    assert "000001.parquet: 0 bytes" in line
    assert survey(tmp_path, "run", "bob", verify=False).damaged == []


def test_an_older_attempt_is_fenced_off_once_a_newer_one_has_claimed_the_policy(tmp_path: Path) -> None:
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


def test_absences_are_kept_and_end_when_the_run_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    first = Absences(store, "ada")
    assert not first.absent("bob", 3)
    first.lose("bob", 3)
    again = Absences(store, "ada")
    assert [again.absent("bob", r) for r in (2, 3, 99)] == [False, True, True]
    assert again.away() == {"bob": 3}
    again.welcome_back(7)
    third = Absences(store, "ada")
    assert [third.absent("bob", r) for r in (2, 3, 6, 7)] == [False, True, True, False]
    assert third.away() == {}
    third.lose("bob", 9)
    assert [Absences(store, "ada").absent("bob", r) for r in (6, 8, 9)] == [True, False, True]


def reader(root: Path, standing: Standing | None = None, **patience: object) -> Exchange:
    return Exchange(root / "exchange", "ada", "run", patience=Patience(**patience), standing=standing)  # type: ignore[arg-type]


def test_a_lost_peer_is_left_out_where_the_pool_may_go_on(tmp_path: Path) -> None:
    Exchange(tmp_path / "exchange", "cyd", "run").publish(0, ROWS, 0)
    Exchange(tmp_path / "exchange", "bob", "run")
    Heartbeat(tmp_path / "exchange", "bob").beat()
    began = time.monotonic()
    got = reader(tmp_path, peer_timeout=1.0, on_peer_loss="continue").wait(["bob", "cyd"], 0)
    assert list(got) == ["cyd"]
    assert 1.0 <= time.monotonic() - began < 4
    with pytest.raises(PeerLostError, match="no heartbeat for"):
        reader(tmp_path, peer_timeout=1.0).wait(["bob", "cyd"], 0)


def test_a_patient_reader_waits_beyond_the_peer_timeout(tmp_path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError):
        reader(tmp_path, peer_timeout=0.1, round_timeout=2.0, on_peer_loss="wait").wait(["bob"], 0)
    assert time.monotonic() - began >= 2


def test_a_supervisors_word_counts_and_a_dead_supervisors_does_not(tmp_path: Path) -> None:
    voice = Voice(tmp_path, 0, session=0)
    voice.tell("bob", Word("lost", 2))
    standing = Standing(tmp_path)
    assert standing.of("bob") == Word()  # nobody has seen it move: it may be of an earlier session
    voice.tell("bob", Word("restarting", 2))
    assert standing.of("bob") == Word("restarting", 2)
    assert standing.of("zoe") == Word()
    door = reader(tmp_path, standing, peer_timeout=0.2)
    spoken = [0.0]

    def speaks() -> bool:
        voice.tell("bob", Word("restarting" if time.monotonic() - began < 2 else "lost", 2))
        spoken[0] = time.monotonic()
        return False

    began = time.monotonic()
    with pytest.raises(PeerLostError, match="its supervisor gave it up"):
        door.wait(["bob"], 0, Listener(stopping=speaks))
    assert time.monotonic() - began >= 2  # a policy that is being started again is waited for


def test_a_policy_that_is_starting_under_a_supervisor_is_not_lost_for_having_no_heartbeat_yet(tmp_path: Path) -> None:
    voice = Voice(tmp_path, 0, session=0)
    standing = Standing(tmp_path)
    voice.tell("bob", Word("running", 1))
    standing.of("bob")
    door = reader(tmp_path, standing, peer_timeout=0.1, round_timeout=4.5)

    def speaks() -> bool:
        voice.say()
        return False

    with pytest.raises(WaitTimeoutError):  # the supervisor watches the start
        door.wait(["bob"], 0, Listener(stopping=speaks))


def test_a_wait_ends_when_the_run_is_asked_to_stop_and_tells_of_the_slow(tmp_path: Path) -> None:
    beat = Heartbeat(tmp_path / "exchange", "bob", interval=0.1)
    beat.start()
    said: list[str] = []
    began = time.monotonic()
    with pytest.raises(RoundAbortedError):
        reader(tmp_path, peer_timeout=1.0).wait(
            ["bob"], 3, Listener(waiting=said.append, slow=said.append, stopping=lambda: time.monotonic() - began > 2)
        )
    beat.stop("end")
    assert said[0] == "waiting for round 3 of bob"
    assert "its heartbeat goes on" in said[1]
    assert len(said) == 2


def test_each_peers_arrival_is_told(tmp_path: Path) -> None:
    for name in ("bob", "cyd"):
        Exchange(tmp_path / "exchange", name, "run").publish(0, ROWS, 0)
    told: dict[str, float] = {}
    reader(tmp_path).wait(["bob", "cyd"], 0, Listener(arrived=told.__setitem__))
    assert set(told) == {"bob", "cyd"}
    assert max(told.values()) < 1


def test_the_store_and_its_command_need_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from mutualrl.see import Exchange; from mutualrl.see.survey import survey, export;"
        "import mutualrl.storage.checkpoints, mutualrl.cli.exchange, mutualrl.see.retention;"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))
