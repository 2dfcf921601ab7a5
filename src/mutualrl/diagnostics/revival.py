"""What recorded texts would revive: prompts on which a model fails entirely and a source has a confirmed text.

Nothing is trained. The texts are matched, verified and encoded as `mutualrl train --source` does it; a model fails on a
prompt if SGT's gate would open there: all of its rollouts are below the failure threshold.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from mutualrl.console.display import clean
from mutualrl.console.markdown import name, table, with_interval
from mutualrl.diagnostics.gates import Thresholds
from mutualrl.diagnostics.statistics import Floats, intervals, ratio
from mutualrl.errors import DataError
from mutualrl.records import Prompt
from mutualrl.sources.matching import PromptIndex
from mutualrl.sources.prepare import Prepared

ANY = "(any)"  # no source can have this name


@dataclass(frozen=True, slots=True)
class SourceRow:
    """One source: numbers of `prompts` with a text, of distinct `texts`, and of those `confirmed` by the verifier, on
    `confirmed_prompts`; `note`: what is said before training. `verified`: the reward functions confirmed them here;
    else the file says so, of runs that only an environment could judge."""

    source: str
    prompts: int
    texts: int
    confirmed: int
    confirmed_prompts: int
    note: str
    verified: bool = True


@dataclass(frozen=True, slots=True)
class RevivalRow:
    """One model and one source (`(any)`: all together): the model's `prompts`, those it `failed` on, those of them with
    a confirmed text of the source that the model can learn (`revived`), and their fraction with its 95 % bootstrap
    interval over prompts. `out_of_reach`: those with confirmed texts, none of which the model can learn;
    `needed_length`: the `max_completion_length` that would do for those `too_long`, None without any. `verified`: as of
    the source. `bound`: of a model whose tokenizer is not known, the characters of its longest rollout, in place of
    tokens. `known`: whether anything says what it can learn; without, `revived` counts nothing. `context`: its model's
    positions, where they are known."""

    learner: str
    source: str
    prompts: int
    failed: int
    revived: int
    rate: float
    rate_ci: tuple[float, float]
    out_of_reach: int = 0
    too_long: int = 0
    needed_length: int | None = None
    verified: bool = True
    bound: int | None = None
    known: bool = True
    context: int | None = None


@dataclass(frozen=True, slots=True)
class SourcePair:
    """Two sources: numbers of prompts that `both` solve, and that `only` the first or the second does."""

    source: str
    other: str
    both: int
    only: int
    only_other: int


@dataclass(frozen=True, slots=True)
class Revival:
    """What recorded texts would revive."""

    sources: list[SourceRow]
    source_pairs: list[SourcePair]
    revival: list[RevivalRow]


def solved_prompts(source: Prepared, success: float) -> set[str]:
    """Return the prompts on which a source has a text with a reward above `success`."""
    ids, rewards = source.source.table["prompt_id"].to_pylist(), source.source.table["reward"].to_pylist()
    return {prompt_id for prompt_id, reward in zip(ids, rewards, strict=True) if reward > success}


def failures(rollouts: pa.Table, learner: str, below: float) -> dict[str, bool]:
    """Return for each prompt of a model whether all of its rollouts have a reward below a threshold; NaN is not."""
    failed: dict[str, bool] = {}
    columns = (rollouts[key].to_pylist() for key in ("policy", "prompt_id", "reward"))
    for policy, prompt_id, reward in zip(*columns, strict=True):
        if policy == learner:
            failed[prompt_id] = failed.get(prompt_id, True) and reward < below
    return failed


def with_task_ids(rollouts: pa.Table, prompts: Sequence[Prompt], origin: str) -> tuple[pa.Table, list[tuple[str, str]]]:
    """Return the rollouts on a task's prompts, under the task's ids, and the (id, text) of those that are not among
    them. A prompt is known by its id, else by its text. Raises DataError if none is known."""
    index, ids = PromptIndex(prompts), {prompt.id for prompt in prompts}
    texts = rollouts["x_text"].to_pylist() if "x_text" in rollouts.column_names else [None] * len(rollouts)
    names: dict[str, str | None] = {}
    for prompt_id, text in zip(rollouts["prompt_id"].to_pylist(), texts, strict=True):
        if prompt_id not in names:
            found = [prompt_id] if prompt_id in ids else index.of_text(text or prompt_id)
            names[prompt_id] = found[0] if found else None
    matched = [names[prompt_id] for prompt_id in rollouts["prompt_id"].to_pylist()]
    shown_as = dict(zip(rollouts["prompt_id"].to_pylist(), texts, strict=True))
    unknown = [(prompt_id, shown_as[prompt_id] or prompt_id) for prompt_id, known in names.items() if known is None]
    if len(unknown) == len(names):
        shown = clean(next(iter(names)))[:80]
        raise DataError(
            f"{origin}: none of the {len(unknown)} prompts of the models' rollouts is of the task, such as {shown!r}; "
            "name the task and its data (--task, --data)"
        )
    renamed = rollouts.set_column(rollouts.column_names.index("prompt_id"), "prompt_id", pa.array(matched, pa.string()))
    return renamed.filter(pa.array([name is not None for name in matched])), unknown


def held_out(unknown: Sequence[tuple[str, str]], prompts: Sequence[Prompt]) -> int:
    """Return how many prompts, as (id, text), are among those that are held out."""
    index, ids = PromptIndex(prompts), {prompt.id for prompt in prompts}
    return sum(prompt_id in ids or bool(index.of_text(text)) for prompt_id, text in unknown)


def source_rows(sources: Mapping[str, Prepared]) -> list[SourceRow]:
    """Return one row per source."""
    return [
        SourceRow(
            key,
            source.summary["prompts"],
            source.summary["texts"],
            source.summary["confirmed"],
            source.summary["confirmed_prompts"],
            source.note,
            bool(source.summary["verified"]),
        )
        for key, source in sources.items()
    ]


def revival_rows(
    rollouts: pa.Table | None, sources: Mapping[str, Prepared], thresholds: Thresholds, seed: int
) -> list[RevivalRow]:
    """Return one row per model and source; two or more sources have a row for all together."""
    rows = []
    for learner in [] if rollouts is None else sorted(set(rollouts["policy"].to_pylist())):
        rule = thresholds.of(learner)
        failed = failures(rollouts, learner, rule.failure_below)
        longest = _longest(rollouts, learner)
        found = {key: _texts_for(source, learner, rule.success_above, longest) for key, source in sources.items()}
        if len(found) > 1:
            found[ANY] = _together(list(found.values()))
        rows += [_row(learner, key, failed, texts, seed) for key, texts in found.items()]
    return rows


class _Texts(NamedTuple):
    """Prompts with a confirmed text (`solved`), those of them with one that a model can learn, and the fewest tokens of
    the others' that are too long. `verified`, `bound`, `known`: as of `RevivalRow`."""

    solved: set[str]
    learnable: set[str]
    lengths: Mapping[str, int]
    verified: bool
    bound: int | None = None
    known: bool = True
    context: int | None = None


def _longest(rollouts: pa.Table, learner: str) -> int | None:
    """Return the characters of a model's longest rollout; None if the rollouts have no texts."""
    if "y_text" not in rollouts.column_names:
        return None
    rows = zip(rollouts["policy"].to_pylist(), rollouts["y_text"].to_pylist(), strict=True)
    return max((len(text) for policy, text in rows if policy == learner and text is not None), default=None)


def _texts_for(source: Prepared, learner: str, success: float, longest: int | None) -> _Texts:
    """Return what a source has for a model. Of one whose tokenizer is not known, texts within its longest rollout, in
    characters, count as those that it can learn."""
    solved, verified = solved_prompts(source, success), bool(source.summary["verified"])
    known = source.learnable.get(learner)
    if known is not None:
        return _Texts(solved, solved & known.prompts, known.lengths, verified, context=known.context)
    if longest is None:
        return _Texts(solved, set(), {}, verified, known=False)
    table = source.source.table
    columns = (table[key].to_pylist() for key in ("prompt_id", "y_text", "messages"))
    short = {key for key, text, run in zip(*columns, strict=True) if run is not None or len(text or "") <= longest}
    return _Texts(solved, solved & short, {}, verified, longest)


def _together(texts: Sequence[_Texts]) -> _Texts:
    lengths: dict[str, int] = {}
    for each in texts:
        for prompt_id, length in each.lengths.items():
            lengths[prompt_id] = min(length, lengths.get(prompt_id, length))
    solved, learnable = set().union(*(t.solved for t in texts)), set().union(*(t.learnable for t in texts))
    verified, known = all(t.verified for t in texts), all(t.known for t in texts)
    return _Texts(solved, learnable, lengths, verified, texts[0].bound, known, texts[0].context)


def _row(learner: str, source: str, failed: Mapping[str, bool], texts: _Texts, seed: int) -> RevivalRow:
    columns = np.array(
        [[fails, fails and prompt_id in texts.learnable] for prompt_id, fails in sorted(failed.items())], float
    )
    beyond = [key for key, fails in failed.items() if fails and key in texts.solved - texts.learnable]
    lengths = [texts.lengths[key] for key in beyond if key in texts.lengths]

    def statistic(sums: Floats) -> Floats:
        return ratio(sums[:, 1], sums[:, 0])[:, None]

    totals = columns.sum(axis=0)
    (interval,) = intervals(columns, statistic, seed)
    rate = float(ratio(totals[1], totals[0]))
    return RevivalRow(
        learner,
        source,
        prompts=len(failed),
        failed=int(totals[0]),
        revived=int(totals[1]),
        rate=rate,
        rate_ci=interval,
        out_of_reach=len(beyond),
        too_long=len(lengths),
        needed_length=max(lengths, default=None),
        verified=texts.verified,
        bound=texts.bound,
        known=texts.known,
        context=texts.context,
    )


def overlaps(sources: Mapping[str, Prepared], success: float) -> list[SourcePair]:
    """Return for each pair of sources the numbers of prompts that both solve, and that only one does."""
    solved = {key: solved_prompts(source, success) for key, source in sources.items()}
    return [
        SourcePair(
            one,
            other,
            len(solved[one] & solved[other]),
            len(solved[one] - solved[other]),
            len(solved[other] - solved[one]),
        )
        for one, other in itertools.combinations(solved, 2)
    ]


def revival(rollouts: pa.Table | None, sources: Mapping[str, Prepared], thresholds: Thresholds, seed: int) -> Revival:
    """Return what each source has, and what it would revive of each model."""
    return Revival(
        sources=source_rows(sources),
        source_pairs=overlaps(sources, thresholds.success_above),
        revival=revival_rows(rollouts, sources, thresholds, seed),
    )


def markdown(result: Revival) -> str:
    """Return the tables of sources, of their overlap, and of what they would revive."""
    parts = ["\n".join(row.note for row in result.sources)]
    head = ["source", "prompts with a text", "texts", "confirmed", "prompts solved"]
    rows = []
    for row in result.sources:
        confirmed = str(row.confirmed) if row.verified else f"{row.confirmed} by the file, not verified"
        rows.append([name(row.source), str(row.prompts), str(row.texts), confirmed, str(row.confirmed_prompts)])
    verified = [row.verified for row in result.sources]
    title = "Recorded texts, " + (
        "verified" if all(verified) else "partly verified" if any(verified) else "not verified"
    )
    parts.append(table(title, head, rows))
    if result.source_pairs:
        rows = [
            [name(row.source), name(row.other), str(row.both), str(row.only), str(row.only_other)]
            for row in result.source_pairs
        ]
        parts.append(table("Prompts solved by two sources", ["source", "other", "both", "first", "second"], rows))
    if result.revival:
        parts.append(
            table(
                "Prompts on which a model fails entirely, and those that a source would revive [95 % bootstrap]",
                ["model", "prompts", "dead", "source", "revived", "of the dead", "cannot learn"],
                [_cells(row) for row in result.revival],
            )
        )
        parts += [sentence for row in result.revival if (sentence := _out_of_reach(row)) is not None]
        parts += [_limits(result.revival)] if _limits(result.revival) else []
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _cells(row: RevivalRow) -> Sequence[str]:
    rate = with_interval(row.rate, row.rate_ci) if row.failed and row.known else "-"
    found = [str(row.revived), rate, str(row.out_of_reach)] if row.known else ["unknown", "-", "unknown"]
    return [name(row.learner), str(row.prompts), str(row.failed), name(row.source), *found]


def _limits(rows: Sequence[RevivalRow]) -> str:
    """Return what the rows of models without a tokenizer rest on; empty where all have one."""
    bounds = {row.learner: row.bound for row in rows if row.bound is not None}
    unknown = list(dict.fromkeys(name(row.learner) for row in rows if not row.known))
    cure = "sample the model itself for what its tokenizer says (--model MODEL in place of --rollouts)"
    if unknown:
        return (
            f"What {' and '.join(unknown)} can learn is unknown: the rollouts have no texts and no tokenizer; {cure}."
        )
    if bounds:
        longest = ", ".join(f"{name(learner)} {bound:,}" for learner, bound in bounds.items())
        return (
            f"A file of rollouts has no tokenizer: a text counts as one that a model can learn if it has no more "
            f"characters than its longest rollout ({longest}); {cure}."
        )
    return ""


def _out_of_reach(row: RevivalRow) -> str | None:
    """Return why a model cannot learn confirmed texts of a source; None if it can learn one on each dead prompt."""
    if not row.out_of_reach or not row.known:
        return None
    if row.bound is not None:
        return (
            f"{name(row.learner)} has written no rollout as long as the confirmed texts of {name(row.source)} on "
            f"{row.out_of_reach} dead prompts (its longest has {row.bound:,} characters)."
        )
    why = f"{name(row.learner)} can learn no confirmed text of {name(row.source)} on {row.out_of_reach} dead prompts"
    others = "its tokenizer changes them, or they lack the reasoning that its prompts open"
    if row.needed_length is None:
        return f"{why}: {others}."
    length = f"a max_completion_length (here --max-new-tokens) of {row.needed_length:,} would do"
    if row.context is not None and row.needed_length > row.context:
        length = f"one on each has up to {row.needed_length:,} tokens, and its model {row.context:,} positions"
    if row.too_long == row.out_of_reach:
        return f"{why}: they are too long; {length}."
    return f"{why}: on {row.too_long} they are too long, and {length}; on the others {others}."
