"""Page: one self-contained HTML file that makes no network requests."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from typing import Literal, TypeAlias
from urllib.parse import quote

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from mutualrl.console.display import clean
from mutualrl.reporting.charts import chart
from mutualrl.reporting.figure_specs import Figure
from mutualrl.reporting.report_tables import Table
from mutualrl.reporting.rescues import RescueReport
from mutualrl.reporting.signs import Signs
from mutualrl.runs.curves import Bars, Curve
from mutualrl.storage.files import JsonObject

CHUNK = 500  # cards per data block; a block is parsed on first use
TOLD = 17  # points per curve in its table
MOST_COMMANDS = 2
_NUMERIC = re.compile(r"[-+]?[0-9][0-9.,]*( ± [0-9.]+)?( \[.*\])?")
SCRIPTS = ("charts.js", "cards.js", "page.js")


@dataclass(frozen=True, slots=True)
class PageSection:
    """Section of the page: warnings, and figures. Its tables are shown with all others below."""

    title: str
    notes: Sequence[str]
    tables: Sequence[Table]
    figures: Sequence[Figure]


#: result of a comparison or of a run
Word: TypeAlias = Literal[
    "Hurt", "Not decided", "Helped", "No baseline yet", "Baseline only", "No result yet", "Not measured"
]


@dataclass(frozen=True, slots=True)
class Dead:
    """Dead prompts of a policy or an arm after its first round, the most in any round, and at the end."""

    label: str
    first: float
    most: float
    last: float
    words: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """Verdict on a run or a comparison, `subject`: a word; a number with its interval and what it is based on; what the
    number does not say, caveats, dead prompts, what sources cost and gave; the commands that would decide more."""

    word: Word
    subject: str
    answer: str = ""
    number: str = ""
    interval: str = ""
    basis: str = ""
    cautions: Sequence[str] = ()
    commands: Sequence[str] = ()
    dead: Sequence[Dead] = ()
    costs: Sequence[str] = ()

    def to_json(self) -> dict[str, object]:
        """Return the fields as plain values."""
        return asdict(self)


@dataclass(frozen=True)
class PageContent:
    """What a page shows. `recipes`: run names with the paths of their recipes relative to the page; `samples`: records
    of `sampled.collect_samples`; `most_points`: per curve, None for all; `signs`: of arms and policies; `runs`: their
    number."""

    title: str
    command: str
    version: str
    verdicts: Sequence[Verdict]
    sections: Sequence[PageSection]
    made: Sequence[Table]
    recipes: Sequence[tuple[str, str]]
    rescued: RescueReport
    samples: Sequence[JsonObject]
    signs: Signs
    runs: int
    most_points: int | None = None

    @property
    def figures(self) -> dict[str, Figure]:
        """Return the figures by key, in the order of the page."""
        keyed: dict[str, Figure] = {}
        for number, section in enumerate(self.sections, 1):
            keyed |= {f"figure-{number}-{place}": figure for place, figure in enumerate(section.figures, 1)}
        return keyed | {f"rescue-figure-{place}": figure for place, figure in enumerate(self.rescued.figures, 1)}


def render(page: PageContent) -> str:
    """Return the page: verdicts, charts, rescues, samples, tables.

    All text is escaped; model output is in JSON blocks that a script inserts as text, and a content security policy (by
    hash) allows only that script.
    """
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.tests["number"] = lambda value: bool(_NUMERIC.fullmatch(str(value)))
    prefixed = sum(bool(section.tables) for section in page.sections) > 2  # the first section has the overview table
    assets = files("mutualrl.reporting") / "assets"
    parts = "\n".join((assets / name).read_text("utf-8") for name in SCRIPTS)
    script = f'"use strict";\n{parts}'
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    rescued = page.rescued
    several = page.runs > 1
    sections = [
        {
            "id": f"section-{number}",
            "title": clean(section.title, 200),
            "notes": [clean(note) for note in section.notes],
            "figures": [_figure(figure, f"figure-{number}-{i}") for i, figure in enumerate(section.figures, 1)],
        }
        for number, section in enumerate(page.sections, 1)
    ]
    rescues = {
        **_cards(rescued.records),
        "gated": rescued.gated,
        "hints": sum(bool(record["hint"]) for record in rescued.records),
        "notes": [clean(note) for note in rescued.notes],
        "tables": [_table(table, f"rescued-{number}") for number, table in enumerate(rescued.tables, 1)],
        "figures": [_figure(figure, f"rescue-figure-{i}") for i, figure in enumerate(rescued.figures, 1)],
    }
    most = page.most_points
    charts = {key: chart(figure, page.signs, most, singles=most is None) for key, figure in page.figures.items()}
    return environment.from_string((assets / "page.html.j2").read_text("utf-8")).render(
        title=clean(page.title, 200),
        command=clean(page.command, 2000),
        version=page.version,
        css=Markup((assets / "page.css").read_text("utf-8")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        verdicts=[_verdict(verdict, page.signs) for verdict in page.verdicts],
        commands=_commands(page.verdicts),
        cautions=_cautions(page.verdicts),
        sections=sections,
        tables=[
            _table(table, f"table-{number}-{place}", f"{section.title}: " if prefixed else "")
            for number, section in enumerate(page.sections, 1)
            for place, table in enumerate(section.tables, 1)
        ],
        made=[_table(table, f"made-{number}") for number, table in enumerate(page.made, 1)],
        recipes=[{"run": clean(run, 200), "href": quote(path)} for run, path in page.recipes],
        several=several,
        rescues=rescues,
        samples=_cards(page.samples),
        charts=Markup(as_block({"signs": page.signs.to_json(), "figures": charts})),
    )


def as_block(value: object) -> str:
    """Return JSON that is safe in a script element: it cannot start or end a tag or comment."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _cards(records: Sequence[JsonObject]) -> dict[str, object]:
    """Return what the template shows of the records of cards: their policies, and the blocks of their data."""
    return {
        "total": len(records),
        "size": CHUNK,
        "policies": sorted({str(record["policy"]) for record in records}),
        "chunks": [Markup(as_block(records[i : i + CHUNK])) for i in range(0, len(records), CHUNK)],
    }


def _verdict(verdict: Verdict, signs: Signs) -> Mapping[str, object]:
    most = max((each.most for each in verdict.dead), default=0.0)
    bars = []
    for each in verdict.dead:
        shares = {key: round(100 * getattr(each, key) / most, 1) if most else 0 for key in ("first", "most", "last")}
        counts = [_count(value) for value in (each.first, each.most, each.last)]
        bars.append({"label": clean(each.label, 200), "counts": counts, "words": clean(each.words), **shares})
        bars[-1]["colour"] = signs.colour(each.label)
    return {
        "word": verdict.word,
        "kind": {"Helped": "good", "Hurt": "bad"}.get(verdict.word, "open"),
        **{key: clean(getattr(verdict, key), 2000) for key in ("subject", "answer", "number", "interval", "basis")},
        "cautions": [clean(caution) for caution in verdict.cautions],
        "costs": [clean(cost) for cost in verdict.costs],
        "dead": bars,
    }


def _count(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"


def _cautions(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the cautions of all verdicts, each once; what not all of them have, with its subject."""
    shared = set.intersection(*(set(verdict.cautions) for verdict in verdicts)) if verdicts else set()
    lines = []
    for verdict in verdicts:
        lines += [caution if caution in shared else f"{verdict.subject}: {caution}" for caution in verdict.cautions]
    return [clean(line) for line in dict.fromkeys(lines)]


def _commands(verdicts: Sequence[Verdict]) -> list[str]:
    """Return the commands of the first verdict that has any, at most MOST_COMMANDS."""
    commands = next((verdict.commands for verdict in verdicts if verdict.commands), ())
    return [clean(command, 4000) for command in commands[:MOST_COMMANDS]]


def _table(table: Table, key: str, prefix: str = "") -> dict[str, object]:
    return {
        "id": key,
        "title": clean(prefix + table.title, 200),
        "head": [clean(head, 200) for head in table.head],
        "rows": [list(map(clean, row)) for row in table.rows],
    }


def _figure(figure: Figure, key: str) -> dict[str, object]:
    rows = [[panel.title, label, _points(curve)] for panel in figure.panels for label, curve in panel.lines.items()]
    rows += [[panel.title, label, _heights(bars)] for panel in figure.panels for label, bars in panel.bars.items()]
    return {
        "id": key,
        "title": clean(figure.title, 200),
        "caption": clean(figure.caption),
        "paper": figure.paper,
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
