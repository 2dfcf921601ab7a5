"""Nouns of the system, and the one legend of shape suffixes.

Shape suffixes, used for arrays and ragged lists alike:
`_M` policies of the pool, `_P` prompts of a round, `_G` rollouts of a group (one prompt, one policy),
`_T` tokens of a sequence. `rewards_P_G[p][g]` is the reward of rollout g on prompt p.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mutualrl.errors import UsageError

POLICY_NAME = r"^[a-z0-9][a-z0-9._-]*$"  # it is a directory, and a part of a URL


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem: the text every policy sees, the canonical answer, and the group it is reported under.

    `messages`: (role, content) pairs where the problem is a conversation; `text` then holds their contents. `columns`:
    what else its row of data has, for the reward function. `facets`: further names that results are broken down by (the
    level of a problem). `solution`: a correct completion, where the data have one.
    """

    id: str
    text: str
    answer: str
    group: str
    messages: tuple[tuple[str, str], ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict, compare=False)
    facets: Mapping[str, str] = field(default_factory=dict, compare=False)
    solution: str | None = field(default=None, compare=False)

    @property
    def content(self) -> str | list[dict[str, str]]:
        """Return the text, or the conversation in TRL's form."""
        return [{"role": role, "content": text} for role, text in self.messages] or self.text


def prompt_id(task: str, split: str, row: str | int, text: str) -> str:
    """Return stable id of a prompt: task, split, row id and a hash of its text."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{task}/{split}/{row}/{digest}"


def row_id(row: Mapping[str, Any]) -> str:
    """Return the id of a row of data: its column `prompt_id`, or a hash of all its columns, images and arrays included,
    so that two rows with one text are two prompts. Raises UsageError for a value that has no bytes of its own."""
    if row.get("prompt_id") is not None:
        return str(row["prompt_id"])
    digest = hashlib.sha256()
    for column in sorted(row):
        _hash_value(digest, column, column)
        _hash_value(digest, row[column], column)
    return f"data/{digest.hexdigest()[:16]}"


def content_digest(prompts: Iterable[Prompt]) -> str:
    """Return the sha256 of all that prompts hold, in their order: ids, texts, answers, groups, messages, columns,
    facets and solutions. Raises UsageError for a column's value that has no bytes of its own."""
    digest = hashlib.sha256()
    for prompt in prompts:
        for key in fields(prompt):
            _hash_value(digest, getattr(prompt, key.name), key.name)
    return digest.hexdigest()


def _hash_value(digest: hashlib._Hash, value: Any, column: str) -> None:
    """Add a value to a digest, with its type and its length, so that no two values give the same bytes."""
    if isinstance(value, bytes):
        digest.update(f"bytes:{len(value)}:".encode() + value)
        return
    if value is None or isinstance(value, bool | int | float | str):
        data = repr(value).encode("utf-8", "backslashreplace")
        digest.update(f"{type(value).__name__}:{len(data)}:".encode() + data)
        return
    if isinstance(value, Mapping):
        parts = [part for key in sorted(value, key=str) for part in (key, value[key])]
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif hasattr(value, "tobytes"):  # an array or a scalar of NumPy, or an image
        kind = getattr(value, "dtype", None) or getattr(value, "mode", None)
        shape = value.shape if hasattr(value, "shape") else getattr(value, "size", None)
        parts = [str(kind), str(shape), value.tobytes()]
    elif hasattr(value, "numpy"):  # a tensor
        parts = [value.detach().cpu().numpy()]
    elif hasattr(value, "isoformat"):  # a date or a time
        parts = [value.isoformat()]
    else:
        raise UsageError(
            f"column {column!r}: found {type(value).__name__}, of which no prompt id can be made; give every row an id "
            "of its own (column prompt_id)"
        )
    digest.update(f"{type(value).__name__}:{len(parts)}:".encode())
    for part in parts:
        _hash_value(digest, part, column)


@dataclass(frozen=True, slots=True)
class Rollout:
    """One sampled response to a prompt: the paper's D = (id, x_text, y_text, r, A, trace, meta).

    Source: paper, Section "Dataflow in One Training Loop", paragraph SEE. `index`: its place in the group of one prompt
    and policy. `reward`: NaN for one that could not be scored. `ended`: it closed with an end-of-sequence token; a
    truncated one must never be given such a token. `length`: sampled tokens. `prefix`: of its first tokens, those that
    it was given and did not sample. `advantage`: TRL's. `prompt` (x_text) and
    `text` (y_text), `token_ids` (T) and `logprobs` (T), the behaviour policy's in nats, are None where nobody asked
    for them.
    """

    prompt_id: str
    index: int
    reward: float
    ended: bool
    length: int = 0
    advantage: float | None = None
    prompt: str | None = None
    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    logprobs: tuple[float, ...] | None = None
    prefix: int = 0


#: fields of a rollout that a policy publishes only when somebody reads them; the others are always published
OPTIONAL_FIELDS = frozenset({"prompt", "text", "advantage", "token_ids", "logprobs"})


@dataclass(frozen=True, slots=True)
class PublishSchema:
    """Optional fields of its rollouts that a policy publishes. Made once per run.

    `text_above`: with `text` published, only rollouts rewarded above this have their text published. `traced`: somebody
    reads the behaviour log-probs, so that a forward pass for them is due where the sampler gave none.
    """

    fields: frozenset[str] = frozenset()
    text_above: float = -math.inf
    traced: bool = False

    def __post_init__(self) -> None:
        if unknown := sorted(self.fields - OPTIONAL_FIELDS):
            expected = ", ".join(sorted(OPTIONAL_FIELDS))
            raise ValueError(f"publish: found {', '.join(map(repr, unknown))}, expected some of: {expected}")

    @classmethod
    def of(cls, *fields: str, text_above: float = -math.inf) -> PublishSchema:
        """Return the schema of these fields; log-probs among them are read by somebody."""
        return cls(frozenset(fields), text_above, traced="logprobs" in fields)

    @classmethod
    def union(cls, schemas: Iterable[PublishSchema]) -> PublishSchema:
        """Return the schema that satisfies every one of `schemas`: what any policy of the pool reads."""
        given = list(schemas)
        fields = frozenset().union(*(schema.fields for schema in given))
        above = min((schema.text_above for schema in given if "text" in schema.fields), default=math.inf)
        return cls(fields, above, traced=any(schema.traced for schema in given))

    def complete(self) -> PublishSchema:
        """Return the schema with every field of every rollout, tracing only where somebody asked for it."""
        return PublishSchema(OPTIONAL_FIELDS, -math.inf, self.traced)

    def publishes_text(self, reward: float) -> bool:
        """Return whether a rollout with this reward (NaN: unscorable) has its text published."""
        return "text" in self.fields and (self.text_above == -math.inf or reward > self.text_above)

    def select(self, rollouts: Iterable[Rollout]) -> list[Rollout]:
        """Return the rollouts with the fields that are not published taken out."""
        return [self._select(rollout) for rollout in rollouts]

    def _select(self, rollout: Rollout) -> Rollout:
        withheld = dict.fromkeys(OPTIONAL_FIELDS - self.fields)
        if not self.publishes_text(rollout.reward):
            withheld["text"] = None
        return replace(rollout, **withheld)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated response: the sampled ids, their text, and whether it ended by itself."""

    token_ids: tuple[int, ...]
    text: str
    ended: bool
