"""`mutualrl thl-check`: can two models exchange traces?"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from mutualrl.cli.command import command
from mutualrl.cli.output import emit, prose
from mutualrl.console.display import print_text
from mutualrl.console.options import JSON, PLOT
from mutualrl.diagnostics.thl.flags import ThlFlags


@dataclass(frozen=True, kw_only=True)
class ThlOptions(ThlFlags):
    """Options of `thl-check`."""

    plot: Annotated[Path | None, PLOT] = None
    as_json: Annotated[bool, JSON] = False


@command(ThlOptions)
def thl_check(options: ThlOptions) -> None:
    """Check whether models can exchange traces: their tokenizers, then the paper's tables on THL.

    Exits with 3 if a pair is unsafe, and prints the reason.
    Example: mutualrl thl-check --source A --target B --suite tokenizers
    """
    from mutualrl.diagnostics.thl.thl_request import ThlRequest

    request = ThlRequest.of(options)
    directory = None
    if options.plot is not None:
        from mutualrl.console.plots import directory_for

        directory = directory_for(options.plot)
    from mutualrl.diagnostics.thl.thl_check import check
    from mutualrl.diagnostics.thl.thl_tables import markdown

    console = prose()
    result = check(request, console)
    if directory is not None:
        from mutualrl.diagnostics.thl.thl_plots import plot as draw

        result["figures"] = [str(path) for path in draw(result, directory)]
    if options.as_json:
        emit(result)
    else:
        typer.echo(markdown(result))
    unsafe = [(pair, reason) for pair in result["pairs"] for reason in pair["reasons"]]
    for pair, reason in unsafe:
        print_text(console, f"unsafe: {pair['source']} -> {pair['target']}: {reason}", 2000)
    if unsafe:
        raise typer.Exit(3)
