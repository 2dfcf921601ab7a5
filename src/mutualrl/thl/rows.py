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
    EOS. `exact`: the target's ids are known to spell the text, as those of `encode_exactly` do."""

    text: str
    source_ids: RowIds
    logprobs: npt.NDArray[np.floating]
    target_ids: RowIds
    ended: bool
    exact: bool = False


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
    texts = [row.text.encode() for row in rows]
    usable = _spells([_body(row.source_ids, row) for row in rows], texts, source) & _have_plain_traces(rows)
    unknown = [number for number, row in enumerate(rows) if not row.exact]
    targets = [_body(rows[number].target_ids, rows[number]) for number in unknown]
    usable[unknown] &= _spells(targets, [texts[number] for number in unknown], target)
    chosen = [row for row, fits in zip(rows, usable.tolist(), strict=True) if fits]
    values = iter(_spread(chosen, source, target) if chosen else ())
    return [next(values) if fits else None for fits in usable.tolist()]


def _body(ids: RowIds, row: Traced) -> RowIds:
    """Return ids without a final EOS."""
    return ids[:-1] if row.ended else ids


def _have_plain_traces(rows: Sequence[Traced]) -> Bools:
    """Return which traces have one number per id, all of them between -BOUND and infinity."""
    fits = np.array([row.logprobs.shape == row.source_ids.shape and row.logprobs.size > 0 for row in rows])
    flat = np.concatenate([row.logprobs for row in rows])
    if flat.size and flat.min() >= -BOUND and flat.max() < np.inf:  # false for NaN
        return fits
    for number in np.flatnonzero(fits).tolist():
        trace = rows[number].logprobs
        fits[number] = trace.min() >= -BOUND and trace.max() < np.inf
    return fits


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


def _spread(rows: Sequence[Traced], source: TokenTable, target: TokenTable) -> Iterator[Floats]:
    """Yield each row's values: the mass of every byte-synchronous group, spread evenly over its target tokens.

    The rows are one text, one after another: both sides end at the end of a row, so no group spans two. EOS is a byte
    of its own after its row, on both sides.
    """
    source_ends = _ends([row.source_ids for row in rows], rows, source)
    target_ends = _ends([row.target_ids for row in rows], rows, target)
    marks = np.zeros(int(source_ends[-1]) + 1, dtype=np.bool_)
    marks[source_ends] = True
    closes = marks[target_ends]
    marks[source_ends] = False
    marks[target_ends[closes]] = True
    source_closes = marks[source_ends]
    source_group: Ints = np.cumsum(source_closes) - source_closes
    target_group: Ints = np.cumsum(closes) - closes
    mass = np.bincount(source_group, np.concatenate([row.logprobs for row in rows]).astype(np.float64))
    values = (mass / np.bincount(target_group))[target_group]
    start = 0
    for row in rows:
        stop = start + len(row.target_ids)
        yield values[start:stop]
        start = stop


def _ends(ids: Sequence[RowIds], rows: Sequence[Traced], table: TokenTable) -> Ints:
    """Return the byte where each token of the rows ends."""
    lengths = table.lengths[np.concatenate(ids)]
    last = np.cumsum([len(row) for row in ids]) - 1
    lengths[last[[row.ended for row in rows]]] = 1
    ends: Ints = np.cumsum(lengths, dtype=np.int64)
    return ends
