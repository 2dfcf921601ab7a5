"""Two tokenizers without models: how their tokens align on a text, and whether a trace can be transferred.

Figures are over the given passages; fractions are between 0 and 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mutualrl.console.markdown import name, table
from mutualrl.diagnostics.lazy_model import LazyModel, OnBatch
from mutualrl.errors import TextMismatchError, TokenizerError
from mutualrl.thl import Anchor, align_logprobs, decode_completion, retokenize, token_offsets, word_spans
from mutualrl.thl.paper import tokenize, word_map
from mutualrl.thl.table import Ints, table_of
from mutualrl.thl.units import Touch
from mutualrl.thl.words import byte_positions

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from transformers import PreTrainedTokenizerBase

#: a pair is unsafe when more than this fraction of either side's tokens cannot be placed
MAX_UNPLACED_FRACTION = 0.005


@dataclass(frozen=True, slots=True)
class SideFigures:
    """One side's tokens over the passages."""

    tokens: int
    straddling: float
    uncovered: float
    round_trip: float
    eos: str | None
    specials_spelled_stay_text: bool
    paper_drift: float
    paper_cut: float
    word_drift: float


@dataclass(frozen=True, slots=True)
class TokenizerFigures:
    """Two tokenizers over the passages."""

    texts: int
    characters: int
    groups: int
    one_to_one: float
    mean_group: dict[str, float]
    largest_group: dict[str, int]
    group_sizes: dict[str, int]
    end_to_end: float
    source: SideFigures
    target: SideFigures


@dataclass(frozen=True, slots=True)
class TokenizerCheck:
    """Whether two tokenizers can exchange traces, the reasons if not, and their figures: None where they cannot be
    compared."""

    safe: bool
    reasons: tuple[str, ...]
    figures: TokenizerFigures | None


@dataclass
class SideCounts:
    """Counts of one side's tokens.

    `straddling`: tokens that span several words. `unplaced`: source tokens that give no value, target tokens that get
    none. `mapped`: tokens of the text's own encoding that the paper's map assigns to a word; `drifted`: those that do
    not touch that word; `cut`: tokens assigned to no word. `ours_mapped`, `ours_drifted`: the same for anchor `word`.
    """

    tokens: int = 0
    straddling: int = 0
    unplaced: int = 0
    exact_texts: int = 0
    mapped: int = 0
    drifted: int = 0
    cut: int = 0
    ours_mapped: int = 0
    ours_drifted: int = 0


@dataclass
class PairCounts:
    """Counts over the passages; `sizes`: groups by (source tokens, target tokens)."""

    texts: int = 0
    characters: int = 0
    ends_met: int = 0
    source: SideCounts = field(default_factory=SideCounts)
    target: SideCounts = field(default_factory=SideCounts)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)


def check_vocabularies(
    texts: Sequence[str],
    source: PreTrainedTokenizerBase,
    target: PreTrainedTokenizerBase,
    anchor: Anchor,
    on_text: Callable[[int], None],
    ends: Callable[[], tuple[int, int]] | None = None,
) -> TokenizerCheck:
    """Return the check of one ordered pair: figures, `safe`, and the `reasons` when it is not. `ends`: returns the
    tokens that end completions of each side, by default the tokenizers' own.

    A pair is unsafe when a tokenizer is of an unsupported kind or has no end-of-sequence token, or when more than
    `MAX_UNPLACED_FRACTION` of either side's tokens cannot be placed on these texts.
    """
    reasons = []
    for role, tokenizer in (("source", source), ("target", target)):
        try:
            table_of(tokenizer)
        except TokenizerError as error:
            reasons.append(f"{role}: {error}")
            continue
        if tokenizer.eos_token_id is None:
            reasons.append(f"{role}: the tokenizer has no end-of-sequence token, so a response could never end")
    if reasons:
        return TokenizerCheck(False, tuple(reasons), None)
    first, second = (source.eos_token_id, target.eos_token_id) if ends is None else ends()
    counts = PairCounts()
    for text in texts:
        _count(counts, text, source, target, anchor)
        on_text(1)
    for role, side in (("source", counts.source), ("target", counts.target)):
        fraction = _fraction(side.unplaced, side.tokens)
        if fraction > MAX_UNPLACED_FRACTION:
            reasons.append(
                f"{side.unplaced} of the {role}'s {side.tokens} tokens ({fraction:.1%}, expected at most "
                f"{MAX_UNPLACED_FRACTION:.1%}) cannot be placed: the target's tokenizer changes "
                f"{counts.texts - counts.target.exact_texts} of these {counts.texts} texts"
            )
    return TokenizerCheck(not reasons, tuple(reasons), _figures(counts, source, target, (first, second)))


def check_models(
    passages: Sequence[str], source: LazyModel, target: LazyModel, anchor: Anchor, on_text: OnBatch
) -> TokenizerCheck:
    """Return the check of two models' tokenizers."""
    ends = lambda: (source.end_token, target.end_token)  # noqa: E731
    return check_vocabularies(passages, source.tokenizer, target.tokenizer, anchor, on_text, ends)


def _fraction(part: int, total: int) -> float:
    return part / total if total else 0.0


def _count(
    counts: PairCounts, text: str, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, anchor: Anchor
) -> None:
    sampled = retokenize(text, source, ended=True)
    ids = list(sampled.ids)
    retokenized = decode_completion(ids, source)  # the text that the target receives
    counts.texts += 1
    counts.characters += len(retokenized)
    counts.source.exact_texts += sampled.exact
    trace = -np.ones(len(ids))
    aligned = align_logprobs(retokenized, ids, trace, source, target, anchor=anchor)
    counts.target.exact_texts += aligned.exact
    counts.ends_met += bool(aligned.covered[-1])
    counts.source.tokens += len(ids)
    counts.target.tokens += len(aligned.target_ids)
    counts.source.unplaced += aligned.mismatched
    counts.target.unplaced += int((~aligned.covered).sum())
    span = aligned if anchor == "span" else align_logprobs(retokenized, ids, trace, source, target, anchor="span")
    counts.sizes.update((len(group.source), len(group.target)) for group in span.groups)
    words = align_logprobs(retokenized, ids, trace, source, target, anchor="word", unit="word")
    _count_words(counts.source, retokenized, ids, source, words.units.source)
    _count_paper(counts.source, retokenized, source)
    if words.exact:
        _count_words(counts.target, retokenized, list(words.target_ids), target, words.units.target)
        _count_paper(counts.target, retokenized, target)


def _touched(ids: list[int], tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[Ints, Ints]:
    """Return first and last word (with the whitespace before it) that each token touches; trailing whitespace counts
    as one more."""
    spans = word_spans(text, "word")
    ends = byte_positions(text, text.encode(), [end for _, end in spans])
    offsets = token_offsets(ids, tokenizer, text)
    first = np.searchsorted(ends, offsets[:, 0], side="right")
    return first, np.maximum(first, np.searchsorted(ends, offsets[:, 1], side="left"))


def _count_words(side: SideCounts, text: str, ids: list[int], tokenizer: PreTrainedTokenizerBase, touch: Touch) -> None:
    first, last = _touched(ids, tokenizer, text)
    side.straddling += int((last > first).sum())
    side.ours_mapped += len(touch.token)
    side.ours_drifted += int(((touch.unit < first[touch.token]) | (touch.unit > last[touch.token])).sum())


def _count_paper(side: SideCounts, text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    encoded = tokenize(text, tokenizer)
    try:
        first, last = _touched(encoded, tokenizer, text)
    except TextMismatchError:
        return  # the tokenizer changes this text; see exact_texts
    words = word_map(text, tokenizer)[1][: len(encoded)]
    placed = [(token, word) for token, word in enumerate(words) if word is not None]
    side.mapped += len(placed)
    side.cut += len(encoded) - len(placed)
    side.drifted += sum(not first[token] <= word <= last[token] for token, word in placed)


def _figures(
    counts: PairCounts, source: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase, ends: tuple[int, int]
) -> TokenizerFigures:
    groups = sum(counts.sizes.values())
    mean_group: dict[str, float] = {}
    largest_group: dict[str, int] = {}
    for position, role in enumerate(("source", "target")):
        mean_group[role] = _fraction(sum(size[position] * n for size, n in counts.sizes.items()), groups)
        largest_group[role] = max((size[position] for size in counts.sizes), default=0)
    return TokenizerFigures(
        texts=counts.texts,
        characters=counts.characters,
        groups=groups,
        one_to_one=_fraction(counts.sizes[1, 1], groups),
        mean_group=mean_group,
        largest_group=largest_group,
        group_sizes={f"{a}:{b}": n for (a, b), n in sorted(counts.sizes.items())},
        end_to_end=_fraction(counts.ends_met, counts.texts),
        source=_side_figures(counts, counts.source, source, ends[0]),
        target=_side_figures(counts, counts.target, target, ends[1]),
    )


def _side_figures(counts: PairCounts, side: SideCounts, tokenizer: PreTrainedTokenizerBase, end: int) -> SideFigures:
    return SideFigures(
        tokens=side.tokens,
        straddling=_fraction(side.straddling, side.tokens),
        uncovered=_fraction(side.unplaced, side.tokens),
        round_trip=_fraction(side.exact_texts, counts.texts),
        eos=tokenizer.convert_ids_to_tokens(end),
        specials_spelled_stay_text=all(
            retokenize(f"a {special} b", tokenizer).exact for special in tokenizer.all_special_tokens
        ),
        paper_drift=_fraction(side.drifted, side.mapped),
        paper_cut=_fraction(side.cut, side.mapped + side.cut),
        word_drift=_fraction(side.ours_drifted, side.ours_mapped),
    )


# ---- how it is shown


def verdict(pairs: Sequence[tuple[str, TokenizerCheck]]) -> str:
    """Return the directions that are safe or unsafe, as a sentence. `pairs`: with their labels."""
    unsafe = [label for label, check in pairs if not check.safe]
    if not unsafe:
        return "Safe: texts and traces can be exchanged in every direction that was checked."
    safe = [label for label, check in pairs if check.safe]
    others = f"; safe: {', '.join(safe)}" if safe else ""
    return f"**Unsafe: {', '.join(unsafe)}** (reasons at the end){others}."


def direction(source: str, target: str) -> str:
    """Return the label of an ordered pair."""
    return f"{name(source)} → {name(target)}"


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.2f}"


def tokenizer_table(pairs: Sequence[tuple[str, TokenizerCheck]]) -> str:
    """Return the figures of all pairs. `pairs`: with their labels."""
    rows = [["safe", *("yes" if check.safe else "**no**" for _, check in pairs)]]
    for title, read in _ROWS:
        rows.append([title, *("" if check.figures is None else read(check.figures) for _, check in pairs)])
    return table("Tokenizers", ["", *(label for label, _ in pairs)], rows)


def _both(read: Callable[[SideFigures], str]) -> Callable[[TokenizerFigures], str]:
    return lambda counts: f"{read(counts.source)} / {read(counts.target)}"


_ROWS: tuple[tuple[str, Callable[[TokenizerFigures], str]], ...] = (
    ("texts encoded unchanged, source / target (%)", _both(lambda side: _percent(side.round_trip))),
    ("tokens", _both(lambda side: str(side.tokens))),
    ("1:1 groups (%)", lambda figures: _percent(figures.one_to_one)),
    ("mean group", lambda figures: "{source:.2f} : {target:.2f}".format(**figures.mean_group)),
    ("largest group", lambda figures: "{source} : {target}".format(**figures.largest_group)),
    ("tokens that span several words (%)", _both(lambda side: _percent(side.straddling))),
    ("unplaced tokens (%)", _both(lambda side: _percent(side.uncovered))),
    ("end of sequence", _both(lambda side: f"`{name(str(side.eos))}`")),
    ("ends of sequence aligned (%)", lambda figures: _percent(figures.end_to_end)),
    ("spelled-out special tokens stay text", _both(lambda side: "yes" if side.specials_spelled_stay_text else "no")),
    (
        "the paper's map: tokens mapped to a non-overlapping word (%)",
        _both(lambda side: _percent(side.paper_drift)),
    ),
    ("the paper's map: tokens mapped to no word (%)", _both(lambda side: _percent(side.paper_cut))),
    ("ours: tokens mapped to a non-overlapping word (%)", _both(lambda side: _percent(side.word_drift))),
)


def draw_groups(axis: Axes, figures: TokenizerFigures) -> None:
    """Draw the most frequent sizes of groups."""
    sizes = sorted(figures.group_sizes.items(), key=lambda item: -item[1])[:12]
    axis.bar([size for size, _ in sizes], [count for _, count in sizes])
    axis.set(yscale="log", xlabel="group, source : target tokens", ylabel="groups")
