"""Diagnostics of a pool: `complementarity`, `xgrpo-check`, `sgt-check`, `channels`, `cost`."""

from __future__ import annotations

from functools import partial

import typer

from mutualrl.cli.commands import Complementarity, Diagnostic
from mutualrl.cli.output import emit, note_all, prose
from mutualrl.console.plots import directory_for, draw_all
from mutualrl.diagnostics.diagnose import diagnose
from mutualrl.diagnostics.diagnostic_request import DiagnosticRequest, gate_sizes
from mutualrl.diagnostics.diagnostic_tables import MARKDOWN
from mutualrl.diagnostics.figures import FIGURES
from mutualrl.diagnostics.hints import markdown as hints_markdown
from mutualrl.diagnostics.revival import markdown as revival_markdown
from mutualrl.engines.choice import check_engine
from mutualrl.errors import UsageError


def complementarity(options: Complementarity) -> None:
    """Check the options that only this diagnostic has, and run it."""
    if options.success not in ("first", "any"):
        raise UsageError(f"--success {options.success}: expected first or any")
    gate_sizes(options.k, [1])
    _diagnose("complementarity", options, success=options.success, gates=options.k)


def _diagnose(diagnostic: str, options: Diagnostic, *, success: str = "first", gates: str | None = None) -> None:
    if options.engine is not None:
        check_engine(options.engine)
    request = DiagnosticRequest.of(options)
    directory = None if options.plot is None else directory_for(options.plot)
    result = diagnose(diagnostic, request, prose(), success=success, gates=gates)
    compared = diagnostic != "complementarity" or "pairs" in result
    if directory is not None and not compared:
        note_all(["no figure is drawn: they compare two or more models"])
    elif directory is not None:
        result["figures"] = [str(path) for path in draw_all(FIGURES[diagnostic](result), directory)]
    if options.as_json:
        emit(result)
        return
    if compared:
        typer.echo(MARKDOWN[diagnostic](result))
    if "hints" in result:
        typer.echo(f"\n{hints_markdown(result)}")
    if "revival" in result:
        typer.echo(revival_markdown(result))


xgrpo_check = partial(_diagnose, "xgrpo-check")
sgt_check = partial(_diagnose, "sgt-check")
channels = partial(_diagnose, "channels")
cost = partial(_diagnose, "cost")
