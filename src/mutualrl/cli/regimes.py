"""`mutualrl regimes`: list the sharing regimes, show their settings, check your own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.table import Table

from mutualrl.cli.completion import regime_names
from mutualrl.cli.options import JsonFlag
from mutualrl.cli.output import emit, reports_errors, screen, show_table
from mutualrl.console.display import print_text

if TYPE_CHECKING:
    from mutualrl.regimes import Regime

regimes = typer.Typer(help="The regimes: rules by which policies share experience.", no_args_is_help=True)

NameArgument = Annotated[
    str,
    typer.Argument(
        help="A name, FILE.py:CLASS or package.module:CLASS.", show_default=False, autocompletion=regime_names
    ),
]
NOT_MET = 3


@regimes.command("ls")
@reports_errors
def ls(as_json: JsonFlag = False) -> None:
    """List the regimes of mutualrl and of installed packages."""
    from mutualrl.console.display import cell
    from mutualrl.plugins import entry_points
    from mutualrl.regimes import GROUP, get_regime
    from mutualrl.regimes import regimes as shipped

    rows = [(name, "mutualrl", regime) for name, regime in shipped().items()]
    rows += [(name, point.value, get_regime(name)) for name, point in sorted(entry_points(GROUP).items())]
    if as_json:
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


@regimes.command("show")
@reports_errors
def show(name: NameArgument, as_json: JsonFlag = False) -> None:
    """Show a regime's settings with their defaults, and its metrics."""
    from mutualrl.console.display import cell
    from mutualrl.regimes import get_regime
    from mutualrl.regimes.info import RegimeInfo

    regime = get_regime(name)
    settings = _setting_rows(regime(), "")
    if as_json:
        info = {**RegimeInfo.of(regime).model_dump(mode="json"), "accepts_sources": regime.accepts_sources}
        emit({**info, "settings": settings})
        return
    print_text(screen(), f"{regime.name}: {regime.summary}")
    if regime.reads_peers:
        behind = "may be rounds behind" if regime().late() else "must keep up"
        print_text(screen(), f"Peers {behind} (exchange.staleness)")
    if regime.accepts_sources:
        print_text(screen(), "Learns from recorded texts, too (--source NAME=recorded:FILE)")
    table = Table("setting", "default", "meaning")
    for row in settings:
        table.add_row(cell(f"regime.{row['setting']}"), cell(str(row["default"])), cell(row["description"]))
    show_table(table)
    table = Table("metric", "unit", "meaning")
    for metric in regime.metrics:
        table.add_row(cell(metric.key), cell(metric.unit), cell(metric.meaning))
    show_table(table)


def _setting_rows(settings: Regime, prefix: str) -> list[dict[str, Any]]:
    """Return every setting with its default; nested settings have their regime's name as a prefix."""
    from pydantic import BaseModel

    rows: list[dict[str, Any]] = []
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


@regimes.command("check")
@reports_errors
def check(name: NameArgument, as_json: JsonFlag = False) -> None:
    """Run a regime on recorded rounds. Exits with 3 if it is unsound: an impure plan, rows without ids, state that
    does not round-trip through JSON."""
    from mutualrl.diagnostics.regime_check import check_regime, summary_of
    from mutualrl.regimes import get_regime

    findings = check_regime(get_regime(name))
    if as_json:
        emit(dict(summary_of(findings)))
    else:
        for finding in findings:
            status = "ok" if finding.passed else "FAIL"
            line = f"{status:5}{finding.check}" + (f": {finding.found}" if finding.found else "")
            print_text(screen(), line, 4000)
    if not all(finding.passed for finding in findings):
        raise typer.Exit(NOT_MET)
