"""Read rollouts from JSON Lines or Parquet files: of an evaluation, of `exchange export`, or the user's own."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mutualrl.console.lines import notify
from mutualrl.console.user_path import user_path
from mutualrl.errors import DataError
from mutualrl.rollouts import SCHEMA, widest
from mutualrl.sources.layouts import find_layout, reward_of
from mutualrl.sources.prepare import malformed_note
from mutualrl.sources.section import Columns
from mutualrl.storage.parquet import read_table
from mutualrl.tasks.base import Row, normalized
from mutualrl.tasks.columns import COLUMNS, IDS, PROMPTS
from mutualrl.tasks.files import EXPECTED, FORMATS, columns_of, data_files, file_rows, format_of, suffix_of
from mutualrl.tasks.run_reader import CONVERSATIONS, is_conversation, trajectory_of

#: types of the columns that are read, the widest of their kind: a user's numbers are not rounded
TYPES: dict[str, pa.DataType] = {
    name: pa.string() if name in ("task", "group") else widest(SCHEMA.field(name).type) for name in COLUMNS
}
#: columns of dumps of training runs, one file per step: TRL's `log_completions`, with one more column per reward
#: function, and verl's
TRL, VERL = frozenset({"step", "prompt", "completion"}), frozenset({"step", "input", "output"})
#: columns that tell the environment of a prompt: ids are counted anew in each of them
ENVIRONMENTS = ("env_name", "env_id", "environment", "task_name", "data_source", "task", "dataset")
#: columns of ids that may be counted so; ours, and the texts of prompts, identify a prompt by themselves
COUNTED_IDS = IDS[1:]
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


@dataclass
class _Rows:
    """The rows of a file as they are. `fields`, `values`: by column of COLUMNS the field in which each row has it, and
    what is there. `errors`: which rollouts an error ended. `environments`: what an id is counted in."""

    numbers: Sequence[int]
    fields: Mapping[str, Sequence[str | None]]
    values: Mapping[str, Sequence[object] | pa.ChunkedArray]
    errors: Sequence[bool]
    environments: Sequence[str | None]
    is_dump: bool


def _table(path: Path, reward: str | None) -> pa.Table:
    """Return a file's rollouts, checked; of Parquet read by column, unless a row says more than each of its columns."""
    names = columns_of(path) if suffix_of(path) == ".parquet" else []
    runs = "y_text" not in names and any(is_conversation(name, names) for name in names)
    counted = COLUMNS["prompt_id"].find(names) in COUNTED_IDS and any(name in ENVIRONMENTS for name in names)
    by_row = not names or runs or counted or FILTER in names
    rows = _by_row(path, reward) if by_row else _by_column(path, reward)
    if not rows.numbers:
        raise DataError(f"{path}: none of its rows is a rollout of the model in training")
    if lost := sum(rows.errors):
        notify(f"{path.name}: {lost:,} of {len(rows.numbers):,} rollouts were ended by an error and have no reward")
    arrays = {name: _array(name, rows, path) for name in COLUMNS}
    present = {name: array for name, array in arrays.items() if COLUMNS[name].required or len(array) > array.null_count}
    if rows.is_dump:
        present["step"] = present["round"] = arrays["round"]
    present[ENVIRONMENT] = pa.array(rows.environments, pa.string())
    present["line"] = pa.array(rows.numbers, pa.int64())
    return pa.table(present, metadata={"id": rows.fields["prompt_id"][-1] or ""})


def _by_row(path: Path, reward: str | None) -> _Rows:
    """Return the rows of a file, each of which may have other fields."""
    fields: dict[str, list[str | None]] = {name: [] for name in COLUMNS}
    values: dict[str, list[object]] = {name: [] for name in COLUMNS}
    numbers, errors, environments = list[int](), list[bool](), list[str | None]()
    layouts: dict[tuple[str, ...], dict[str, str | None]] = {}
    for number, row in _rows(path):
        names = tuple(row)
        if names not in layouts or is_dump(names):  # in a dump, the values tell which column has the rewards
            numeric = [name for name, value in row.items() if isinstance(value, int | float)]
            layouts[names] = _layout(names, numeric, reward, path, number)
        for name, field in layouts[names].items():
            fields[name].append(field)
            values[name].append(None if field is None else row[field])
        told = [value for name in ENVIRONMENTS if isinstance(value := row.get(name), str) and value]
        counted = layouts[names]["prompt_id"] in COUNTED_IDS
        environments.append("/".join(dict.fromkeys(told)) if told and counted else None)
        errors.append(errored(row))
        numbers.append(number)
    return _Rows(numbers, fields, values, errors, environments, any(map(is_dump, layouts)))


def _by_column(path: Path, reward: str | None) -> _Rows:
    """Return the rows of a Parquet file, all of which have the same fields."""
    table = read_table(path)
    if not len(table):
        raise DataError(f"{path}: the file has no rows")
    names, nothing = table.column_names, [None] * len(table)
    numeric = [field.name for field in table.schema if _is_number(field.type)]
    layout = _layout(names, numeric, reward, path, 1)
    fields = {name: [field] * len(table) for name, field in layout.items()}
    values = {name: nothing if field is None else table[field] for name, field in layout.items()}
    errors = [False] * len(table)
    if kept := [name for name in (ERROR, STOPPED) if name in names]:
        errors = [errored(row) for row in table.select(kept).to_pylist()]
    return _Rows(range(1, len(table) + 1), fields, values, errors, nothing, is_dump(names))


def _fits(values: pa.ChunkedArray, kind: pa.DataType) -> bool:
    """Return whether the type of a column says that each of its values is of a kind: no value needs to be looked at."""
    if pa.types.is_list(kind):
        inner, whole = values.type.value_type if pa.types.is_list(values.type) else None, kind.value_type
        flat = pc.list_flatten(values) if inner is not None and _is_number(inner) else None
        return flat is not None and not flat.null_count and _fits(flat, whole)
    if pa.types.is_string(kind):
        return bool(pa.types.is_string(values.type) or pa.types.is_large_string(values.type))
    if pa.types.is_integer(kind):
        return bool(pa.types.is_integer(values.type)) and (pc.min(values).as_py() or 0) >= 0
    return bool(values.type == kind)


def _layout(
    names: Sequence[str], numeric: Collection[str], reward: str | None, path: Path, number: int
) -> dict[str, str | None]:
    """Return the field of each column of COLUMNS. Raises DataError if a required one has none."""
    layout = {name: _field(name, names, reward, numeric, path) for name in COLUMNS}
    for name, column in COLUMNS.items():
        if column.required and layout[name] is None:
            fields = ", ".join(sorted(names)[:12])[:200] or "none"
            other = f" (or '{column.names[1]}')" if len(column.names) > 1 else ""
            raise DataError(
                f"{path}, row {number}: no field '{name}'{other} (found: {fields}); each rollout needs a prompt id and "
                "a reward"
            )
    return layout


def _array(name: str, rows: _Rows, path: Path) -> pa.Array:
    """Return a column of which each value was checked. Raises DataError naming file, row and field."""
    column, values = COLUMNS[name], rows.values[name]
    if isinstance(values, pa.ChunkedArray):
        is_text_id = name == "prompt_id" and rows.fields[name][0] in PROMPTS
        is_missing = values.null_count and not column.nullable
        if _fits(values, TYPES[name]) and not (is_text_id or is_missing or any(rows.errors)):
            return values.cast(TYPES[name]).combine_chunks()
        values = values.to_pylist()
    checked: list[object] = []
    for number, field, value, error in zip(rows.numbers, rows.fields[name], values, rows.errors, strict=True):
        where = f"{path}, row {number}"
        if field is None or value is None or (error and name == "reward"):
            if field is not None and value is None and not column.nullable:
                raise DataError(f"{where}: field '{field}' is null, expected {column.expected}")
            checked.append(None)
            continue
        try:
            read = column.read(value)
            checked.append(normalized(str(read)) if name == "prompt_id" and field in PROMPTS else read)
        except (ValueError, OverflowError) as problem:
            if name in ("x_text", "y_text") and not isinstance(value, str):  # usable where the task's prompts are known
                checked.append(None)
                continue
            expected = "Unicode text" if isinstance(problem, UnicodeError) else column.expected
            raise DataError(f"{where}, field '{field}': found {repr(value)[:80]}, expected {expected}") from None
    if name == "policy" and None in checked and any(value is not None for value in checked):
        number = rows.numbers[checked.index(None)]
        raise DataError(f"{path}, row {number}: no field 'policy' (or 'model'), which other rows have")
    return pa.array(checked, TYPES[name])


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
        return COLUMNS[name].find(names)
    if reward is not None:
        if reward not in names:
            raise DataError(f"{path}: no column {reward!r} (--reward), found: {', '.join(sorted(names))[:200]}")
        return reward
    known = {*TRL, *VERL, "advantage", *(alias for column in COLUMNS.values() for alias in column.names)}
    functions = sorted(set(numeric) - known) if is_dump(names) else []
    if len(functions) > 1:
        raise DataError(
            f"{path}: found the columns {', '.join(functions)[:200]} beside TRL's; name the one with the reward: "
            f"--reward {functions[0]}"
        )
    return functions[0] if functions else None


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


def _value(column: str, text: object) -> object:
    """Return a value of a file without types: none for an empty one, and a number, truth value or list as JSON writes
    it, except in columns of texts."""
    if not text or not isinstance(text, str):
        return None
    if any(column in each.names for each in COLUMNS.values() if each.texts):
        return text
    try:
        value: object = json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text
    return value


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
