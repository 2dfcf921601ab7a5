"""`mutualrl thl-check`: can two models exchange traces?"""

from __future__ import annotations

import typer

from mutualrl.cli.output import emit, prose
from mutualrl.console.display import print_text
from mutualrl.console.plots import directory_for
from mutualrl.paper.thl.request import ThlRequest
from mutualrl.paper.thl.thl_check import check


def thl_check(request: ThlRequest) -> None:
    """Run the suites, print their tables, and exit with 3 if a pair is unsafe."""
    directory = None if request.plot is None else directory_for(request.plot)
    console = prose()
    result = check(request, console)
    drawn = [] if directory is None else [str(path) for path in result.plot(directory)]
    if request.as_json:
        emit({**result.plain(), **({"figures": drawn} if drawn else {})})
    else:
        typer.echo(result.markdown())
    unsafe = [(pair, reason) for pair in result.pairs for reason in pair.tokenizers.reasons]
    for pair, reason in unsafe:
        print_text(console, f"unsafe: {pair.source} -> {pair.target}: {reason}", 2000)
    if unsafe:
        raise typer.Exit(3)
