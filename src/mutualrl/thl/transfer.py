"""Move log-probability mass from source tokens to target tokens along their units.

Source: paper, Section "Tokenizer Heterogeneity Layer" and Algorithm "THL: WordAlignLogProbs":
Z_w = sum of the source log-probs in unit w, and each of the C_w target tokens of w gets Z_w / C_w.
Departures: a token in several units gives mass to each, and receives mass from each.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mutualrl.thl.offsets import Bools
from mutualrl.thl.table import Ints
from mutualrl.thl.units import Floats, Touch, Units


@dataclass(frozen=True, slots=True)
class AlignedValues:
    """Aligned values of T target tokens, NaN where uncovered.

    `residual`: mass of units without a valid target token; `stranded`: number of source tokens that touch one.
    """

    logprobs: Floats
    covered: Bools
    residual: float
    stranded: int


def transfer(
    units: Units,
    logprobs: Floats,
    targets: int,
    changed: Bools | None = None,
    *,
    rotate: int = 0,
    empty_is_zero: bool = False,
) -> AlignedValues:
    """Sum the source mass of every unit and spread it evenly over the unit's valid target tokens.

    `logprobs`, shape (S,): of the source tokens; `targets`: T. `changed`, shape (T,): target tokens whose bytes differ
    from the text's; these, and tokens that touch a broken unit, are invalid. `rotate` gives each unit the mass of the
    unit `rotate` positions before it: the broken alignment of the paper's ratio table, a control. `empty_is_zero`: a
    unit without source tokens gives its target tokens 0, if any unit has source tokens (the paper's pseudocode).
    """
    source, target = units.source, units.target
    mass = gather_units(source, logprobs, units.count)
    sources = np.bincount(source.unit, minlength=units.count)
    if rotate:
        mass, sources = np.roll(mass, rotate), np.roll(sources, rotate)
    token, unit = target.token, target.unit
    if units.broken is not None and changed is not None:
        invalid = changed.copy()
        invalid[token[units.broken[unit]]] = True
        keep = ~invalid[token]
        token, unit = token[keep], unit[keep]
    counts = np.bincount(unit, minlength=units.count)
    good = (counts > 0) & ((sources > 0) if not empty_is_zero else sources.any())
    if units.broken is not None:
        good &= ~units.broken
    part = mass / np.maximum(counts, 1)
    if not (all_good := bool(good.all())):
        part[~good] = np.nan
    if target.share is None:
        values = np.full(targets, np.nan)
        values[token] = part[unit]
    else:
        values = _sums(token, part[unit], targets)
        values[np.bincount(token, minlength=targets) == 0] = np.nan
    if all_good:
        return AlignedValues(values, ~np.isnan(values), 0.0, 0)
    lost = ~np.roll(good, -rotate)[source.unit]
    stranded = len(np.unique(source.token[lost]))
    return AlignedValues(values, ~np.isnan(values), float(mass[~good].sum()), stranded)


def gather_units(touch: Touch, values: Floats, count: int) -> Floats:
    """Return the sum of the tokens' values in each of `count` units, shape (count,), weighted by `touch.share`."""
    weights = values[touch.token]
    return _sums(touch.unit, weights if touch.share is None else weights * touch.share, count)


def _sums(index: Ints, weights: Floats, size: int) -> Floats:
    """Return the sum of the weights at every index 0..size - 1, in order (without weights, bincount returns
    integers)."""
    return np.bincount(index, weights, minlength=size).astype(np.float64, copy=False)
