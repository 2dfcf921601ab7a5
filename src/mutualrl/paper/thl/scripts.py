"""Alignment error by family of scripts and by rule. Source: paper, Table "Multilingual alignment error"."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.markdown import percent, table
from mutualrl.diagnostics.lazy_model import LazyModel, OnBatch
from mutualrl.diagnostics.passages import family
from mutualrl.paper.thl.traces import relative_error, score_texts, unit_mass
from mutualrl.thl import Anchor
from mutualrl.thl.words import Unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FAMILIES = ("Western", "CJK", "other")
#: the paper's three rules, and byte-synchronous groups
RULES: tuple[tuple[str, Anchor, Unit], ...] = (
    ("word", "word", "word"),
    ("char", "char", "char"),
    ("auto", "word", "auto"),
    ("span", "span", "auto"),
)


@dataclass(frozen=True, slots=True)
class ScriptRow:
    """Relative MAE of each rule in a family of scripts, over `units` words or characters."""

    family: str
    texts: int
    units: int
    word: float
    char: float
    auto: float
    span: float


@dataclass(frozen=True, slots=True)
class Scripts:
    """Result: a row per family that the passages have."""

    passages_left_out: int
    rows: list[ScriptRow]


def scripts(passages: Sequence[str], source: LazyModel, target: LazyModel, on_batch: OnBatch) -> Scripts:
    """Return the relative MAE of each rule by family of scripts, per word, or per character in a text with CJK."""
    scored = score_texts([passage.strip() for passage in passages], source, target, on_batch)
    rows: list[ScriptRow] = []
    for name in FAMILIES:
        texts = [s for s in scored if family(s.text) == name]
        if not texts:
            continue
        truth = [unit_mass(s.text, s.source_ids, s.trace, source.tokenizer) for s in texts]
        errors = {}
        for rule, anchor, unit in RULES:
            masses = []
            for s in texts:
                values = s.align(source, target, anchor, unit)
                masses.append(unit_mass(s.text, s.target_ids, values, target.tokenizer))
            errors[rule] = relative_error(masses, truth)
        rows.append(ScriptRow(family=name, texts=len(texts), units=sum(map(len, truth)), **errors))
    return Scripts(len(passages) - len(scored), rows)


def markdown(pairs: Sequence[tuple[str, Scripts]]) -> str:
    """Return the table of all pairs. `pairs`: with their labels."""
    rows = []
    for label, result in pairs:
        for row in result.rows:
            errors = [percent(getattr(row, rule)) for rule, _, _ in RULES]
            rows.append([label, row.family, str(row.texts), *errors])
    head = ["pair", "text", "texts", *(f"{rule} (%)" for rule, _, _ in RULES)]
    return table("scripts: relative MAE by rule, per word, or per character in CJK", head, rows)


def draw(axis: Axes, result: Scripts) -> None:
    """Draw the error of every rule by family."""
    positions = np.arange(len(result.rows))
    for number, (rule, _, _) in enumerate(RULES):
        errors = [100 * getattr(row, rule) for row in result.rows]
        axis.bar(positions + 0.2 * (number - 1.5), errors, 0.2, label=rule)
    axis.set_xticks(positions, [row.family for row in result.rows])
    axis.set(ylabel="relative MAE (%)")
    axis.legend()
