"""The rollouts of one policy in one round, by column: the record of wire, disk, diagnostics and training.

`COLUMNS` is the one place that maps a field of `Rollout` to its name and type on disk; the names there are the paper's.
A new field is declared there and in `Rollout`. Its trajectory has two columns: the text, and of a run its messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mutualrl.records import PUBLISHED_WITH, Ids, LogProbs, Mask, PublishSchema, Rollout, Score
from mutualrl.trajectory import Trajectory


class Column(NamedTuple):
    """Column on disk, the field of `Rollout` that it holds, its type, and whether every row has a value."""

    name: str
    field: str
    kind: pa.DataType
    needed: bool = False


COLUMNS = (
    Column("policy", "policy", pa.string(), needed=True),
    Column("round", "round", pa.int64(), needed=True),
    Column("prompt_id", "prompt_id", pa.string(), needed=True),
    Column("rollout", "index", pa.int32(), needed=True),
    Column("reward", "reward", pa.float64(), needed=True),
    Column("ended", "ended", pa.bool_(), needed=True),
    Column("x_text", "prompt", pa.string()),
    Column("y_text", "text", pa.string()),
    Column("messages", "messages", pa.string()),
    Column("tools", "tools", pa.string()),
    Column("advantage", "advantage", pa.float64()),
    Column("token_ids", "token_ids", pa.list_(pa.int32())),
    Column("mask", "mask", pa.list_(pa.bool_())),
    Column("logprobs", "logprobs", pa.list_(pa.float32())),
    Column("tokens", "length", pa.int32()),
    Column("prefix", "prefix", pa.int32()),
)
SCHEMA = pa.schema([pa.field(column.name, column.kind, nullable=not column.needed) for column in COLUMNS])
NAME_OF: Mapping[str, str] = {column.field: column.name for column in COLUMNS}
LISTS = ("token_ids", "logprobs", "mask")
TEXTS = ("text", "messages", "tools")


def pick(*names: str, needed: Iterable[str] = ()) -> list[pa.Field]:
    """Return the Arrow fields of some columns on disk; those in `needed` have no nulls."""
    return [SCHEMA.field(name).with_nullable(SCHEMA.field(name).nullable and name not in needed) for name in names]


def widest(kind: pa.DataType) -> pa.DataType:
    """Return the type of 64 bits of a column of numbers, or of lists of them; any other type unchanged."""
    if pa.types.is_list(kind):
        return pa.list_(widest(kind.value_type))
    if pa.types.is_integer(kind):
        return pa.int64()
    return pa.float64() if pa.types.is_floating(kind) else kind


class Rollouts(Sequence[Rollout]):
    """Rollouts of one policy in one round, in the policy's order; `Rollout` is the view of a row.

    Token ids, masks and log-probs are slices of one array each: no Python object per token. The properties return whole
    columns; a value that was not published is None.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self._lists: dict[str, list[object]] = {}
        self._rows: tuple[Rollout, ...] | None = None

    @classmethod
    def of(cls, rollouts: Iterable[Rollout], policy: str = "", round_index: int = 0) -> Rollouts:
        """Build the table of rollouts, all of one policy and round."""
        rows = list(rollouts)
        columns: dict[str, Any] = {"policy": [policy] * len(rows), "round": [round_index] * len(rows)}
        columns["messages"] = [None if row.trajectory is None else row.trajectory.stored for row in rows]
        for column in COLUMNS:
            if column.name not in columns:
                values = [getattr(row, column.field) for row in rows]
                columns[column.name] = _list_array(values, column.kind) if column.field in LISTS else values
        return cls(pa.table(columns, schema=SCHEMA))

    @classmethod
    def join(cls, parts: Sequence[Rollouts]) -> Rollouts:
        """Return the rollouts of several ranks as one, in rank order."""
        return parts[0] if len(parts) == 1 else Rollouts(pa.concat_tables([part.table() for part in parts]))

    def table(self) -> pa.Table:
        """Return all columns, by their names on disk."""
        return self._table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    # ---- rows

    @overload
    def __getitem__(self, index: int) -> Rollout: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Rollout]: ...
    def __getitem__(self, index: int | slice) -> Rollout | Sequence[Rollout]:
        return self._all_rows()[index]

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self._all_rows())

    def rows(self, *optional: str) -> Iterator[Rollout]:
        """Yield the rollouts with the fields that are always published and some `optional` ones (`text`: what was
        written); the others are None. Only these columns are decoded."""
        written = ("trajectory" if name == "text" else name for name in optional)
        names = ("policy", "round", "prompt_id", "index", "reward", "ended", *written)
        columns = [self._field(name) for name in names]
        for row, values in enumerate(zip(*columns, strict=True)):
            yield Rollout(**dict(zip(names, values, strict=True)), row=row)

    def _all_rows(self) -> tuple[Rollout, ...]:
        if self._rows is None:
            always = {"policy", "round", "prompt_id", "index", "reward", "ended", "messages"}
            self._rows = tuple(self.rows(*(column.field for column in COLUMNS if column.field not in always)))
        return self._rows

    # ---- columns

    @property
    def prompt_ids(self) -> list[str]:
        """Return the prompt's id of every rollout."""
        return self._values("prompt_id")  # type: ignore[return-value]

    @property
    def indices(self) -> list[int]:
        """Return the position of every rollout in its group."""
        return self._values("index")  # type: ignore[return-value]

    @property
    def rewards(self) -> list[float]:
        """Return every reward; NaN where it could not be scored."""
        return self._values("reward")  # type: ignore[return-value]

    @property
    def ended(self) -> list[bool]:
        """Return whether each rollout closed with an end-of-sequence token."""
        return self._values("ended")  # type: ignore[return-value]

    @property
    def advantages(self) -> list[float | None]:
        """Return TRL's advantages."""
        return self._values("advantage")  # type: ignore[return-value]

    @property
    def lengths(self) -> list[int | None]:
        """Return the numbers of sampled tokens."""
        return self._values("length")  # type: ignore[return-value]

    @property
    def prefixes(self) -> list[int]:
        """Return the numbers of leading tokens that were given, not sampled."""
        return self._values("prefix")  # type: ignore[return-value]

    @property
    def prompts(self) -> list[str | None]:
        """Return the prompts' texts."""
        return self._values("prompt")  # type: ignore[return-value]

    @property
    def token_ids(self) -> list[Ids | None]:
        """Return the policy's token ids of every rollout, shape (T,)."""
        return self._field("token_ids")  # type: ignore[return-value]

    @property
    def masks(self) -> list[Mask | None]:
        """Return which tokens of every rollout were sampled, shape (T,); None: all of them."""
        return self._field("mask")  # type: ignore[return-value]

    @property
    def logprobs(self) -> list[LogProbs | None]:
        """Return the behaviour policy's log-probs of every rollout, shape (T,), nats."""
        return self._field("logprobs")  # type: ignore[return-value]

    def texts(self, rows: Sequence[int] | None = None) -> list[str | None]:
        """Return the texts of some rows, or of all; the column is decoded once, and only these rows become strings."""
        array = self._array("y_text")
        return [array[row].as_py() for row in (range(len(self)) if rows is None else rows)]

    def tools(self) -> dict[str, str]:
        """Return the schemas of the tools by prompt; empty without any."""
        return {key: tools for key, tools in zip(self.prompt_ids, self._values("tools"), strict=True) if tools}  # type: ignore[misc]

    def trajectories(self, rows: Sequence[int] | None = None) -> list[Trajectory | None]:
        """Return what was written in some rows, or in all; None where it was not published."""
        if rows is None:
            return list(self._field("trajectory"))  # type: ignore[arg-type]
        texts, messages = self._array("y_text"), self._array("messages")
        return [Trajectory.of_stored(texts[row].as_py(), messages[row].as_py()) for row in rows]

    # ---- other rollouts

    def scores(self) -> Sequence[Score]:
        """Return how their member reads others' texts of the round: only those of a stored round can have any."""
        return ()

    def published(self, schema: PublishSchema) -> Rollouts:
        """Return the rollouts without the fields and texts that the schema withholds."""
        withheld = [name for name in _OPTIONAL if PUBLISHED_WITH.get(name, name) not in schema.fields]
        kept = self.without(*withheld).table()
        if "text" in schema.fields and schema.text_above > -np.inf:
            public = pa.array([schema.publishes_text(reward) for reward in self.rewards], pa.bool_())
            for name in map(NAME_OF.__getitem__, TEXTS):
                texts = pc.if_else(public, kept[name].combine_chunks(), pa.scalar(None, pa.string()))
                kept = kept.set_column(kept.column_names.index(name), SCHEMA.field(name), texts)
        return Rollouts(kept)

    def without(self, *fields: str) -> Rollouts:
        """Return the rollouts without some optional fields."""
        table = self.table()
        for field in fields:
            name = NAME_OF[field]
            empty = pa.nulls(len(self), SCHEMA.field(name).type)
            table = table.set_column(table.column_names.index(name), SCHEMA.field(name), empty)
        return Rollouts(table)

    def with_advantages(self, advantages: Sequence[float]) -> Rollouts:
        """Return the rollouts with other advantages."""
        table = self.table()
        column = pa.array(advantages, pa.float64())
        return Rollouts(table.set_column(table.column_names.index("advantage"), SCHEMA.field("advantage"), column))

    def with_rewards(self, rewards: Sequence[float]) -> Rollouts:
        """Return the rollouts with other rewards."""
        table = self.table()
        column = pa.array(rewards, pa.float64())
        return Rollouts(table.set_column(table.column_names.index("reward"), SCHEMA.field("reward"), column))

    def where(self, keep: Sequence[bool]) -> Rollouts:
        """Return the rollouts for which `keep` is true."""
        return Rollouts(self.table().filter(pa.array(keep, pa.bool_())))

    # ---- decoding

    def _array(self, name: str) -> pa.ChunkedArray:
        """Return a column by its name on disk."""
        return self._table.column(name)

    def _field(self, field: str) -> list[object]:
        """Return a column by its name in code, list columns as arrays."""
        if field not in (*LISTS, "trajectory"):
            return self._values(field)
        if field not in self._lists:
            slices = self.trajectories(range(len(self))) if field == "trajectory" else _slices(self._array(field))
            self._lists[field] = list(slices)
        return self._lists[field]

    def _values(self, field: str) -> list[object]:
        if field not in self._lists:
            self._lists[field] = self._array(NAME_OF[field]).to_pylist()
        return self._lists[field]


_OPTIONAL = ("prompt", "text", "messages", "tools", "advantage", "token_ids", "mask", "logprobs")
_FIELDS = {field.name for field in fields(Rollout)} - {"row", "trajectory"} | {"text", "messages"}
assert {column.field for column in COLUMNS} == _FIELDS


def _slices(column: pa.ChunkedArray) -> list[object]:
    """Return the rows of a list column as slices of its values, None for null."""
    rows: list[object] = []
    for chunk in column.chunks:
        values = chunk.values.to_numpy(zero_copy_only=False)
        offsets = chunk.offsets.to_numpy()
        present = chunk.is_valid().to_numpy(zero_copy_only=False)
        for row, there in enumerate(present.tolist()):
            rows.append(values[offsets[row] : offsets[row + 1]] if there else None)
    return rows


def _list_array(rows: Sequence[Ids | LogProbs | Mask | None], kind: pa.ListType) -> pa.Array:
    """Return a list column of arrays, without a Python object per number."""
    dtype = kind.value_type.to_pandas_dtype()
    present = [row for row in rows if row is not None]
    lengths = np.array([0 if row is None else len(row) for row in rows], dtype=np.int64)
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = np.concatenate(present).astype(dtype, copy=False) if present else np.zeros(0, dtype=dtype)
    absent = pa.array([row is None for row in rows], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=kind, mask=absent)
