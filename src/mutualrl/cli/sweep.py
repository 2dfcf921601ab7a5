"""`mutualrl sweep`: a grid of pools, arms and seeds. `mutualrl compare`: comparisons within sweeps and between runs."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from pathlib import Path

import typer

from mutualrl.cli.commands import Compare, SweepRequest
from mutualrl.cli.output import emit, note_all, prose
from mutualrl.console.display import clean, print_text
from mutualrl.console.user_path import user_path
from mutualrl.errors import UsageError
from mutualrl.recipes.agreement import few_held_out
from mutualrl.study.claims import read_claims
from mutualrl.study.compare_runs import compare_paths
from mutualrl.study.comparison import Compared, markdown
from mutualrl.study.sweep import run_sweep
from mutualrl.study.sweep_file import Sweep, read_sweep
from mutualrl.study.sweep_plan import SweepPlan, planned, require_capacity


def sweep(options: SweepRequest) -> None:
    """Run the missing pieces of a sweep, or only list them, and compare the arms."""
    planned_sweep = read_sweep(user_path(options.file))
    root = user_path(options.out or Path("runs") / user_path(options.file).stem).absolute()
    made = planned(planned_sweep, root, options.jobs)
    require_capacity(made, root, planned_sweep.file.budget.gigabytes)
    _require_startable(planned_sweep, made)
    if options.dry_run:
        _show_plan(made, as_json=options.as_json)
        return
    end = run_sweep(planned_sweep, root, options.jobs, prose())
    remaining = [str(piece) for piece in end.left]
    if end.why:
        note_all([f"{end.why}, for this call; remaining: {len(remaining)}"])
    state = {"failed": dict(end.failed), "left": remaining, "results": str(root / "results.json")}
    if end.results is not None:
        _show(end.results, as_json=options.as_json, state=state)
    elif options.as_json:
        emit(state)
    if end.failed:
        lines = "\n".join(f"{piece}: {error}" for piece, error in end.failed.items())
        print_text(prose(), f"mutualrl: failed: {len(end.failed)}; the same command retries them:\n{lines}")
        raise typer.Exit(1)


def _require_startable(of: Sweep, made: SweepPlan) -> None:
    """Rehearse the start of each pool and arm that has missing pieces, as `train --dry-run` does. Raises UsageError
    with every reason for which a piece would be refused: hours later, it would fail alone."""
    from mutualrl.cli.dry_run import try_out  # here: a sweep whose pieces are done starts nothing
    from mutualrl.launch.plan import known
    from mutualrl.launch.session import Launch

    arms = {(piece.pool, of.file.arms[piece.arm].distill or piece.arm) for piece in made.missing}
    refused: list[str] = []
    warned: dict[str, None] = {}
    with contextlib.chdir(of.path.parent):  # the pieces run in it
        for pool, arm in sorted(arms):
            start = try_out(of.recipes[pool, arm], Launch()).plan
            reasons = [*map(str, start.problems), *(f"this machine lacks {each}" for each in start.missing)]
            refused += [f"arm {arm!r} on {pool!r}: {reason}" for reason in reasons]
            few = known(lambda start=start: few_held_out(start.inputs.data))  # type: ignore[misc]
            warned |= {} if few is None else {f"{pool}: {few}": None}
    note_all(list(warned))
    if refused:
        raise UsageError(f"{of.path}: refused: {len(refused)}\n" + "\n".join(f"  - {line}" for line in refused))


def _show_plan(plan: SweepPlan, *, as_json: bool) -> None:
    if as_json:
        emit(plan.to_json())
        return
    minutes = "unknown until a piece has run" if plan.minutes is None else f"about {plan.minutes:.0f}"
    size = "unknown" if plan.bytes is None else f"about {plan.bytes / 1e6:,.0f} MB"
    typer.echo(f"pieces: {len(plan.missing)} of {len(plan.seconds) + len(plan.missing)} to run")
    typer.echo(f"minutes: {minutes}")
    typer.echo(f"disk: {size}")
    for piece in plan.missing:
        typer.echo(clean(f"  {piece}"))


def compare(options: Compare) -> None:
    """Compare the arms of a sweep, or runs, and print the tables."""
    registered = None if options.claims is None else read_claims(user_path(options.claims))
    compared = compare_paths([user_path(path) for path in options.paths], options.reference, registered)
    _show(compared, as_json=options.as_json)


def _show(result: Compared, *, as_json: bool, state: Mapping[str, object] | None = None) -> None:
    note_all(result.notes)
    if as_json:
        emit({**result.to_json(), "pieces": [piece.to_json() for piece in result.pieces], **(state or {})})
        return
    sys.stdout.write(clean(markdown(result), 10**7) + "\n")
    if state is not None:
        typer.echo(clean(f"\nresults: {state['results']}"))
