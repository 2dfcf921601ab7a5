"""Data records that all modules share, and the legend of shape suffixes.

Shape suffixes, of arrays and of ragged lists:
`_M` policies of the pool, `_P` prompts of a round, `_G` rollouts of a group (one prompt, one policy),
`_T` tokens of a sequence. `rewards_P_G[p][g]` is the reward of rollout g on prompt p.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import numpy.typing as npt

from mutualrl.errors import UsageError
from mutualrl.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem: the text every policy sees, the canonical answer, and the group it is reported under.

    `messages`: (role, content) pairs if the problem is a conversation; `text` then holds their contents. `columns`:
    the other columns of its data row, for the reward function; also `answer` and `group` if they are not strings there.
    `facets`: further keys by which results are broken down (such as a problem's level). `solution`: a correct
    completion, if the data have one.
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

    @property
    def reward_columns(self) -> dict[str, Any]:
        """Return the columns that a reward function receives, each with its type and value in the data."""
        return {"answer": self.answer, "group": self.group, **self.columns, "prompt_id": self.id}


def columns_of(prompts: Iterable[Prompt]) -> dict[str, list[Any]]:
    """Return the columns that a reward function receives for these prompts, None where a prompt lacks one."""
    rows = [prompt.reward_columns for prompt in prompts]
    return {key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)}


def prompt_id(task: str, split: str, row: str | int, text: str) -> str:
    """Return the stable id of a prompt: task, split, row id and a hash of its text."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{task}/{split}/{row}/{digest}"


def row_id(row: Mapping[str, Any]) -> str:
    """Return the id of a data row: its column `prompt_id`, or a hash of all its columns, images and arrays included,
    so that two rows with the same text are two prompts. Raises UsageError for a value that cannot be hashed."""
    if row.get("prompt_id") is not None:
        return str(row["prompt_id"])
    digest = hashlib.sha256()
    for column in sorted(row):
        _hash_value(digest, column, column)
        _hash_value(digest, row[column], column)
    return f"data/{digest.hexdigest()[:16]}"


def content_digest(prompts: Iterable[Prompt]) -> str:
    """Return the sha256 of the content of prompts, in order: ids, texts, answers, groups, messages, columns, facets
    and solutions. Raises UsageError for a column value that cannot be hashed."""
    digest = hashlib.sha256()
    for prompt in prompts:
        for key in fields(prompt):
            _hash_value(digest, getattr(prompt, key.name), key.name)
    return digest.hexdigest()


def _hash_value(digest: hashlib._Hash, value: Any, column: str) -> None:
    """Add a value to a digest, with its type and length, so that different values add different bytes."""
    if isinstance(value, bytes):
        digest.update(f"bytes:{len(value)}:".encode() + value)
        return
    if value is None or isinstance(value, bool | int | float | str):
        data = repr(value).encode("utf-8", "backslashreplace")
        digest.update(f"{type(value).__name__}:{len(data)}:".encode() + data)
        return
    if isinstance(value, Mapping):
        digest.update(f"{type(value).__name__}:{2 * len(value)}:".encode())
        for key in sorted(value, key=str):
            _hash_value(digest, key, column)
            _hash_value(digest, value[key], str(key) if column == "columns" else column)
        return
    if isinstance(value, list | tuple):
        parts = list(value)
    elif hasattr(value, "tobytes"):  # a NumPy array or scalar, or an image
        kind = getattr(value, "dtype", None) or getattr(value, "mode", None)
        shape = value.shape if hasattr(value, "shape") else getattr(value, "size", None)
        parts = [str(kind), str(shape), value.tobytes()]
    elif hasattr(value, "numpy"):  # a tensor
        parts = [value.detach().cpu().numpy()]
    elif hasattr(value, "isoformat"):  # a date or a time
        parts = [value.isoformat()]
    elif isinstance(value, Decimal | timedelta | UUID):
        parts = [repr(value)]
    else:
        raise UsageError(
            f"column {column!r}: found {type(value).__name__}, which has no bytes to recognize the data by; convert it "
            "to text or numbers, or drop the column"
        )
    digest.update(f"{type(value).__name__}:{len(parts)}:".encode())
    for part in parts:
        _hash_value(digest, part, column)


Ids = npt.NDArray[np.int32]
LogProbs = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]


def plain_ids(ids: Sequence[int] | Ids) -> tuple[int, ...]:
    """Return token ids as a tuple, which compares and hashes by value."""
    return tuple(ids.tolist() if isinstance(ids, np.ndarray) else ids)


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """One sampled response to a prompt: the paper's D = (id, x_text, y_text, r, A, trace, meta).

    Source: paper, Section "Dataflow in One Training Loop", paragraph SEE. `mutualrl.rollouts` has the rollouts of a
    round by column. Fields with default None are None unless published.
    """

    prompt_id: str
    """Id of the prompt, the same for all policies."""
    index: int
    """Position in the group of one prompt and policy."""
    reward: float
    """Reward of the policy's own verifier; NaN if it could not be scored, which zero is not."""
    ended: bool
    """Whether it closed with an end-of-sequence token; one must never be appended to a truncated rollout."""
    length: int | None = None
    """Number of sampled tokens, without prefix and results of tools; None of a recorded text, which nobody sampled."""
    advantage: float | None = None
    """TRL's advantage; zero for an equal group."""
    prompt: str | None = None
    """The prompt's text, x_text."""
    trajectory: Trajectory | None = None
    """What the policy wrote: y_text, empty for a policy that ended at once; with tools, all messages of its run."""
    token_ids: Ids | None = None
    """Token ids of its policy, shape (T,)."""
    logprobs: LogProbs | None = None
    """Log-probs of the behaviour policy, shape (T,), nats; NaN for a token that it could not score."""
    prefix: int = 0
    """Number of leading tokens that were given, not sampled."""
    policy: str = ""
    """Policy that sampled it; empty outside a round."""
    round: int = 0
    """Round in which it was sampled."""
    row: int = 0
    """Position in its policy's round."""
    tools: str | None = None
    """Schemas of the tools that it had, as JSON, published with the text."""
    mask: Mask | None = None
    """Which of its tokens were sampled, shape (T,), published with them: a tool's results were not; None: all."""

    def __post_init__(self) -> None:
        for name, kind in (("token_ids", np.int32), ("logprobs", np.float32), ("mask", np.bool_)):
            if (values := getattr(self, name)) is not None:
                object.__setattr__(self, name, np.asarray(values, dtype=kind))

    @property
    def text(self) -> str | None:
        """Return the response's text; of a run with tools, what the policy said."""
        return None if self.trajectory is None else self.trajectory.text


@dataclass(frozen=True, slots=True, eq=False)
class Score:
    """How a source reads the text of a policy's rollout, which ended: the paper's trace, of somebody else's text."""

    policy: str
    """The policy whose rollout it is."""
    prompt_id: str
    index: int
    """Its position in the group of that prompt and policy."""
    ends: Ids
    """Byte of the text where each of the source's tokens ends, shape (n,); the last one is its end token."""
    logprobs: LogProbs
    """Log-probs of these tokens at temperature 1, shape (n,), nats."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ends", np.asarray(self.ends, dtype=np.int32))
        object.__setattr__(self, "logprobs", np.asarray(self.logprobs, dtype=np.float32))


#: rollout fields that are published only on request; the others are always published
OPTIONAL_FIELDS = frozenset({"prompt", "text", "advantage", "token_ids", "logprobs"})
#: fields that are published wherever another one is
PUBLISHED_WITH: Mapping[str, str] = {"messages": "text", "tools": "text", "mask": "token_ids"}


@dataclass(frozen=True, slots=True)
class PublishSchema:
    """Optional rollout fields that a policy publishes. Built once per run.

    `text_above`: if `text` is published, only rollouts with a reward above this publish theirs. `traced`: the behaviour
    log-probs are read, so that a forward pass computes them if the sampler returned none.
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
        """Return the schema of these fields; it is traced if `logprobs` is among them."""
        return cls(frozenset(fields), text_above, traced="logprobs" in fields)

    @classmethod
    def union(cls, schemas: Iterable[PublishSchema]) -> PublishSchema:
        """Return the schema that satisfies all of `schemas`: the fields that any policy of the pool reads."""
        members = list(schemas)
        fields = frozenset().union(*(schema.fields for schema in members))
        above = min((schema.text_above for schema in members if "text" in schema.fields), default=math.inf)
        return cls(fields, above, traced=any(schema.traced for schema in members))

    def complete(self) -> PublishSchema:
        """Return the schema with every field of every rollout; `traced` is unchanged."""
        return PublishSchema(OPTIONAL_FIELDS, -math.inf, self.traced)

    def publishes_text(self, reward: float) -> bool:
        """Return whether the text of a rollout with this reward (NaN: unscorable) is published."""
        return "text" in self.fields and (self.text_above == -math.inf or reward > self.text_above)


#: of a policy whose peers read nothing but its rewards
REWARDS_ONLY = PublishSchema()


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated response: the sampled ids, what they say, and whether it ended with an end-of-sequence token."""

    token_ids: tuple[int, ...]
    trajectory: Trajectory
    ended: bool

    @property
    def text(self) -> str:
        """Return its text; of a run with tools, what the policy said."""
        return self.trajectory.text
