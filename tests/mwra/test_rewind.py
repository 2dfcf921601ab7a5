"""Checkpoints from which a run can be completed, worked by hand."""

from __future__ import annotations

import pytest

from mutualrl.errors import ExchangeDamagedError
from mutualrl.mwra.rewind import resume_cursors


def test_newest_checkpoints_are_kept_where_every_round_is_there() -> None:
    rounds = {"ada": range(6), "bob": range(6)}
    assert resume_cursors({"ada": [4, 2], "bob": [4, 2]}, rounds) == {"ada": 4, "bob": 4}
    assert resume_cursors({"ada": [2], "bob": [4, 2]}, rounds) == {"ada": 2, "bob": 4}
    assert resume_cursors({"ada": [], "bob": []}, {"ada": [], "bob": []}) == {"ada": 0, "bob": 0}


def test_policy_whose_rounds_are_gone_goes_back_and_publishes_them_again() -> None:
    # ada resumes at round 2 and reads bob's rounds 2 and 3, which are gone: bob goes back to 2
    assert resume_cursors({"ada": [2], "bob": [4, 2]}, {"ada": range(4), "bob": [0, 1]}) == {"ada": 2, "bob": 2}
    # bob's round 1 is gone and ada resumes at 1: bob goes back to 0 and now reads ada's rounds from 0 on, which are there
    assert resume_cursors({"ada": [1], "bob": [4, 2, 0]}, {"ada": range(4), "bob": [0, 2, 3]}) == {"ada": 1, "bob": 0}


def test_going_back_may_require_a_peer_to_go_back_too() -> None:
    rounds = {"ada": [2, 3], "bob": [3]}
    assert resume_cursors({"ada": [3, 2, 0], "bob": [4, 2, 0]}, rounds) == {"ada": 3, "bob": 4}
    # bob's round 2 is gone: back to 1; then ada's round 1 is gone: back to 0; then bob's round 0 is gone: back to 0
    assert resume_cursors({"ada": [2, 0], "bob": [4, 1, 0]}, rounds) == {"ada": 0, "bob": 0}


def test_equal_cursors_need_no_earlier_round() -> None:
    assert resume_cursors({"ada": [4], "bob": [4]}, {"ada": [], "bob": range(4)}) == {"ada": 4, "bob": 4}
    with pytest.raises(ExchangeDamagedError, match=r"round 3 of 'ada' is not in the exchange"):
        resume_cursors({"ada": [4], "bob": [4]}, {"ada": [], "bob": range(4)}, staleness=1)


def test_lost_peer_is_excused() -> None:
    assert resume_cursors(
        {"ada": [4], "bob": [2]}, {"ada": [], "bob": range(4)}, excused=lambda reader, writer, number: writer == "ada"
    ) == {"ada": 4, "bob": 2}
