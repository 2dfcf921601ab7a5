"""`mutualrl regimes`: list the sharing regimes, show their settings, check your own."""

from __future__ import annotations

from typing import Any, cast

import typer
from pydantic import BaseModel
from rich.table import Table

from mutualrl.cli.commands import OfRegime
from mutualrl.cli.output import emit, screen, show_table
from mutualrl.console.display import cell, print_text
from mutualrl.console.options import WithJson
from mutualrl.diagnostics.regime_check import check_regime, summary_of
from mutualrl.process.plugins import entry_points
from mutualrl.regimes import GROUP, Regime, get_regime
from mutualrl.regimes import regimes as shipped
from mutualrl.regimes.info import RegimeInfo
from mutualrl.regimes.regime import SELECTION
from mutualrl.storage.files import JsonObject
from mutualrl.traits import SourceTraits

NOT_MET = 3


def ls(options: WithJson) -> None:
    """List regimes with where they are from."""
    rows = [(name, "mutualrl", regime) for name, regime in shipped().items()]
    rows += [(name, point.value, get_regime(name)) for name, point in sorted(entry_points(GROUP).items())]
    if options.as_json:
        listed = [
            {"name": name, "from": origin, "summary": regime.summary, "level": regime.level}
            for name, origin, regime in rows
        ]
        emit({"regimes": listed})
        return
    table = Table("regime", "from", "what it does")
    for name, origin, regime in rows:
        table.add_row(cell(name), cell(origin), cell(regime.summary))
    show_table(table)


def show(options: OfRegime) -> None:
    """Print a regime's settings and metrics."""
    regime = get_regime(options.name)
    settings, needs = _setting_rows(regime(), ""), regime().needs()
    if options.as_json:
        info = {**RegimeInfo.of(regime).model_dump(mode="json"), "accepts_sources": needs.selections}
        emit({**info, "settings": settings})
        return
    print_text(screen(), f"{regime.name}: {regime.summary}")
    if needs.peers and not needs.source:
        behind = "may be rounds behind" if needs.late else "must keep up"
        print_text(screen(), f"Peers {behind} (exchange.staleness)")
    if needs.selections:
        which = "only" if needs.source else "too"
        kinds = {"recorded texts": SELECTION, "a served model": SELECTION, "a frozen one": SourceTraits(logprobs=True)}
        usable = ", ".join(kind for kind, traits in kinds.items() if regime().source_problem(traits) is None)
        print_text(screen(), f"Learns from sources, {which}: {usable} (--source NAME=KIND:WHERE)")
    table = Table("setting", "default", "meaning")
    for row in settings:
        table.add_row(cell(f"regime.{row['setting']}"), cell(str(row["default"])), cell(row["description"]))
    show_table(table)
    table = Table("metric", "unit", "meaning")
    for metric in regime.metrics:
        table.add_row(cell(metric.key), cell(metric.unit), cell(metric.meaning))
    show_table(table)


def _setting_rows(settings: Regime, prefix: str) -> list[JsonObject]:
    """Return every setting with its default; nested settings have their regime's name as a prefix."""
    rows: list[JsonObject] = []
    for key, field in type(settings).model_fields.items():
        value = getattr(settings, key)
        if isinstance(value, BaseModel):
            rows += _setting_rows(cast(Any, value), f"{prefix}{key}.")
            continue
        rows.append(
            {
                "setting": f"{prefix}{key}",
                "default": settings.model_dump(mode="json")[key],
                "type": str(field.annotation),
                "description": field.description or "",
            }
        )
    return rows


def check(options: OfRegime) -> None:
    """Print what each check found. Exits with 3 if one failed."""
    findings = check_regime(get_regime(options.name))
    if options.as_json:
        emit(dict(summary_of(findings)))
    else:
        for finding in findings:
            status = "ok" if finding.passed else "FAIL"
            line = f"{status:5}{finding.check}" + (f": {finding.found}" if finding.found else "")
            print_text(screen(), line, 4000)
    if not all(finding.passed for finding in findings):
        raise typer.Exit(NOT_MET)
