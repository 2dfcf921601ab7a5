"""Checkpoints from which a run can be completed, worked by hand."""

from __future__ import annotations

import io
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
from rich.console import Console

from mutualrl.errors import ExchangeDamagedError
from mutualrl.launch.rewind import resume_cursors, rewind
from mutualrl.recipes import Request, resolve
from mutualrl.see.files import marker_name
from mutualrl.storage.artifacts import file_sum
from mutualrl.storage.checkpoints import CheckpointMarker, Checkpoints
from mutualrl.storage.files import write_checksummed
from mutualrl.storage.run_info import PolicyResult, RunInfo, Validation
from mutualrl.storage.rundir import RunDirectory, create


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


def stopped_run(path: Path, stack: ExitStack) -> RunDirectory:
    """Return a run of three policies at the cursors 4, 4 and 2, whose rounds 2 and 3, which cyd reads, are gone."""
    run = create(path, RunInfo(run_id="x"), stack)
    for name, cursors in {"ada": (2, 4), "bob": (2, 4), "cyd": (2,)}.items():
        store = Checkpoints(run.policy(name).root)
        for cursor in cursors:
            weights = store.staged(cursor) / "w"
            weights.parent.mkdir(parents=True)
            weights.write_bytes(b"w")
            store.commit(CheckpointMarker("x", name, cursor, cursor, 0, 1, {"w": file_sum(weights)}))
        rounds = run.exchange / name
        rounds.mkdir(parents=True, exist_ok=True)
        for round_index in (0, 1):
            (rounds / marker_name(round_index)).write_text("{}")
    return run


def test_refusal_for_a_finished_policy_leaves_the_checkpoints_of_its_peers(tmp_path: Path) -> None:
    recipe = resolve(Request(pool="tiny-three", regime="sgt"))
    validation = Validation(n=4, accuracy=0.5, by_group={}, no_box=None)
    finished = PolicyResult(
        initial_validation=None,
        validation=validation,
        steps=4,
        train_seconds=1.0,
    )
    with ExitStack() as stack:
        run = stopped_run(tmp_path / "r", stack)
        console = Console(file=io.StringIO(), width=400)
        write_checksummed(run.policy("bob").result, finished.model_dump(mode="json"), root=run.root)
        with pytest.raises(ExchangeDamagedError, match="'bob' cannot publish it again"):
            rewind(run, recipe, console)
        assert Checkpoints(run.policy("ada").root).steps() == [2, 4]
        shutil.rmtree(
            Checkpoints(run.policy("bob").root).path(4)
        )  # the rounds up to its end count, not its checkpoints
        with pytest.raises(ExchangeDamagedError, match="'bob' cannot publish it again"):
            rewind(run, recipe, console)
        shutil.rmtree(Checkpoints(run.policy("bob").root).path(2))
        for round_index in (2, 3):
            for name in ("ada", "bob"):
                (run.exchange / name / marker_name(round_index)).write_text("{}")
        rewind(run, recipe, console)  # a finished policy needs no checkpoint
        assert [Checkpoints(run.policy(name).root).steps() for name in ("ada", "cyd")] == [[2, 4], [2]]


def test_finished_policy_has_published_a_round_per_iteration_over_it(tmp_path: Path) -> None:
    """Eight steps with num_iterations 2 are four rounds: a peer that stopped early resumes."""
    recipe = resolve(Request(pool="tiny-three", regime="sgt", assignments=("trainer.num_iterations=2",)))
    result = PolicyResult(initial_validation=None, validation=None, steps=8)
    with ExitStack() as stack:
        run = stopped_run(tmp_path / "r", stack)
        write_checksummed(run.policy("bob").result, result.model_dump(mode="json"), root=run.root)
        for name, round_index in ((name, number) for name in ("ada", "bob") for number in (2, 3)):
            (run.exchange / name / marker_name(round_index)).write_text("{}")
        rewind(run, recipe, Console(file=io.StringIO(), width=400))
        assert [Checkpoints(run.policy(name).root).steps() for name in ("ada", "cyd")] == [[2, 4], [2]]


def test_policies_go_back_to_the_rounds_that_are_there(tmp_path: Path) -> None:
    recipe = resolve(Request(pool="tiny-three", regime="sgt"))
    with ExitStack() as stack:
        run = stopped_run(tmp_path / "r", stack)
        rewind(run, recipe, Console(file=io.StringIO(), width=400))
        assert [Checkpoints(run.policy(name).root).steps() for name in ("ada", "bob", "cyd")] == [[2]] * 3
