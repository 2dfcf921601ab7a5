"""Interface of a task, a source of prompts. Default scoring is in `tasks.boxed`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from mutualrl.errors import DataError, UsageError
from mutualrl.records import Prompt

logger = logging.getLogger(__name__)

#: a row of a data set or of an evaluation: values by column
Row = dict[str, Any]
#: (row number from 1, row)
NumberedRows = Iterator[tuple[int, Row]]
Split = Literal["train", "validation"]
HELD_OUT = 1 / 16  # of the training rows, without an evaluation split
PAPER_TOKENS = 3072  # per completion (paper, Section "Hyperparameters")


#: a text is cut to this many characters per token before it is tokenized: it may have ten megabytes
CHARACTERS_PER_TOKEN = 32


class TurnsSpec(NamedTuple):
    """What a rollout of several turns has: an environment's class and tools, by import path; `iterations`: the most
    rounds of calls, TRL's `max_tool_calling_iterations`."""

    environment: str | None
    tools: tuple[str, ...]
    iterations: int | None = None


@dataclass(frozen=True, slots=True)
class TaskSource:
    """Sources of a task's rows. None: the hub, for tasks that have a data set there.

    `data`: training rows, `validation_data`: validation rows; a file, a directory, or
    `hub:OWNER/NAME[:CONFIG[:SPLIT]]`. `seed`: of all random draws. `template`, `answer`: for task `dataset`, the prompt
    template and the answer field. `members`: the members of a mixture, with their weights. `hold_out`: the fraction of
    the training rows that is held out for validation where there is no evaluation split."""

    data: Path | None = None
    validation_data: Path | None = None
    seed: int = 0
    template: str | None = None
    answer: str = "answer"
    members: Mapping[str, MixtureMember] = field(default_factory=dict)
    hold_out: float = HELD_OUT


@dataclass(frozen=True, slots=True)
class MixtureMember:
    """One task of a mixture. `weight`: its relative weight in training prompts; None: in proportion to its size."""

    source: TaskSource
    weight: float | None = None


@dataclass(frozen=True, slots=True)
class TaskData:
    """Prompts of a split, their origin, and the dropped rows, each with the reason. `held_out`: they are training rows,
    held out for validation because the data have no evaluation split."""

    prompts: list[Prompt]
    origin: str
    dropped: tuple[str, ...] = ()
    held_out: bool = False


@runtime_checkable
class Task(Protocol):
    """Named source of prompts. Implementations are modules of `mutualrl.tasks`.

    `max_new_tokens`: the default completion limit of an evaluation. `reads`: a description of its source.
    """

    @property
    def name(self) -> str:
        """Return its name."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Return the default maximum number of tokens per completion."""
        ...

    @property
    def takes_data(self) -> bool:
        """Return whether the user may give it data."""
        ...

    @property
    def reads(self) -> str:
        """Return a description of its source."""
        ...

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return all prompts of a split, in a fixed order. Raises DataError naming file, row and field."""
        ...


def require_no_data(task: str, source: TaskSource) -> None:
    """Raise UsageError if a data file is given for a task that generates its problems."""
    if source.data is not None or source.validation_data is not None:
        raise UsageError(
            f"task {task!r} makes its own problems; leave --data out, or name the task of the "
            "data (--task dataset for rows with prompt and answer)"
        )


def load_data(task: Task, split: Split, source: TaskSource) -> TaskData:
    """Return the data of a split; log a warning about dropped rows."""
    data = task.read(split, source)
    if data.dropped:
        shown = "; ".join(data.dropped[:10]) + ("; ..." if len(data.dropped) > 10 else "")
        logger.warning("%s: left out %d rows: %s", data.origin, len(data.dropped), shown)
    return data


def load_prompts(task: Task, split: Split, source: TaskSource) -> list[Prompt]:
    """Return the prompts of a split; log a warning about dropped rows."""
    return load_data(task, split, source).prompts


def sample_evenly(prompts: Sequence[Prompt], limit: int) -> list[Prompt]:
    """Return at most `limit` prompts in order: groups in proportion (largest remainders), evenly spaced within each."""
    if len(prompts) <= limit:
        return list(prompts)
    groups: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(prompt.group, []).append(place)
    exact = {name: limit * len(places) / len(prompts) for name, places in groups.items()}
    quotas = {name: int(quota) for name, quota in exact.items()}
    short = limit - sum(quotas.values())
    for name in sorted(groups, key=lambda name: (quotas[name] - exact[name], name))[:short]:
        quotas[name] += 1
    indices = [places[i * len(places) // quotas[name]] for name, places in groups.items() for i in range(quotas[name])]
    return [prompts[place] for place in sorted(indices)]


def normalized(text: str) -> str:
    """Return a text with every run of whitespace as one space, without any at its ends: texts that are equal so are one
    prompt wherever prompts are matched."""
    return " ".join(text.split())


def _rank(text: str) -> float:
    """Return a normalized text's place in [0, 1), uniform and always the same."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return (digest[0] % 16 << 56 | int.from_bytes(digest[1:8])) / 2**60


def held_out(prompts: Sequence[Prompt], fraction: float = HELD_OUT) -> list[bool]:
    """Return which prompts are held out for validation if no validation data are given. Texts that differ in whitespace
    only are on the same side.

    The default, 1 in 16, is decided text by text, so that rows that are added move no other; a `fraction` that somebody
    chose is exact: of n texts round(fraction * n), those with the smallest ranks, at least one.
    """
    texts = [normalized(prompt.text) for prompt in prompts]
    if fraction == HELD_OUT:
        return [_rank(text) < fraction for text in texts]
    distinct = sorted(set(texts), key=lambda text: (_rank(text), text))
    chosen = set(distinct[: max(1, round(fraction * len(distinct)))])
    return [text in chosen for text in texts]


def text_field(row: Row, field: str, path: Path, number: int) -> str:
    """Return a non-empty string field of a row. Raises DataError naming file, row and field."""
    if field not in row:
        fields = ", ".join(sorted(row)[:12])[:200] or "none"
        raise DataError(f"{path}, row {number}: no field '{field}' (found: {fields})")
    value = row[field]
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{path}, row {number}, field '{field}': found {repr(value)[:80]}, expected a non-empty string")
    return unicode_text(value, field, path, number)


def unicode_text(value: str, field: str, path: Path, number: int) -> str:
    """Return `value`. Raises DataError for a lone surrogate, which files and tokenizers cannot encode."""
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise DataError(f"{path}, row {number}, field '{field}': a lone surrogate, expected Unicode text")
    return value
