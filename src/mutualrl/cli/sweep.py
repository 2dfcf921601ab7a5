"""`mutualrl sweep`: a grid of pools, arms and seeds. `mutualrl compare`: comparisons within sweeps and between runs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mutualrl.cli.completion import run_directories
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, prose, reports_errors
from mutualrl.console.display import print_text

if TYPE_CHECKING:
    from mutualrl.study.comparison import Compared


@reports_errors
def sweep(
    file: Annotated[Path, typer.Argument(help="A sweep file (YAML).", show_default=False)],
    out: Annotated[
        Path | None, typer.Option(help="Directory of the pieces; by default runs/NAME, from FILE.", show_default=False)
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(
            min=1, help="Parallel pieces; by default as many as the cores allow, one on GPUs.", show_default=False
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show pieces, minutes and disk; start nothing.")] = False,
    as_json: JsonFlag = False,
) -> None:
    """Run a grid of regimes, settings, pools and seeds, and compare the arms. The same command resumes.

    Example: mutualrl sweep examples/sweep.yaml --dry-run
    """
    from mutualrl.console.display import clean
    from mutualrl.storage.files import user_path
    from mutualrl.study.sweep import run_sweep
    from mutualrl.study.sweep_file import read_sweep
    from mutualrl.study.sweep_plan import planned, require_capacity

    planned_sweep = read_sweep(user_path(file))
    root = user_path(out or Path("runs") / user_path(file).stem).absolute()
    if dry_run:
        plan = planned(planned_sweep, root, jobs)
        require_capacity(plan, root, planned_sweep.file.budget.gigabytes)
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
        return
    end = run_sweep(planned_sweep, root, jobs, prose())
    remaining = [str(piece) for piece in end.left]
    if end.why:
        message = f"Note: {end.why}, for this call; remaining: {len(remaining)}"
        print_text(prose(), message)
    state = {"failed": dict(end.failed), "left": remaining, "results": str(root / "results.json")}
    if end.results is not None:
        _show(end.results, as_json=as_json, state=state)
    elif as_json:
        emit(state)
    if end.failed:
        lines = "\n".join(f"{piece}: {error}" for piece, error in end.failed.items())
        message = f"mutualrl: failed: {len(end.failed)}; the same command retries them:\n{lines}"
        print_text(prose(), message)
        raise typer.Exit(1)


@reports_errors
def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            help="A sweep directory, or run directories.", show_default=False, autocompletion=run_directories
        ),
    ],
    claims: Annotated[Path | None, typer.Option(help="Claims with their margins (YAML).", show_default=False)] = None,
    reference: Annotated[
        str | None, typer.Option(help="Reference arm of the comparisons; by default plain GRPO.", show_default=False)
    ] = None,
    as_json: JsonFlag = False,
) -> None:
    """Compare arms, paired by seed: differences with intervals, effect sizes, budgets, and declared claims.

    Example: mutualrl compare runs/grpo-0 runs/grpo-1 runs/grpo-2 runs/sgt-0 runs/sgt-1 runs/sgt-2
    """
    from mutualrl.storage.files import user_path
    from mutualrl.study.claims import read_claims
    from mutualrl.study.compare_runs import compare_paths

    registered = None if claims is None else read_claims(user_path(claims))
    _show(compare_paths([user_path(path) for path in paths], reference, registered), as_json=as_json)


def _show(result: Compared, *, as_json: bool, state: Mapping[str, object] | None = None) -> None:
    from mutualrl.console.display import clean
    from mutualrl.study.comparison import markdown

    for note in result.notes:
        print_text(prose(), f"Note: {note}")
    if as_json:
        emit({**result.to_json(), **(state or {})})
        return
    sys.stdout.write(clean(markdown(result), 10**7) + "\n")
    if state is not None:
        typer.echo(clean(f"\nresults: {state['results']}"))
