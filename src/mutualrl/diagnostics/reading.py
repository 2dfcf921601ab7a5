"""Rollouts from files: JSON Lines or Parquet, as an evaluation or `exchange export` writes them, or as anyone does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from mutualrl.errors import DataError
from mutualrl.files import user_path
from mutualrl.tasks.base import read_jsonl

#: other names of the columns, in the order in which they are looked for
ALIASES = {
    "policy": ("policy", "model"),
    "prompt_id": ("prompt_id", "id"),
    "x_text": ("x_text", "prompt"),
    "y_text": ("y_text", "completion", "text"),
}
TYPES: dict[str, pa.DataType] = {
    "policy": pa.string(), "round": pa.int64(), "prompt_id": pa.string(), "rollout": pa.int64(),
    "reward": pa.float64(), "ended": pa.bool_(), "task": pa.string(), "group": pa.string(), "x_text": pa.string(),
    "y_text": pa.string(), "tokens": pa.int64(), "token_ids": pa.list_(pa.int64()), "logprobs": pa.list_(pa.float64()),
}  # fmt: skip
NEEDED = ("policy", "prompt_id", "reward")


def read_rollouts(paths: Sequence[Path]) -> pa.Table:
    """The rows of all files as one table. A file without `policy` is its name's; without `rollout`, rows are numbered
    in their order. Raises DataError naming file, row and field."""
    files = [file for path in paths for file in _files(user_path(path))]
    tables = [_parquet(file) if file.suffix == ".parquet" else _lines(file) for file in files]
    names = [name for name in TYPES if any(name in table.column_names for table in tables)]
    whole = [
        pa.table({n: t.column(n) if n in t.column_names else pa.nulls(len(t), TYPES[n]) for n in names}) for t in tables
    ]
    return _numbered(pa.concat_tables(whole))


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(p for p in path.rglob("*") if p.suffix in (".parquet", ".jsonl") and not p.name.startswith("."))
        if not found:
            raise DataError(f"{path}: the directory holds no .parquet or .jsonl file of rollouts")
        return found
    if not path.is_file():
        raise DataError(f"rollouts file not found: {path} (expected .jsonl or .parquet; check --rollouts)")
    return [path]


def _lines(path: Path) -> pa.Table:
    columns: dict[str, list[Any]] = {}
    numbers: list[int] = []
    for number, row in read_jsonl(path):
        for name in TYPES:
            field = next((alias for alias in ALIASES.get(name, (name,)) if alias in row), None)
            value = None if field is None else row[field]
            if name in NEEDED and value is None and not (name == "policy" and field is None):
                raise DataError(f"{path}, row {number}: {_missing(name, row, field)}")
            if value is not None and not _fits(name, value):
                if name == "x_text":  # a conversation: the models are asked it only where their prompts are known
                    value = None
                else:
                    raise DataError(
                        f"{path}, row {number}, field '{field}': found {repr(value)[:80]}, expected {_WORDS[name]}"
                    )
            columns.setdefault(name, []).append(str(value) if name == "prompt_id" and value is not None else value)
        numbers.append(number)
    kept = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    arrays = {name: _array(values, TYPES[name], path, name, numbers) for name, values in kept.items()}
    return _owned(pa.table(arrays), path)


def _missing(name: str, row: dict[str, Any], field: str | None) -> str:
    if field is not None:
        return f"field '{field}' is null, expected {_WORDS[name]}"
    found = ", ".join(sorted(row)[:12])[:200] or "none"
    other = f" (or '{ALIASES[name][1]}')" if name in ALIASES else ""
    return f"no field '{name}'{other} (found: {found}); rollouts need a prompt's id and a reward each"


_WORDS = {
    "policy": "a text", "round": "an integer", "prompt_id": "a text or an integer", "rollout": "an integer",
    "reward": "a number", "ended": "true or false", "task": "a text", "group": "a text", "x_text": "a text",
    "y_text": "a text", "tokens": "an integer", "token_ids": "a list of integers", "logprobs": "a list of numbers",
}  # fmt: skip


def _fits(name: str, value: Any) -> bool:
    if name in ("token_ids", "logprobs"):
        kinds: tuple[type, ...] = (int,) if name == "token_ids" else (int, float)
        return isinstance(value, list) and all(isinstance(v, kinds) and not isinstance(v, bool) for v in value)
    if name == "reward":
        return isinstance(value, int | float)
    if name == "ended":
        return isinstance(value, bool)
    if name in ("round", "rollout", "tokens"):
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, str) or (name == "prompt_id" and type(value) is int)


def _array(values: list[Any], kind: pa.DataType, path: Path, name: str, numbers: list[int]) -> pa.Array:
    if kind == pa.float64():
        values = [None if value is None else float(value) for value in values]
    try:
        return pa.array(values, kind)
    except (pa.ArrowException, UnicodeEncodeError, OverflowError) as error:
        for number, value in zip(numbers, values, strict=True):
            try:
                pa.array([value], kind)
            except (pa.ArrowException, UnicodeEncodeError, OverflowError):
                raise DataError(f"{path}, row {number}, field '{name}': {error}") from None
        raise


def _parquet(path: Path) -> pa.Table:
    try:
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({error})") from None
    if not len(table):
        raise DataError(f"{path}: the file has no rows")
    columns: dict[str, Any] = {}
    for name, kind in TYPES.items():
        field = next((alias for alias in ALIASES.get(name, (name,)) if alias in table.column_names), None)
        if field is None:
            if name in NEEDED and name != "policy":
                raise DataError(f"{path}, row 1: {_missing(name, dict.fromkeys(table.column_names), None)}")
            continue
        column = table.column(field)
        if name in NEEDED and column.null_count and not (name == "reward" and pa.types.is_floating(column.type)):
            row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0]) + 1
            raise DataError(f"{path}, row {row}: field '{field}' is null, expected {_WORDS[name]}")
        try:
            if name == "reward" and (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                raise pa.ArrowInvalid(f"{column.type}")
            columns[name] = column.cast(kind)
        except pa.ArrowException:
            if name == "x_text":
                continue
            raise DataError(
                f"{path}, field '{field}': found a column of {column.type}, expected {_WORDS[name]} in each row"
            ) from None
    return _owned(pa.table(columns), path)


def _owned(table: pa.Table, path: Path) -> pa.Table:
    """With a policy in every row: the file's name where it says none."""
    if "policy" in table.column_names:
        return table
    return table.append_column("policy", pa.array([path.stem] * len(table), pa.string()))


def _numbered(table: pa.Table) -> pa.Table:
    """With a round and a rollout number in every row, and NaN for a reward that is null."""
    if "round" not in table.column_names:
        table = table.append_column("round", pa.array(np.zeros(len(table), dtype=np.int64)))
    filled = table.column("round").fill_null(0)
    table = table.set_column(table.column_names.index("round"), "round", filled)
    if "rollout" not in table.column_names or table.column("rollout").null_count:
        seen: dict[tuple[str, int, str], int] = {}
        numbers = []
        keys = (table.column(name).to_pylist() for name in ("policy", "round", "prompt_id"))
        for key in zip(*keys, strict=True):
            numbers.append(seen.get(key, 0))
            seen[key] = numbers[-1] + 1
        if "rollout" in table.column_names:
            table = table.drop_columns(["rollout"])
        table = table.append_column("rollout", pa.array(numbers, pa.int64()))
    rewards = table.column("reward").fill_null(float("nan"))
    return table.set_column(table.column_names.index("reward"), "reward", rewards)
