"""Inputs of `mutualrl compare`: a sweep directory, or run directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mutualrl.errors import UsageError
from mutualrl.reporting.comparability import comparisons
from mutualrl.runs.logs import read_runs
from mutualrl.study.claims import RegisteredClaims
from mutualrl.study.comparison import Compared, compare
from mutualrl.study.outcomes import Outcome, Outcomes, of_run
from mutualrl.study.sweep_directory import SWEEP, compared


def compare_paths(
    paths: Sequence[Path], reference: str | None = None, registered: RegisteredClaims | None = None
) -> Compared:
    """Compare the arms of one sweep directory, or of runs. Raises UsageError for a mix of both."""
    sweeps = [path for path in paths if (path / SWEEP).is_file()]
    if not sweeps:
        return _of_runs(paths, reference, registered)
    if len(paths) > 1:
        raise UsageError(f"{sweeps[0]} is a sweep: compare it on its own")
    return compared(sweeps[0], registered, reference)


def _of_runs(paths: Sequence[Path], reference: str | None, registered: RegisteredClaims | None) -> Compared:
    outcomes: list[Outcome] = []
    notes: list[str] = []
    began: list[str] = []
    for comparison in comparisons(read_runs(list(paths))):
        notes += [f"{comparison.name}: {note}" for note in comparison.notes]
        for arm, runs in comparison.arms.items():
            outcomes += [of_run(run, comparison.name, arm) for run in runs]
            began += [run.info.created for run in runs]
    _require_one_per_seed(outcomes)
    arms = list(dict.fromkeys(outcome.arm for outcome in outcomes))
    if reference is not None and reference not in arms:
        raise UsageError(f"--reference: found {reference!r}, expected one of {', '.join(arms)}")
    if registered is not None and registered.changed > min(began):
        notes.append(f"the claims were last changed at {registered.changed}, after the first run began ({min(began)})")
    return compare(Outcomes(outcomes), reference, registered, notes)


def _require_one_per_seed(outcomes: Sequence[Outcome]) -> None:
    seen: set[tuple[str, str, int]] = set()
    for outcome in outcomes:
        key = (outcome.pool, outcome.arm, outcome.seed)
        if key in seen:
            raise UsageError(
                f"{outcome.pool}, {outcome.arm}: found two runs of seed {outcome.seed}, expected one run per seed; "
                "arms differ in their regime and its settings: to compare other settings, make each an arm of "
                "`mutualrl sweep FILE`"
            )
        seen.add(key)
