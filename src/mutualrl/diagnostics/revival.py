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
    `confirmed_prompts`; `note`: what is said before training."""

    source: str
    prompts: int
    texts: int
    confirmed: int
    confirmed_prompts: int
    note: str


@dataclass(frozen=True, slots=True)
class RevivalRow:
    """One model and one source (`(any)`: all together): the model's `prompts`, those it `failed` on, those of them with
    a confirmed text of the source that the model can learn (`revived`), and their fraction with its 95 % bootstrap
    interval over prompts. `out_of_reach`: those with confirmed texts, none of which the model can learn;
    `needed_length`: the `max_completion_length` that would do for those `too_long`, None without any."""

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


def with_task_ids(rollouts: pa.Table, prompts: Sequence[Prompt], origin: str) -> tuple[pa.Table, int]:
    """Return the rollouts on a task's prompts, under the task's ids, and the number of prompts that are not the task's.
    A prompt is known by its id, else by its text. Raises DataError if none is known."""
    index, ids = PromptIndex(prompts), {prompt.id for prompt in prompts}
    texts = rollouts["x_text"].to_pylist() if "x_text" in rollouts.column_names else [None] * len(rollouts)
    names: dict[str, str | None] = {}
    for prompt_id, text in zip(rollouts["prompt_id"].to_pylist(), texts, strict=True):
        if prompt_id not in names:
            found = [prompt_id] if prompt_id in ids else index.of_text(text or prompt_id)
            names[prompt_id] = found[0] if found else None
    known = [names[prompt_id] for prompt_id in rollouts["prompt_id"].to_pylist()]
    unknown = sum(name is None for name in names.values())
    if unknown == len(names):
        shown = clean(next(iter(names)))[:80]
        raise DataError(
            f"{origin}: none of the {unknown} prompts of the models' rollouts is of the task, such as {shown!r}; name "
            "the task and its data (--task, --data)"
        )
    renamed = rollouts.set_column(rollouts.column_names.index("prompt_id"), "prompt_id", pa.array(known, pa.string()))
    return renamed.filter(pa.array([name is not None for name in known])), unknown


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
        found = {key: _texts_for(source, learner, rule.success_above) for key, source in sources.items()}
        if len(found) > 1:
            found[ANY] = _together(list(found.values()))
        rows += [_row(learner, key, failed, texts, seed) for key, texts in found.items()]
    return rows


class _Texts(NamedTuple):
    """Prompts with a confirmed text (`solved`), those of them with one that a model can learn, and the fewest tokens of
    the others' that are too long."""

    solved: set[str]
    learnable: set[str]
    lengths: Mapping[str, int]


def _texts_for(source: Prepared, learner: str, success: float) -> _Texts:
    """Return what a source has for a model; of one whose tokenizer is not known, all can be learnt."""
    solved = solved_prompts(source, success)
    known = source.learnable.get(learner)
    return _Texts(solved, solved, {}) if known is None else _Texts(solved, solved & known.prompts, known.lengths)


def _together(texts: Sequence[_Texts]) -> _Texts:
    lengths: dict[str, int] = {}
    for each in texts:
        for prompt_id, length in each.lengths.items():
            lengths[prompt_id] = min(length, lengths.get(prompt_id, length))
    return _Texts(set().union(*(t.solved for t in texts)), set().union(*(t.learnable for t in texts)), lengths)


def _row(learner: str, source: str, failed: Mapping[str, bool], texts: _Texts, seed: int) -> RevivalRow:
    columns = np.array(
        [[fails, fails and prompt_id in texts.learnable] for prompt_id, fails in sorted(failed.items())], float
    )
    beyond = [key for key, fails in failed.items() if fails and key in texts.solved - texts.learnable]
    lengths = [texts.lengths[key] for key in beyond if key in texts.lengths]
    counts, needed = (len(beyond), len(lengths)), max(lengths, default=None)

    def statistic(sums: Floats) -> Floats:
        return ratio(sums[:, 1], sums[:, 0])[:, None]

    totals = columns.sum(axis=0)
    (interval,) = intervals(columns, statistic, seed)
    rate = float(ratio(totals[1], totals[0]))
    revived = int(totals[1])
    return RevivalRow(learner, source, len(failed), int(totals[0]), revived, rate, interval, *counts, needed)


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
    rows = [
        [name(row.source), str(row.prompts), str(row.texts), str(row.confirmed), str(row.confirmed_prompts)]
        for row in result.sources
    ]
    parts.append(table("Recorded texts, verified", head, rows))
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
    return "\n\n".join(part.rstrip("\n") for part in parts)


def _cells(row: RevivalRow) -> Sequence[str]:
    rate = with_interval(row.rate, row.rate_ci) if row.failed else "-"
    counts = [str(row.prompts), str(row.failed), name(row.source), str(row.revived), rate, str(row.out_of_reach)]
    return [name(row.learner), *counts]


def _out_of_reach(row: RevivalRow) -> str | None:
    """Return why a model cannot learn confirmed texts of a source; None if it can learn one on each dead prompt."""
    if not row.out_of_reach:
        return None
    why = f"{name(row.learner)} can learn no confirmed text of {name(row.source)} on {row.out_of_reach} dead prompts"
    others = "its tokenizer changes them, or they lack the reasoning that its prompts open"
    if row.needed_length is None:
        return f"{why}: {others}."
    length = f"a max_completion_length (here --max-new-tokens) of {row.needed_length} would do"
    if row.too_long == row.out_of_reach:
        return f"{why}: they are too long; {length}."
    return f"{why}: on {row.too_long} they are too long, and {length}; on the others {others}."
