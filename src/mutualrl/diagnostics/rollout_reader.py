"""Read rollouts from JSON Lines or Parquet files: of an evaluation, of `exchange export`, or the user's own."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute

from mutualrl.console.lines import notify
from mutualrl.console.user_path import user_path
from mutualrl.errors import DataError
from mutualrl.rollouts import SCHEMA, widest
from mutualrl.sources.layouts import find_layout, reward_of
from mutualrl.sources.prepare import malformed_note
from mutualrl.sources.section import Columns
from mutualrl.storage.parquet import read_table
from mutualrl.tasks.base import Row, normalized
from mutualrl.tasks.files import EXPECTED, FORMATS, columns_of, data_files, file_rows, format_of, suffix_of
from mutualrl.tasks.run_reader import CONVERSATIONS, is_conversation, read_trajectory, trajectory_of

#: accepted names of the columns, in order of preference
ALIASES = {
    "policy": ("policy", "model"),
    "prompt_id": ("prompt_id", "id", "example_id", "doc_id", "prompt", "input"),  # without an id, the prompt's text
    "x_text": ("x_text", "prompt", "input"),
    "y_text": ("y_text", "completion", "text", "output"),
}
#: columns that are read, in the widest type of their kind: a user's numbers are not rounded
TYPES: dict[str, pa.DataType] = {
    **{
        name: widest(SCHEMA.field(name).type) for name in ("policy", "round", "prompt_id", "rollout", "reward", "ended")
    },
    "task": pa.string(),
    "group": pa.string(),
    **{name: widest(SCHEMA.field(name).type) for name in ("x_text", "y_text", "tokens", "token_ids", "logprobs")},
}
TEXT_IDS = ("prompt", "input")  # columns of texts, which are ids but for their whitespace
NEEDED = ("policy", "prompt_id", "reward")
TEXTS = ("prompt_id", "x_text", "y_text")  # also read from messages
#: columns of dumps of training runs, one file per step: TRL's `log_completions`, with one more column per reward
#: function, and verl's
TRL, VERL = frozenset({"step", "prompt", "completion"}), frozenset({"step", "input", "output"})
#: columns that tell the environment of a prompt: ids are counted anew in each of them
ENVIRONMENTS = ("env_name", "env_id", "environment", "task_name", "data_source", "task", "dataset")
#: columns of ids that may be counted so; those of texts, and ours, identify a prompt by themselves
COUNTED_IDS = ("id", "example_id", "doc_id")
#: column of a table of rollouts with `_environment`
ENVIRONMENT = "prompt_environment"
#: column that tells several verdicts on one response apart, of lm-evaluation-harness
FILTER = "filter"
#: a directory of prime-rl's rollouts of one step
STEP_DIRECTORY = re.compile(r"step_(\d+)")
#: columns that say that an error of the infrastructure ended a rollout, which is then no failure of the model
ERROR, STOPPED, HAS_ERROR = "error", "stop_condition", "has_error"


def is_dump(names: Collection[str]) -> bool:
    """Return whether a file is a dump of a training run, whose unit is the step."""
    return "round" not in names and any(columns <= set(names) for columns in (TRL, VERL))


def errored(row: Mapping[str, object]) -> bool:
    """Return whether an error ended the rollout of a row."""
    error = row.get(ERROR)
    return (isinstance(error, str | Mapping) and bool(error)) or row.get(STOPPED) == HAS_ERROR


def has_rewards(path: Path, reward: str | None = None) -> bool:
    """Return whether a file is to be read by `read_rollouts`: it has a column `reward` (or that of `--reward`) or is a
    dump of TRL's, or has no column of texts. Any other file has recorded texts. A directory has rollouts."""
    if path.is_dir() or not path.is_file():
        return True
    try:
        names = columns_of(path)
        if "steps" in names and "final_metrics" in names:
            return any(reward_of(row) is not None for _, row in itertools.islice(file_rows(path), 1))
        if (reward or "reward") in names or "rewards" in names or is_dump(names):
            return True
        return not find_layout(names, Columns(), str(path))
    except (DataError, pa.ArrowException, OSError):
        return True  # the reader of rollouts says what is wrong


def reward_column(path: Path, reward: str | None) -> str | None:
    """Return the column of a file of rollouts, or of the first one in a directory, that has the rewards; None if there
    is none."""
    file = _files(user_path(path))[0]
    row = next(iter(file_rows(file)))[1]
    return _field("reward", row, reward, [name for name, value in row.items() if isinstance(value, int | float)], file)


def read_rollouts(paths: Sequence[Path], reward: str | None = None) -> pa.Table:
    """Return the rows of all files as one table. Without `policy`, the file's name is the policy; without `rollout`,
    rows are numbered in order; dumps of TRL's are of the model of their directory. `reward`: the column with the
    rewards; by default `reward`, and in a dump of TRL's its only reward function. Raises DataError naming file, row and
    field."""
    files = [file for path in paths for file in _files(user_path(path))]
    seen: set[Path] = set()
    for file in files:
        if file.resolve() in seen:
            raise DataError(f"{file}: the file is given twice; every rollout would count double")
        seen.add(file.resolve())
    tables = _identified([_of_step(_table(file, reward), file) for file in files])
    _check_stems(files, tables)
    policies = _names(files, tables)
    present = {name for table in tables for name in table.column_names}
    names = [name for name in TYPES if name in present]
    parts = []
    for file, table, policy in zip(files, tables, policies, strict=True):
        columns = {n: table[n] if n in table.column_names else pa.nulls(len(table), TYPES[n]) for n in names}
        columns["policy"] = table["policy"] if "policy" in table.column_names else pa.array([policy] * len(table))
        columns["file"] = pa.array([str(file)] * len(table))
        columns["line"] = table["line"]
        parts.append(_filled(pa.table(columns), file))
    dumped = [part for part, table in zip(parts, tables, strict=True) if "step" in table.column_names]
    others = [part for part, table in zip(parts, tables, strict=True) if "step" not in table.column_names]
    return pa.concat_tables([*others, _last_steps(pa.concat_tables(dumped))] if dumped else others)


def _table(path: Path, reward: str | None) -> pa.Table:
    """Return a file's rollouts; of Parquet column by column, unless a row says more than each of its columns."""
    if suffix_of(path) != ".parquet":
        return _lines(path, reward)
    names = columns_of(path)
    runs = "y_text" not in names and any(is_conversation(name, names) for name in names)
    counted = _field("prompt_id", names, reward, (), path) in COUNTED_IDS and any(
        name in ENVIRONMENTS for name in names
    )
    return _lines(path, reward) if runs or counted or FILTER in names else _parquet(path, reward)


def _of_step(table: pa.Table, file: Path) -> pa.Table:
    """Return a table with the step that its file's directory has in prime-rl's rollouts, of one model as TRL's."""
    steps = [int(match[1]) for each in file.resolve().parent.parts if (match := STEP_DIRECTORY.fullmatch(each))]
    if not steps or "step" in table.column_names:
        return table
    rounds = pa.array(np.full(len(table), steps[-1], dtype=np.int64))
    unnamed = table.drop_columns(["policy"]) if "policy" in table.column_names else table
    return _set_column(_set_column(unnamed, "round", rounds), "step", rounds)


def _identified(tables: Sequence[pa.Table]) -> list[pa.Table]:
    """Return tables whose ids identify prompts: with their environment, where one id is of several; and by the text,
    where each row has an id of its own and texts come again. Raises DataError for an id with several texts."""
    environments: dict[str, set[str]] = {}
    for table in tables:
        for prompt_id, environment in zip(*_columns(table, "prompt_id", ENVIRONMENT), strict=True):
            environments.setdefault(prompt_id, set()).add(environment)
    identified = []
    for table in tables:
        ids, told, texts = _columns(table, "prompt_id", ENVIRONMENT, "x_text")
        rounds, policies = _columns(table, "round", "policy")
        known = [normalized(text) for text in texts if text]
        own = (table.schema.metadata or {}).get(b"id") == b"id" and len(ids) == len(set(ids))
        if own and len(known) == len(ids) > 2 * len(set(known)):
            ids = known
        elif any(len(environments[prompt_id]) > 1 for prompt_id in ids):
            ids = [f"{told}/{prompt_id}" if told else prompt_id for prompt_id, told in zip(ids, told, strict=True)]
        seen: dict[tuple[object, ...], str] = {}
        for key, text in zip(zip(policies, rounds, ids, strict=True), texts, strict=True):
            if text and normalized(seen.setdefault(key, text)) != normalized(text):
                raise DataError(
                    f"prompt id {key[2]!r} has several prompts: {seen[key][:80]!r} and {text[:80]!r}; expected an id "
                    f"for each prompt (column prompt_id), or a column with its environment ({ENVIRONMENTS[0]})"
                )
        named = _set_column(table, "prompt_id", pa.array(ids, pa.string()))
        identified.append(named.drop_columns([ENVIRONMENT]) if ENVIRONMENT in named.column_names else named)
    return identified


def _columns(table: pa.Table, *names: str) -> list[list[Any]]:
    """Return columns as lists, of nulls where a table lacks one."""
    return [table[name].to_pylist() if name in table.column_names else [None] * len(table) for name in names]


def _check_stems(files: Sequence[Path], tables: Sequence[pa.Table]) -> None:
    """Raise DataError when two files without a policy have the same name."""
    seen: dict[str, Path] = {}
    for file, table in zip(files, tables, strict=True):
        if not {"policy", "step"} & set(table.column_names) and seen.setdefault(file.stem, file) != file:
            raise DataError(
                f"{seen[file.stem]} and {file} name no policy and would both be {file.stem!r}: add a column 'policy'"
            )


def _filled(table: pa.Table, path: Path) -> pa.Table:
    """Return the table with a round and a rollout number in every row, NaN for null rewards, and true for nulls in
    `ended`."""
    rounds = table["round"].fill_null(0) if "round" in table.column_names else _zeros(len(table))
    table = _set_column(table, "round", rounds)
    if "ended" in table.column_names:
        table = _set_column(table, "ended", table["ended"].fill_null(True))
    rewards = table["reward"].fill_null(float("nan"))
    if np.isinf(values := rewards.to_numpy()).any():
        row = int(np.flatnonzero(np.isinf(values))[0])
        raise DataError(
            f"{path}, row {table['line'][row]}, field 'reward': found {values[row]}, expected a finite number"
        )
    table = _set_column(table, "reward", rewards)
    missing = table["rollout"].null_count if "rollout" in table.column_names else len(table)
    if 0 < missing < len(table):
        row = int(np.flatnonzero(table["rollout"].is_null().to_numpy())[0])
        raise DataError(f"{path}, row {table['line'][row]}: no field 'rollout', which other rows have")
    return table if not missing else _set_column(table, "rollout", _rollout_numbers(table))


def _zeros(rows: int) -> pa.Array:
    return pa.array(np.zeros(rows, dtype=np.int64))


def _set_column(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    if name in table.column_names:
        return table.set_column(table.column_names.index(name), name, values)
    return table.append_column(name, values)


def _rollout_numbers(table: pa.Table) -> pa.Array:
    """Return rollout numbers in the order of the rows."""
    seen: dict[tuple[str, int, str], int] = {}
    numbers = []
    for key in zip(*(table[name].to_pylist() for name in ("policy", "round", "prompt_id")), strict=True):
        numbers.append(seen.get(key, 0))
        seen[key] = numbers[-1] + 1
    return pa.array(numbers, pa.int64())


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        if (path / "run.json").is_file() or any((p / "run.json").is_file() for p in path.absolute().parents[:2]):
            raise DataError(f"{path}: these files belong to a run; --run DIR reads them and checks their markers")
        if not (files := data_files(path)):
            raise DataError(f"{path}: the directory has no file of rollouts ({', '.join(FORMATS)})")
        return files
    if not path.is_file():
        raise DataError(f"rollouts file not found: {path} ({EXPECTED}; check --rollouts)")
    return [path]


def _field(name: str, names: Collection[str], reward: str | None, numeric: Collection[str], path: Path) -> str | None:
    """Return the column of a file that a field is read from; None if it has none. `numeric`: columns of numbers."""
    if name == "round" and is_dump(names):
        return "step"
    if name != "reward" or (reward is None and "reward" in names):
        return next((alias for alias in ALIASES.get(name, (name,)) if alias in names), None)
    if reward is not None:
        if reward not in names:
            raise DataError(f"{path}: no column {reward!r} (--reward), found: {', '.join(sorted(names))[:200]}")
        return reward
    known = {*TRL, *VERL, "advantage", *TYPES, *(alias for aliases in ALIASES.values() for alias in aliases)}
    functions = sorted(set(numeric) - known) if is_dump(names) else []
    if len(functions) > 1:
        raise DataError(
            f"{path}: found the columns {', '.join(functions)[:200]} beside TRL's; name the one with the reward: "
            f"--reward {functions[0]}"
        )
    return functions[0] if functions else None


def _of_messages(name: str, value: object) -> object:
    """Return the text of messages: as an id all of them, else the user's last one, or all if there is none; any other
    value as it is. Of content in parts, the parts that are text."""
    if name not in TEXTS or not isinstance(value, list) or not all(isinstance(each, Mapping) for each in value):
        return value
    read = read_trajectory(value)
    if read is None:
        return None
    if name == "y_text" and not read.prompt and read.is_run:
        return read.run.text
    users = [message.text for message in read.messages if message.role == "user" and message.text]
    conversation = "\n".join(message.text for message in read.messages)
    return users[-1] if users and name != "prompt_id" else conversation or None


def _of_run(row: Row, malformed: Counter[str]) -> Row:
    """Return a row with a whole run of an agent (`messages`, `conversations`, the `nodes` of a trace, the `steps` of
    ATIF) as a rollout: its prompt, what the model said, its reward and its model; any other row as it is. A problem of
    the run is counted in `malformed`."""
    if any(name in row for names in (TRL, VERL) for name in names if name != "step") or "y_text" in row:
        return row
    read = trajectory_of(row)
    if read is None:
        return row
    malformed.update([read.problem] if read.problem else [])
    rollout: Row = {"prompt": read.prompts[0], "completion": read.run.text}
    if (reward := reward_of(row)) is not None:
        rollout["reward"] = reward
    agent, task, calls = row.get("agent"), row.get("task"), row.get("calls")
    if row.get("nodes") is not None:  # the id of a trace is its own, not its prompt's
        rollout["id"] = None
        key = task.get("key") or task.get("hash") if isinstance(task, Mapping) else None
        rollout |= {"prompt_id": key} if isinstance(key, str) else {}
        models = (
            {call.get("model") for call in calls if isinstance(call, Mapping)} if isinstance(calls, list) else set()
        )
        rollout |= {"model": model} if len(models) == 1 and isinstance(model := next(iter(models)), str) else {}
    elif isinstance(agent, Mapping) and isinstance(model := agent.get("model_name", agent.get("name")), str):
        rollout["model"] = model
    others = {name: value for name, value in row.items() if name not in TYPES or not isinstance(value, Mapping)}
    merged = {**others, **rollout}
    return {
        name: value for name, value in merged.items() if name not in CONVERSATIONS and (name, value) != ("id", None)
    }


def _is_trained(row: Row) -> bool:
    """Return whether a row is of the model in training: a trace of verifiers may be of a judge or an opponent."""
    agent = row.get("agent")
    return not isinstance(agent, Mapping) or agent.get("trainable") is not False


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a file as rollouts, and say at the end which were left out."""
    left_out: Counter[str] = Counter()
    malformed: Counter[str] = Counter()
    typed, verdict = format_of(path).typed, None
    for number, row in file_rows(path):
        verdict = verdict or row.get(FILTER)
        if not _is_trained(row):
            left_out["of a model that is not trained"] += 1
        elif row.get(FILTER) != verdict:
            left_out[f"of another {FILTER} than {verdict!r}, on the same responses"] += 1
        elif typed:
            yield number, _of_run(row, malformed)
        else:
            yield number, {name: _value(name, text) for name, text in row.items()}
    for reason, count in left_out.items():
        notify(f"{path.name}: {count:,} rows are left out: {reason}")
    if malformed:
        notify(f"{path.name}: {malformed_note(malformed)}: their rewards count, their texts can teach nothing")


def _lines(path: Path, reward: str | None) -> pa.Table:
    columns: dict[str, list[object]] = {}
    numbers: list[int] = []
    dump, lost, id_field = False, 0, ""
    for number, row in _rows(path):
        id_field = _id_field(row)
        dump = dump or is_dump(row)
        lost += errored(row)
        numeric = [name for name, value in row.items() if isinstance(value, int | float)]
        for name in TYPES:
            field = _field(name, row.keys(), reward, numeric, path)
            value = None if field is None else _of_messages(name, row[field])
            if name == "reward" and errored(row):
                value = None
            if field in TEXT_IDS and isinstance(value, str) and name == "prompt_id":
                value = normalized(value)
            if name == "round" and isinstance(value, str) and value.isdecimal():
                value = int(value)
            if name in NEEDED and value is None and (field is None or name != "reward") and (name != "policy" or field):
                raise DataError(f"{path}, row {number}: {_missing(name, row, field)}")
            if value is not None and not _fits(name, value):
                if name in ("x_text", "y_text"):  # a conversation: usable only where the task's prompts are known
                    value = None
                else:
                    raise DataError(
                        f"{path}, row {number}, field '{field}': found {repr(value)[:80]}, expected {_EXPECTED[name]}"
                    )
            columns.setdefault(name, []).append(str(value) if name == "prompt_id" and value is not None else value)
        columns.setdefault(ENVIRONMENT, []).append(_environment(row))
        numbers.append(number)
    present = {n: values for n, values in columns.items() if n in NEEDED[1:] or any(v is not None for v in values)}
    if not numbers:
        raise DataError(f"{path}: none of its rows is a rollout of the model in training")
    if None in present.get("policy", ()):
        number = numbers[present["policy"].index(None)]
        raise DataError(f"{path}, row {number}: no field 'policy' (or 'model'), which other rows have")
    kinds = {**TYPES, ENVIRONMENT: pa.string()}
    arrays = {name: _array(values, kinds[name], path, name, numbers) for name, values in present.items()}
    if dump:
        arrays["step"] = arrays["round"]
    _say_errored(path, lost, len(numbers))
    return pa.table({**arrays, "line": pa.array(numbers, pa.int64())}, metadata={"id": id_field})


def _environment(row: Row) -> str | None:
    """Return what an id of the row is counted in: the values of all columns that tell its environment; None for an id
    that identifies a prompt by itself."""
    found = [value for name in ENVIRONMENTS if isinstance(value := row.get(name), str) and value]
    return "/".join(dict.fromkeys(found)) if _id_field(row) in COUNTED_IDS and found else None


def _id_field(names: Collection[str]) -> str:
    """Return the column with the ids of prompts."""
    return next((alias for alias in ALIASES["prompt_id"] if alias in names), "")


def _value(column: str, text: object) -> object:
    """Return a value of a file without types: none for an empty one, and a number, truth value or list as JSON writes
    it, except in columns of texts."""
    if not text or not isinstance(text, str):
        return None
    if any(column in (name, *ALIASES.get(name, ())) for name, kind in TYPES.items() if kind == pa.string()):
        return text
    try:
        value: object = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
    return value


def _missing(name: str, row: Row, field: str | None) -> str:
    if field is not None:
        return f"field '{field}' is null, expected {_EXPECTED[name]}"
    fields = ", ".join(sorted(row)[:12])[:200] or "none"
    other = f" (or '{ALIASES[name][1]}')" if name in ALIASES else ""
    return f"no field '{name}'{other} (found: {fields}); each rollout needs a prompt id and a reward"


_EXPECTED = {
    "policy": "a string",
    "round": "a non-negative integer",
    "prompt_id": "a string or an integer",
    "rollout": "a non-negative integer",
    "reward": "a number",
    "ended": "true or false",
    "task": "a string",
    "group": "a string",
    "x_text": "a string",
    "y_text": "a string",
    "tokens": "a non-negative integer",
    "token_ids": "a list of non-negative integers",
    "logprobs": "a list of numbers",
}


def _fits(name: str, value: Any) -> bool:
    if name in ("token_ids", "logprobs"):
        kinds: tuple[type, ...] = (int,) if name == "token_ids" else (int, float)
        fits = isinstance(value, list) and all(isinstance(v, kinds) and not isinstance(v, bool) for v in value)
        return fits and (name == "logprobs" or min(value, default=0) >= 0)
    if name == "reward":
        return isinstance(value, int | float)
    if name == "ended":
        return isinstance(value, bool)
    if name in ("round", "rollout", "tokens"):
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, str) or (name == "prompt_id" and type(value) is int)


def _array(values: Sequence[object], kind: pa.DataType, path: Path, name: str, numbers: list[int]) -> pa.Array:
    try:
        return _typed(values, kind)
    except _CONVERSION_ERRORS as error:
        for number, value in zip(numbers, values, strict=True):
            try:
                _typed([value], kind)
            except _CONVERSION_ERRORS:
                raise DataError(f"{path}, row {number}, field '{name}': {str(error)[:200]}") from None
        raise


_CONVERSION_ERRORS = (pa.ArrowException, UnicodeEncodeError, OverflowError)


def _typed(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if kind == pa.float64():
        values = [None if value is None else float(value) for value in values]
    return pa.array(values, kind)


def _parquet(path: Path, reward: str | None) -> pa.Table:
    table = read_table(path)
    if not len(table):
        raise DataError(f"{path}: the file has no rows")
    columns: dict[str, pa.ChunkedArray] = {}
    numeric = [field.name for field in table.schema if _is_number(field.type)]
    for name, kind in TYPES.items():
        field = _field(name, table.column_names, reward, numeric, path)
        if field is None:
            if name in NEEDED and name != "policy":
                raise DataError(f"{path}, row 1: {_missing(name, dict.fromkeys(table.column_names), None)}")
            continue
        column = table.column(field)
        if name == "prompt_id" and field in TEXT_IDS and pa.types.is_string(column.type):
            ids = [None if value is None else normalized(value) for value in column.to_pylist()]
            column = pa.chunked_array([ids], pa.string())
        if name in TEXTS and pa.types.is_list(column.type):
            texts = [_of_messages(name, value) for value in column.to_pylist()]
            column = pa.chunked_array([[text if isinstance(text, str) else None for text in texts]], pa.string())
        if name in NEEDED and name != "reward" and column.null_count:
            row = int(np.flatnonzero(np.asarray(column.is_null()))[0]) + 1
            raise DataError(f"{path}, row {row}: field '{field}' is null, expected {_EXPECTED[name]}")
        try:
            if name == "reward" and not _is_number(column.type):
                raise pa.ArrowInvalid(f"{column.type}")
            columns[name] = column.cast(kind)
        except pa.ArrowException:
            if name in ("x_text", "y_text"):
                continue
            raise DataError(
                f"{path}, field '{field}': found a column of {column.type}, expected {_EXPECTED[name]} in each row"
            ) from None
    if is_dump(table.column_names):
        columns["step"] = columns["round"]
    kept = [name for name in (ERROR, STOPPED) if name in table.column_names]
    if kept:
        lost = pa.array([errored(row) for row in table.select(kept).to_pylist()])
        columns["reward"] = pa.chunked_array([pa.compute.if_else(lost, None, columns["reward"].combine_chunks())])
        _say_errored(path, int(pa.compute.sum(lost).as_py() or 0), len(table))
    columns["line"] = pa.array(np.arange(1, len(table) + 1))
    return pa.table(columns, metadata={"id": _id_field(table.column_names)})


def _say_errored(path: Path, count: int, rows: int) -> None:
    if count:
        notify(f"{path.name}: {count:,} of {rows:,} rollouts were ended by an error and have no reward")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind))


def _names(files: Sequence[Path], tables: Sequence[pa.Table]) -> list[str]:
    """Return the policy of each file that names none: the file's stem; of TRL's dumps, of which there is one per step,
    their trainer's directory, with its parent's name where two are called alike. Raises DataError where that does not
    tell them apart."""
    directories: dict[Path, Path] = {}
    for file, table in zip(files, tables, strict=True):
        if "step" in table.column_names and "policy" not in table.column_names:
            parent = file.resolve().parent
            step = next((each for each in parent.parents if STEP_DIRECTORY.fullmatch(each.name)), parent)
            parent = step.parent if STEP_DIRECTORY.fullmatch(step.name) else parent
            directories[file] = parent.parent if parent.name in ("completions", "rollouts") else parent
    trainers = set(directories.values())
    labels: dict[Path, str] = {}
    for trainer in trainers:
        alike = sum(other.name == trainer.name for other in trainers) > 1
        labels[trainer] = f"{trainer.parent.name}/{trainer.name}" if alike else trainer.name
    if len(set(labels.values())) < len(labels):
        raise DataError(f"several dumps would be {min(labels.values())!r}: add a column 'policy' to them")
    return [labels[directories[file]] if file in directories else file.stem for file in files]


def _last_steps(table: pa.Table) -> pa.Table:
    """Return the last rounds as one: a dump of a training run has a prompt at several steps, which another model's
    steps do not match."""
    last = last_rounds(table)
    return _set_column(last, "round", _zeros(len(last)))


def last_rounds(table: pa.Table) -> pa.Table:
    """Return the rows of each model's last round with each prompt."""
    last: dict[tuple[str, str], int] = {}
    keys = list(zip(*(table[name].to_pylist() for name in ("policy", "prompt_id", "round")), strict=True))
    for policy, prompt_id, number in keys:
        last[policy, prompt_id] = max(number, last.get((policy, prompt_id), number))
    return table.filter(pa.array([number == last[policy, prompt_id] for policy, prompt_id, number in keys]))
