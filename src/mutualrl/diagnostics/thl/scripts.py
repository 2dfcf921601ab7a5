"""Alignment error by family of scripts and by rule. Source: paper, Table "Multilingual alignment error"."""

from __future__ import annotations

from collections.abc import Sequence

from mutualrl.diagnostics.passages import family
from mutualrl.diagnostics.results import ScriptRow, Scripts
from mutualrl.diagnostics.thl.traces import LazyModel, OnBatch, relative_error, score_texts, unit_mass
from mutualrl.thl import Anchor
from mutualrl.thl.words import Unit

FAMILIES = ("Western", "CJK", "other")
#: the paper's three rules, and byte-synchronous groups
RULES: tuple[tuple[str, Anchor, Unit], ...] = (
    ("word", "word", "word"),
    ("char", "char", "char"),
    ("auto", "word", "auto"),
    ("span", "span", "auto"),
)


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
        rows.append(
            {
                "family": name,
                "texts": len(texts),
                "units": sum(map(len, truth)),
                "word": errors["word"],
                "char": errors["char"],
                "auto": errors["auto"],
                "span": errors["span"],
            }
        )
    return {"passages_left_out": len(passages) - len(scored), "rows": rows}
