"""`mutualrl thl-check`: can two models exchange traces?"""

from __future__ import annotations

import typer

from mutualrl.cli.commands import ThlCheck
from mutualrl.cli.output import emit, prose
from mutualrl.console.display import print_text
from mutualrl.console.plots import directory_for
from mutualrl.diagnostics.thl.thl_check import check
from mutualrl.diagnostics.thl.thl_plots import plot
from mutualrl.diagnostics.thl.thl_request import ThlRequest
from mutualrl.diagnostics.thl.thl_tables import markdown


def thl_check(options: ThlCheck) -> None:
    """Run the suites, print their tables, and exit with 3 if a pair is unsafe."""
    request = ThlRequest.of(options)
    directory = None if options.plot is None else directory_for(options.plot)
    console = prose()
    result = check(request, console)
    if directory is not None:
        result["figures"] = [str(path) for path in plot(result, directory)]
    if options.as_json:
        emit(result)
    else:
        typer.echo(markdown(result))
    unsafe = [(pair, reason) for pair in result["pairs"] for reason in pair["reasons"]]
    for pair, reason in unsafe:
        print_text(console, f"unsafe: {pair['source']} -> {pair['target']}: {reason}", 2000)
    if unsafe:
        raise typer.Exit(3)
