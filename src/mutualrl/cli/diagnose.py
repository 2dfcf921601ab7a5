"""Diagnostics of a pool, as commands: what is below `diagnostics/specs` and `paper/specs`."""

from __future__ import annotations

from typing import Any

import typer

from mutualrl.cli.output import emit, note_all, prose
from mutualrl.console.plots import directory_for, draw_all
from mutualrl.diagnostics.diagnose import diagnose
from mutualrl.diagnostics.diagnostic import Diagnostic
from mutualrl.engines.choice import check_engine


def run(diagnostic: Diagnostic[Any, Any], request: Any) -> None:
    """Run a diagnostic, draw its figures, and print its tables or its JSON."""
    if request.sampling.engine is not None:
        check_engine(request.sampling.engine)
    directory = None if request.plot is None else directory_for(request.plot)
    diagnosed = diagnose(diagnostic, request, prose())
    drawn: list[str] = []
    if directory is not None:
        drawn = [str(path) for path in draw_all(diagnosed.figures(), directory)]
        if not drawn:
            note_all(["no figure is drawn: they compare two or more models"])
    if request.as_json:
        emit({**diagnosed.plain(), **({"figures": drawn} if drawn else {})})
    else:
        typer.echo(diagnosed.markdown())
