"""Alignment of a peer's log-prob trace to the learner's tokens.

Source: paper, Section "Tokenizer Heterogeneity Layer", trace alignment; Theorem "THL conservation with a derived
residual bound". Departure: except under the anchor `paper`, token positions are byte offsets of the sampled ids.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from mutualrl.errors import AlignmentError, TextMismatchError, TraceError
from mutualrl.thl.offsets import Bools, TokenSpans, locate_any, locate_tokens, utf8
from mutualrl.thl.paper import has_straddling_tokens, paper_units
from mutualrl.thl.table import Ints, TokenIds, TokenTable, table_of
from mutualrl.thl.text import encode_in_context, end_id
from mutualrl.thl.transfer import AlignedValues, transfer
from mutualrl.thl.units import Floats, Touch, Units, segment_units, span_units
from mutualrl.thl.words import UNITS, Unit, byte_positions, character_positions, segment_ends

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Anchor = Literal["paper", "paper-fallback", "word", "span", "char"]
ANCHORS: tuple[Anchor, ...] = get_args(Anchor)
DEFAULT_ANCHOR: Anchor = "span"
_EOS: tuple[int, str | None] = (-1, None)
#: B of the paper's Assumption "THL span and clipping convention"
BOUND = 50.0


class AlignmentGroup(NamedTuple):
    """Source and target tokens of one unit of text, by position. Under `word`, adjacent groups may share a token."""

    source: range
    target: range


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Trace of S source tokens, aligned to T target tokens.

    `target_ids`: the target tokens, with EOS last if and only if the response ended (or as passed).
    `logprobs`, shape (T,), nats: the aligned value of each target token, NaN where uncovered.
    `covered`, shape (T,): True where a target token has a value.
    `residual`: R = source mass that reached no target token, in nats: of source tokens in no unit (special tokens
    without a counterpart), of units without a valid target token, and the mass clipped at -B (`clipped`).
    Always sum(source) = sum(covered logprobs) + residual.
    `mismatched`: the paper's C_mis, the number of source tokens in the first two parts of the residual.
    `exact`: the target ids encode the text exactly; if not, changed passages are uncovered.
    """

    target_ids: tuple[int, ...]
    logprobs: Floats
    covered: Bools
    residual: float
    clipped: float
    mismatched: int
    exact: bool
    anchor: Anchor
    units: Units
    paired: tuple[tuple[int, int], ...]

    @property
    def delta(self) -> float:
        """Return the paper's delta_THL = |R|, nats."""
        return abs(self.residual)

    @property
    def groups(self) -> tuple[AlignmentGroup, ...]:
        """Return the units in text order, then the pairs of special tokens, EOS last."""
        sources, targets = self._token_ranges(self.units.source), self._token_ranges(self.units.target)
        groups = [AlignmentGroup(source, target) for source, target in zip(sources, targets, strict=True)]
        return (*groups, *(AlignmentGroup(range(s, s + 1), range(t, t + 1)) for s, t in self.paired))

    def _token_ranges(self, side: Touch) -> list[range]:
        """Return the token range of each unit on one side."""
        units = np.arange(self.units.count)
        first, stop = np.searchsorted(side.unit, units, "left"), np.searchsorted(side.unit, units, "right")
        ranges = []
        for a, b in zip(first, stop, strict=True):
            ranges.append(range(side.token[a], side.token[b - 1] + 1) if b > a else range(0))
        return ranges


@dataclass(frozen=True, slots=True)
class _Side:
    """One side of an alignment: its ids, their byte spans, and whether the last id is EOS."""

    ids: Ints
    table: TokenTable
    placed: TokenSpans
    ended: bool


def align_logprobs(
    text: str,
    source_ids: TokenIds,
    source_logprobs: npt.ArrayLike,
    source_tokenizer: PreTrainedTokenizerBase,
    target_tokenizer: PreTrainedTokenizerBase,
    *,
    target_ids: TokenIds | None = None,
    anchor: Anchor = DEFAULT_ANCHOR,
    unit: Unit = "auto",
    bound: float = BOUND,
    source_eos_ids: Collection[int] | None = None,
    target_eos_ids: Collection[int] | None = None,
) -> Alignment:
    """Align the log-probs of a sampled response to another tokenizer's tokens of its text.

    `text`: the text that `source_ids` decode to in a completion (`decode_completion`). `source_logprobs`, shape (S,),
    nats, one per id. `target_ids`: the learner's tokens of the text, by default `retokenize`'s. Neither has padding.
    `anchor`: the units over which mass is summed and then spread:

    - `span`: a group ends where a token of each side ends at the same byte; 1:1 tokens are copied.
    - `word`: words with the whitespace before them (`unit="auto"`: characters in a text with CJK). The mass of a source
      token that spans several words is divided among them by characters; a target token sums its part of each word.
    - `char`: `word` with every non-whitespace character as a unit.
    - `paper`: the paper's algorithms, by position and without the clip. It drifts on real text; for reproduction only.
    - `paper-fallback`: `paper`, but `word` for a text that either tokenizer encodes differently as a whole than word
      by word: the paper's fallback to the full sequence, with straddling tokens apportioned by characters.

    EOS (an id of `source_eos_ids`, `target_eos_ids`, by default the tokenizers' own) is aligned to the target's EOS,
    any other special token to the same one at the same byte. Log-probs below -`bound` are clipped to it.

    Raises TokenError for an id outside a vocabulary, TraceError unless the trace has one number per id and no NaN,
    TextMismatchError when the source ids, or the `target_ids` passed, do not decode to `text`, TokenizerError for a
    slow tokenizer or an unknown decoder, AlignmentError for an unknown anchor or unit, or a bound not above 0.
    """
    _check_choices(anchor, unit, bound)
    rule: Anchor = anchor
    if anchor == "paper-fallback":
        rule = (
            "word"
            if has_straddling_tokens(text, source_tokenizer) or has_straddling_tokens(text, target_tokenizer)
            else "paper"
        )
    data = utf8(text)
    source = _side(source_ids, table_of(source_tokenizer), data, _eos_ids(source_tokenizer, source_eos_ids))
    ids = source.ids
    trace = check_trace(source_logprobs, len(ids))
    target = _target(text, data, target_ids, target_tokenizer, _eos_ids(target_tokenizer, target_eos_ids), source.ended)
    if rule == "paper":
        units = paper_units(text, source_tokenizer, target_tokenizer, len(ids), len(target.ids))
        moved = transfer(units, trace, len(target.ids), empty_is_zero=True)
        return _result(units, moved, trace, 0.0, target, (), anchor)
    clipped = np.maximum(trace, -bound)
    lost = float((trace - clipped).sum()) if trace.size and trace.min() < -bound else 0.0
    if anchor == "span":
        units = span_units(source.placed, target.placed, len(data))
    else:
        edges = byte_positions(text, data, segment_ends(text, "char" if anchor == "char" else unit))
        units = segment_units(source.placed, target.placed, edges, character_positions(data))
    moved = transfer(units, clipped, len(target.ids), target.placed.changed)
    return _result(units, moved, clipped, lost, target, _pairs(source, target), anchor)


def check_trace(logprobs: npt.ArrayLike, tokens: int) -> Floats:
    """Return `logprobs` in double precision, shape (tokens,). Raises TraceError for another shape, a NaN or +inf."""
    try:
        trace = np.asarray(logprobs, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise TraceError(f"log-probs: expected a flat list of numbers ({error})") from None
    if trace.shape != (tokens,):
        raise TraceError(f"log-probs of shape {trace.shape} for {tokens} ids, expected one per id: ({tokens},)")
    if tokens and not trace.max() < np.inf:  # NaN compares false
        position = int(np.flatnonzero(np.isnan(trace) | (trace == np.inf))[0])
        raise TraceError(f"log-prob {trace[position]} at position {position}, expected a number")
    return trace


def _check_choices(anchor: str, unit: str, bound: float) -> None:
    for name, value, choices in (("anchor", anchor, ANCHORS), ("unit", unit, UNITS)):
        if value not in choices:
            raise AlignmentError(f"{name}: found {value!r}, expected one of: {', '.join(choices)}")
    if not bound > 0:
        raise AlignmentError(f"bound: found {bound}, expected a number above 0")


def _eos_ids(tokenizer: PreTrainedTokenizerBase, eos_ids: Collection[int] | None) -> Collection[int]:
    return [tokenizer.eos_token_id] if eos_ids is None else eos_ids


def _side(token_ids: TokenIds, table: TokenTable, data: bytes, eos_ids: Collection[int]) -> _Side:
    """Place ids on the text that they decode to. A final EOS is not text, whatever its token type."""
    ids = table.check(token_ids)
    if not len(ids) or int(ids[-1]) not in eos_ids:
        return _Side(ids, table, locate_tokens(ids, table, data), False)
    return _Side(ids, table, _with_eos(locate_tokens(ids[:-1], table, data)), True)


def _with_eos(placed: TokenSpans) -> TokenSpans:
    """Append one more control token, EOS."""
    control = np.zeros(len(placed.ends), dtype=np.bool_) if placed.control is None else placed.control
    changed = None if placed.changed is None else np.append(placed.changed, False)
    ends = np.append(placed.ends, placed.ends[-1] if len(placed.ends) else 0)
    return TokenSpans(ends, np.append(control, True), changed, placed.lost)


def _target(
    text: str,
    data: bytes,
    token_ids: TokenIds | None,
    tokenizer: PreTrainedTokenizerBase,
    eos_ids: Collection[int],
    ended: bool,
) -> _Side:
    """Return the target side, of the ids passed or of the encoded text. Only ids from encoding may change the text."""
    table = table_of(tokenizer)
    if token_ids is not None:
        try:
            return _side(token_ids, table, data, eos_ids)
        except TextMismatchError:
            ids = table.check(token_ids)
            ended = len(ids) > 0 and int(ids[-1]) in eos_ids
            encoded, _ = encode_in_context(text, tokenizer)
            if ids[: len(ids) - ended].tolist() != encoded:
                raise
        last = ids[-1:] if ended else ids[:0]
    else:
        encoded, _ = encode_in_context(text, tokenizer)
        last = np.array([end_id(tokenizer)] if ended else [], dtype=np.int64)
    body = np.array(encoded, dtype=np.int64)
    placed = locate_any(body, table, data)
    return _Side(np.concatenate((body, last)), table, _with_eos(placed) if ended else placed, ended)


def _pairs(source: _Side, target: _Side) -> tuple[tuple[int, int], ...]:
    """Return pairs of corresponding special tokens: EOS with EOS, any other with the same token at the same byte."""
    if source.placed.control is None or target.placed.control is None:
        return ()
    both_ended = source.ended and target.ended
    unpaired: defaultdict[tuple[int, str | None], list[int]] = defaultdict(list)
    for position, key in _controls(target, both_ended):
        unpaired[key].append(position)
    return tuple((s, unpaired[key].pop(0)) for s, key in _controls(source, both_ended) if unpaired[key])


def _controls(side: _Side, both_ended: bool) -> list[tuple[int, tuple[int, str | None]]]:
    """Return the positions of control tokens, each with the key that pairs it: its byte and content, or EOS."""
    assert side.placed.control is not None
    controls, last = [], len(side.ids) - 1
    for position in np.flatnonzero(side.placed.control).tolist():
        token = int(side.ids[position])
        if both_ended and position == last:
            controls.append((position, _EOS))
        elif token != side.table.unknown or side.placed.changed is None:  # else <unk> represents a character
            controls.append((position, (int(side.placed.ends[position]), side.table.names.get(token))))
    return controls


def _result(
    units: Units,
    moved: AlignedValues,
    trace: Floats,
    clipped: float,
    target: _Side,
    pairs: tuple[tuple[int, int], ...],
    anchor: Anchor,
) -> Alignment:
    values, covered = moved.logprobs, moved.covered
    unplaced = np.ones(len(trace), dtype=np.bool_)
    unplaced[units.source.token] = False
    for s, t in pairs:
        values[t], covered[t], unplaced[s] = trace[s], True, False
    return Alignment(
        target_ids=tuple(target.ids.tolist()),
        logprobs=values,
        covered=covered,
        residual=float(trace[unplaced].sum()) + moved.residual + clipped,
        clipped=clipped,
        mismatched=int(unplaced.sum()) + moved.stranded,
        exact=target.placed.changed is None,
        anchor=anchor,
        units=units,
        paired=pairs,
    )
