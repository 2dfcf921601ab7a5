"""How far each peer was read: written once per round, read back, and refused where it is not what was written."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mutualrl.errors import ExchangeDamagedError
from mutualrl.see import LocalStore, ReadLog
from mutualrl.see.read_log import FILE


def test_what_was_read_in_every_round_is_read_back(tmp_path: Path) -> None:
    """Against a plain table of all rounds, over random lags of three peers."""
    draw = random.Random(0)
    log, table = ReadLog(LocalStore(tmp_path), "ada"), {}
    newest = {"bob": -1, "cyd": -1, "dee": -1}
    for number in range(60):
        for peer, last in newest.items():
            newest[peer] = draw.randint(max(last, number - 4), number)
        log.write(number, dict(newest))
        table[number] = dict(newest)
    again = ReadLog(LocalStore(tmp_path), "ada")
    for number, expected in table.items():
        assert {peer: again.newest(peer, number) for peer in newest} == expected
    assert again.newest("bob", 60) is None
    assert again.newest("bob", -1) == -1


def test_a_round_is_planned_once(tmp_path: Path) -> None:
    log = ReadLog(LocalStore(tmp_path), "ada")
    log.write(0, {"bob": 0})
    with pytest.raises(ValueError, match="round 0 was planned before"):
        log.write(0, {"bob": -1})


def test_rounds_before_the_log_began_were_read_in_full() -> None:
    log = ReadLog()
    log.write(10, {"bob": 8})
    assert [log.newest("bob", number) for number in (3, 9, 10)] == [3, 9, 8]


def test_a_steady_lag_is_stored_once(tmp_path: Path) -> None:
    log = ReadLog(LocalStore(tmp_path), "ada")
    for number in range(500):
        log.write(number, {"bob": number - 2})
    assert (tmp_path / "ada" / FILE).stat().st_size < 300


@pytest.mark.parametrize("content", [b"{}", b"not json", b'{"policy": "bob", "through": 1, "lags": {}}'])
def test_another_files_content_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    LocalStore(tmp_path).put("ada", FILE, content)
    with pytest.raises(ExchangeDamagedError, match=FILE):
        ReadLog(LocalStore(tmp_path), "ada")
