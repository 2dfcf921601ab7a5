"""Page: one self-contained HTML file that makes no network requests."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mutualrl.console.display import clean
from mutualrl.reporting.figure_specs import Figure
from mutualrl.reporting.report_tables import Table
from mutualrl.reporting.rescues import RescueReport
from mutualrl.runs.curves import Bars, Curve

CHUNK = 500  # rescues per data block; a block is parsed on first use
TOLD = 17  # points per curve in its table
_NUMERIC = re.compile(r"[-+]?[0-9][0-9.,]*( ± [0-9.]+)?( \[.*\])?")


@dataclass(frozen=True, slots=True)
class PageSection:
    """Section of the page: warnings, and figures with their SVG. Its tables are shown with all others below."""

    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    figures: Sequence[tuple[Figure, str]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on runs: one sentence, its caveats, the commands that would decide the open questions, and what happened
    to the prompts on which every rollout failed."""

    answer: str
    cautions: Sequence[str]
    commands: Sequence[str]
    dead: Sequence[str] = ()


def render(
    title: str,
    command: str,
    version: str,
    verdicts: Sequence[Verdict],
    sections: Sequence[PageSection],
    made: Sequence[Table],
    recipes: Sequence[tuple[str, str]],
    rescued: RescueReport,
    rescue_figures: Sequence[tuple[Figure, str]],
    *,
    several: bool,
) -> str:
    """Return the page: verdicts, figures, rescues, tables.

    `recipes`: run names with the paths of their recipes relative to the page. All text is escaped; model output is in
    JSON blocks that a script inserts as text, and a content security policy (by hash) allows only that script.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.tests["number"] = lambda value: bool(_NUMERIC.fullmatch(str(value)))
    prefixed = sum(bool(section.tables) for section in sections) > 2  # the first section has the overview table
    assets = files("mutualrl.reporting") / "assets"
    script = (assets / "page.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.from_string((assets / "page.html.j2").read_text("utf-8")).render(
        title=clean(title, 200),
        command=clean(command, 2000),
        version=version,
        css=Markup((assets / "page.css").read_text("utf-8")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        verdicts=list(map(_verdict, verdicts)),
        sections=[_section(number, section) for number, section in enumerate(sections, 1)],
        tables=[
            _table(table, f"table-{number}-{place}", f"{section.title}: " if prefixed else "")
            for number, section in enumerate(sections, 1)
            for place, table in enumerate(section.tables, 1)
        ],
        made=[_table(table, f"made-{number}") for number, table in enumerate(made, 1)],
        recipes=[{"run": clean(run, 200), "href": quote(path)} for run, path in recipes],
        rescues={
            "total": len(rescued.records),
            "size": CHUNK,
            "several": several,
            "policies": sorted({str(rescue["policy"]) for rescue in rescued.records}),
            "notes": [clean(note) for note in rescued.notes],
            "tables": [_table(table, f"rescued-{number}") for number, table in enumerate(rescued.tables, 1)],
            "figures": [_figure(f, svg, f"rescue-figure-{i}") for i, (f, svg) in enumerate(rescue_figures, 1)],
            "chunks": [Markup(as_block(rescued.records[i : i + CHUNK])) for i in range(0, len(rescued.records), CHUNK)],
        },
    )


def as_block(value: object) -> str:
    """Return JSON that is safe in a script element: it cannot start or end a tag or comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _verdict(verdict: Verdict) -> dict[str, object]:
    return {
        "answer": clean(verdict.answer, 2000),
        "cautions": [clean(caution) for caution in verdict.cautions],
        "dead": [clean(sentence) for sentence in verdict.dead],
        "commands": [clean(command, 4000) for command in verdict.commands],
    }


def _section(number: int, section: PageSection) -> dict[str, object]:
    return {
        "id": f"section-{number}",
        "title": clean(section.title, 200),
        "notes": [clean(note) for note in section.notes],
        "figures": [_figure(figure, svg, f"figure-{number}-{i}") for i, (figure, svg) in enumerate(section.figures, 1)],
    }


def _table(table: Table, key: str, prefix: str = "") -> dict[str, object]:
    return {
        "id": key,
        "title": clean(prefix + table.title, 200),
        "head": [clean(head, 200) for head in table.head],
        "rows": [list(map(clean, row)) for row in table.rows],
    }


def _figure(figure: Figure, svg: str, key: str) -> dict[str, object]:
    rows = [[panel.title, label, _points(curve)] for panel in figure.panels for label, curve in panel.lines.items()]
    rows += [[panel.title, label, _heights(bars)] for panel in figure.panels for label, bars in panel.bars.items()]
    return {
        "id": key,
        "title": clean(figure.title, 200),
        "caption": clean(figure.caption),
        "paper": figure.paper,
        "file": figure.name,
        "svg": Markup(svg),
        "rows": [list(map(clean, row)) for row in rows],
    }


def _points(curve: Curve) -> str:
    """Return up to TOLD evenly spaced points of a curve, with the half-width of its band."""
    places = sorted({place * (len(curve) - 1) // max(1, TOLD - 1) for place in range(TOLD)}) if len(curve) else []
    drawn = curve.iloc[places]
    widths = drawn["high"] - drawn["value"] if "high" in drawn else [None] * len(drawn)
    points = []
    for step, value, width in zip(drawn.index, drawn["value"], widths, strict=True):
        points.append(f"{step}: {value:.4g}" + ("" if width is None else f" ± {width:.2g}"))
    return "; ".join(points)


def _heights(bars: Bars) -> str:
    heights = []
    for category, value, error in zip(bars.index, bars["value"], bars["error"], strict=True):
        heights.append(f"{category}: {value:.4g}" + ("" if math.isnan(error) else f" ± {error:.2g}"))
    return "; ".join(heights)
