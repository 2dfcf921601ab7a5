"""Many texts at once: what `retokenize` and `align_logprobs` do of one, without a Python step per token.

Both handle the common case, in which all tokens are text and encode it exactly, over one array of all rows; they
return None for any other row, which the functions of one text then handle. Values are equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from mutualrl.thl.align import BOUND
from mutualrl.thl.offsets import Bools
from mutualrl.thl.table import Ints, TokenTable, find_table
from mutualrl.thl.text import encode_plain
from mutualrl.thl.units import Floats

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RowIds = npt.NDArray[np.int32]
#: rows per pass: their arrays stay in the processor's cache
ROWS = 32


class Traced(NamedTuple):
    """Row to align: its text, the source's ids and log-probs, the target's ids. `ended`: the last id of both sides is
    EOS."""

    text: str
    source_ids: RowIds
    logprobs: npt.NDArray[np.floating]
    target_ids: RowIds
    ended: bool


def encode_exactly(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[RowIds | None]:
    """Return the ids of every text, in one call of the tokenizer; None for one that needs `encode_in_context`."""
    table = find_table(tokenizer)
    if table is None:
        return [None] * len(texts)
    rows = [np.array(ids, dtype=np.int32) for ids in encode_plain(texts, tokenizer)]
    results: list[RowIds | None] = []
    for start in range(0, len(rows), ROWS):
        chunk = rows[start : start + ROWS]
        exact = _spells(chunk, [text.encode() for text in texts[start : start + ROWS]], table)
        results += [ids if fits else None for ids, fits in zip(chunk, exact, strict=True)]
    return results


def align_spans(rows: Sequence[Traced], source: TokenTable, target: TokenTable) -> list[Floats | None]:
    """Return the source's log-probs on the target's tokens under the anchor `span`, shape (T,) each; None for a row
    that needs `align_logprobs`. No mass is lost: R = 0."""
    results: list[Floats | None] = []
    for start in range(0, len(rows), ROWS):
        results += _aligned(rows[start : start + ROWS], source, target)
    return results


def _aligned(rows: Sequence[Traced], source: TokenTable, target: TokenTable) -> list[Floats | None]:
    bodies = [row.source_ids[: len(row.source_ids) - row.ended] for row in rows]
    targets = [row.target_ids[: len(row.target_ids) - row.ended] for row in rows]
    texts = [row.text.encode() for row in rows]
    usable = _spells(bodies, texts, source) & _spells(targets, texts, target)
    usable &= np.array([_is_plain(row) for row in rows], dtype=np.bool_)
    chosen = np.flatnonzero(usable).tolist()
    if not chosen:
        return [None] * len(rows)
    values = iter(
        _spread(
            [bodies[i] for i in chosen],
            np.concatenate([rows[i].logprobs[: len(bodies[i])] for i in chosen]).astype(np.float64),
            [targets[i] for i in chosen],
            source,
            target,
        )
    )
    results: list[Floats | None] = []
    for row, fits in zip(rows, usable.tolist(), strict=True):
        if not fits:
            results.append(None)
        elif row.ended:
            results.append(np.append(next(values), np.float64(row.logprobs[-1])))
        else:
            results.append(next(values))
    return results


def _is_plain(row: Traced) -> bool:
    """Return whether a trace has one number per id, all of them between -BOUND and infinity."""
    trace = row.logprobs
    if trace.shape != row.source_ids.shape or not trace.size:
        return False
    return bool(trace.min() >= -BOUND and trace.max() < np.inf)  # false for NaN


def _spells(rows: Sequence[RowIds], texts: Sequence[bytes], table: TokenTable) -> Bools:
    """Return which rows consist of tokens with bytes and spell their texts, not empty, byte for byte."""
    fits = _are_text(rows, table)
    known = [ids for ids, fit in zip(rows, fits.tolist(), strict=True) if fit]
    if not known:
        return fits
    spelled, ends = table.spell(np.concatenate(known))
    stops = ends[np.cumsum([len(ids) for ids in known]) - 1].tolist()
    passages = iter(zip([0, *stops[:-1]], stops, strict=True))
    for row, text in enumerate(texts):
        if fits[row]:
            begin, stop = next(passages)
            fits[row] = spelled[begin:stop] == text
    return fits


def _are_text(rows: Sequence[RowIds], table: TokenTable) -> Bools:
    """Return which rows have tokens, all of the vocabulary and with bytes."""
    some = np.array([len(ids) > 0 for ids in rows], dtype=np.bool_)
    flat = np.concatenate(rows) if len(rows) else np.zeros(0, dtype=np.int32)
    known = (flat >= 0) & (flat < len(table.lengths))
    known[known] = table.lengths[flat[known]] > 0
    if known.all():
        return some
    stops = np.cumsum([len(ids) for ids in rows])
    bad = np.searchsorted(stops, np.flatnonzero(~known), side="right")
    some[bad] = False
    return some


def _spread(
    bodies: Sequence[RowIds], trace: Floats, targets: Sequence[RowIds], source: TokenTable, target: TokenTable
) -> Iterator[Floats]:
    """Yield each row's values: the mass of every byte-synchronous group, spread evenly over its target tokens. Rows are
    one text, one after another: both sides end at the end of a row, so no group spans two."""
    source_ends = np.cumsum(source.lengths[np.concatenate(bodies)], dtype=np.int64)
    target_ends = np.cumsum(target.lengths[np.concatenate(targets)], dtype=np.int64)
    ends = np.zeros(int(source_ends[-1]) + 1, dtype=np.bool_)
    ends[source_ends] = True
    closes = ends[target_ends]
    ends[source_ends] = False
    ends[target_ends[closes]] = True
    source_closes = ends[source_ends]
    source_group: Ints = np.cumsum(source_closes) - source_closes
    target_group: Ints = np.cumsum(closes) - closes
    mass = np.bincount(source_group, trace)
    part = mass / np.bincount(target_group)
    values = part[target_group]
    start = 0
    for ids in targets:
        yield values[start : start + len(ids)]
        start += len(ids)
