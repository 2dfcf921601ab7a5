"""Log of how far each peer was read: written once per round, read back, rejected if damaged."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from mutualrl.errors import ExchangeDamagedError
from mutualrl.see import LocalStore, ReadLog
from mutualrl.see.read_log import FILE


def test_log_of_every_round_is_read_back(tmp_path: Path) -> None:
    """Compare with a plain table of all rounds, over random lags of three peers."""
    draw = random.Random(0)
    log, table = ReadLog(LocalStore(tmp_path), "ada"), {}
    newest = {"bob": -1, "cyd": -1, "dee": -1}
    for number in range(60):
        for peer, last in newest.items():
            newest[peer] = draw.randint(max(last, number - 4), number)
        log.write(number, dict(newest))
        table[number] = dict(newest)
    reloaded = ReadLog(LocalStore(tmp_path), "ada")
    for number, expected in table.items():
        assert {peer: reloaded.newest(peer, number) for peer in newest} == expected
    assert reloaded.newest("bob", 60) is None
    assert reloaded.newest("bob", -1) == -1


def test_round_is_planned_only_once(tmp_path: Path) -> None:
    log = ReadLog(LocalStore(tmp_path), "ada")
    log.write(0, {"bob": 0})
    with pytest.raises(ValueError, match="round 0 was planned before"):
        log.write(0, {"bob": -1})


def test_rounds_before_the_log_count_as_read_in_full() -> None:
    log = ReadLog()
    log.write(10, {"bob": 8})
    assert [log.newest("bob", number) for number in (3, 9, 10)] == [3, 9, 8]


def test_constant_lag_is_stored_once(tmp_path: Path) -> None:
    log = ReadLog(LocalStore(tmp_path), "ada")
    for number in range(500):
        log.write(number, {"bob": number - 2})
    assert (tmp_path / "ada" / FILE).stat().st_size < 300


@pytest.mark.parametrize("content", [b"{}", b"not json", b'{"policy": "bob", "through": 1, "lags": {}}'])
def test_another_files_content_is_rejected_by_name(tmp_path: Path, content: bytes) -> None:
    LocalStore(tmp_path).put("ada", FILE, content)
    with pytest.raises(ExchangeDamagedError, match=FILE):
        ReadLog(LocalStore(tmp_path), "ada")
