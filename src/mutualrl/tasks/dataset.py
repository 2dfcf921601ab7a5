"""Any data set with `prompt` and `answer` columns: JSON Lines, CSV, TSV, Parquet, or a directory of Hugging Face
`datasets`.

`prompt` is a string or a conversation (a list of messages with `role` and `content`). `answer` is the canonical label:
a string, a number, a truth value, a list or an object; the reward function receives it as it is, and `boxed` compares
its text (`answer_text`). Other columns are passed to the reward function unchanged (from CSV and TSV: as strings);
accuracy is reported by the column `group`, and a string column `solution` is a correct completion (of a source,
`recorded: task`). Without a validation file, one row in 16 is held out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from mutualrl.errors import DataError
from mutualrl.records import Prompt, prompt_id
from mutualrl.references import is_hub
from mutualrl.tasks.base import PAPER_TOKENS, Row, Split, TaskData, TaskSource, held_out, unicode_text
from mutualrl.tasks.boxed import answer_text
from mutualrl.tasks.hub_data import hub_rows, parse_reference
from mutualrl.tasks.rows import DatasetRow, read_rows, version_of
from mutualrl.tasks.template import fields_of, fill

ROLES = ("system", "user", "assistant", "tool", "developer")
#: names of arguments that TRL passes to a reward function, or of columns that it reads itself.
RESERVED = frozenset(
    ("prompts", "completions", "completion", "completion_ids", "image", "images", "tools", "environment")
) | {"environments", "trainer_state", "log_extra", "log_metric", "chat_template_kwargs"}
_OURS = ("prompt", "answer", "group", "prompt_id")


class DatasetTask:
    """Prompts and answers from a data set; scored by exact match of the boxed answer unless `task.reward` is set."""

    name = "dataset"
    max_new_tokens = PAPER_TOKENS
    takes_data = True
    reads = "the value of --data: a file, a directory, or hub:OWNER/NAME[:CONFIG[:SPLIT]]"

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return the prompts of `split`; without validation data, a fraction of the training rows is held out."""
        path = source.data if split == "train" or source.validation_data is None else source.validation_data
        if path is None:
            raise DataError("task 'dataset' needs data: add --data FILE with columns 'prompt' and 'answer'")
        origin = str(path) if is_hub(path) else path.name
        if source.validation_data is not None:
            return TaskData(list(read_prompts(path, split, source.template, source.answer)), origin)
        prompts = read_prompts(path, "train", source.template, source.answer)
        validation = split == "validation"
        kept = [p for p, held in zip(prompts, held_out(prompts, source.hold_out), strict=True) if held == validation]
        return TaskData(kept, f"held-out rows of {origin}" if validation else origin, held_out=validation)


def first_row(path: Path) -> Row:
    """Return the first row of a data set in a file or a directory. Raises DataError."""
    return next(iter(read_rows(path)))[1]


def read_prompts(path: Path, split: str, template: str | None = None, answer: str = "answer") -> tuple[Prompt, ...]:
    """Return the rows of a data set as prompts, in order. With a template, the prompt is built from the row's fields,
    and the field `answer` is the answer. Raises DataError naming file, row and field."""
    return _read_prompts(path, split, template, answer, version_of(path))


@cache
def _read_prompts(
    path: Path, split: str, template: str | None, answer: str, version: tuple[object, ...]
) -> tuple[Prompt, ...]:
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    rows = hub_rows(parse_reference(path), split) if is_hub(path) else read_rows(path, split)
    for number, values in rows:
        row = _filled(DatasetRow(values, str(path), number), template, answer)
        if reserved := sorted(RESERVED & set(row.values)):
            raise DataError(f"{path}, row {number}: column {reserved[0]!r} is reserved by TRL; rename it")
        _require_fields(row)
        text, messages = _prompt(row.present("prompt"), path, number)
        label = row.present("answer")
        written = unicode_text(_label_text(label, row), "answer", path, number)
        if not written.strip():
            raise DataError(f"{path}, row {number}, field 'answer': is blank; an empty box would count as correct")
        group, solution = row.values.get("group"), row.values.get("solution")
        columns = {str(key): value for key, value in row.values.items() if key not in _OURS}
        columns |= {
            key: value
            for key, value in (("answer", label), ("group", group))
            if value is not None and not isinstance(value, str)
        }
        prompts.append(
            Prompt(
                id=row.label("prompt_id") or prompt_id("dataset", split, number, text),
                text=text,
                answer=written,
                group=row.label("group") or "all",
                messages=messages,
                columns=columns,
                solution=unicode_text(solution, "solution", path, number)
                if isinstance(solution, str) and solution.strip()
                else None,
            )
        )
        if (first := seen.setdefault(prompts[-1].id, number)) != number:
            raise DataError(f"{path}, rows {first} and {number} have the same prompt_id {prompts[-1].id!r}")
    if not prompts:
        raise DataError(f"{path}: the data set has no rows")
    return tuple(prompts)


def _require_fields(row: DatasetRow) -> None:
    """Raise DataError for a row without prompt or answer, with the key that names another field."""
    hints = {
        "prompt": ("task.template={FIELD}", "--template {FIELD}"),
        "answer": ("task.answer=FIELD", "--answer FIELD"),
    }
    if lacking := {field: hint for field, hint in hints.items() if field not in row.values}:
        settings, options = zip(*lacking.values(), strict=True)
        has = "another field has it" if len(lacking) == 1 else "others have them"
        raise DataError(
            f"{row.lacks(list(lacking))}; if {has}: --set {' --set '.join(settings)} (tasks show: {' '.join(options)})"
        )


def _label_text(label: object, row: DatasetRow) -> str:
    try:
        return answer_text(label)
    except (TypeError, ValueError):
        row.refuse("answer", label, "a string, a number, true or false, a list or an object")


def column_notes(prompts: Sequence[Prompt]) -> list[str]:
    """Return notes about columns whose values have several types: the reward function receives each value as it is."""
    kinds: dict[str, Counter[str]] = {}
    for prompt in prompts:
        for key, value in {"answer": prompt.answer, **prompt.columns}.items():
            kinds.setdefault(key, Counter())[type(value).__name__] += value is not None
    notes = []
    for key, counts in kinds.items():
        if len(present := +counts) > 1:
            listed = ", ".join(f"{kind} in {count} rows" for kind, count in sorted(present.items()))
            notes.append(f"data column {key!r} has values of several types ({listed}); the reward function gets each")
    return notes


def boxed_notes(prompts: Sequence[Prompt]) -> list[str]:
    """Return notes about answers that a box can hardly contain: several lines, or floats that were integers."""
    notes = []
    lines = [prompt for prompt in prompts if "\n" in prompt.answer.strip()]
    if lines:
        notes.append(
            f"{len(lines)} of {len(prompts)} answers have several lines, such as {lines[0].answer[:60]!r}: the whole "
            "text must be in the box; was a solution meant? (task.answer=FIELD, or a task.reward of your own)"
        )
    floats = [value for p in prompts if isinstance(value := p.columns.get("answer"), float)]
    if floats and all(value.is_integer() for value in floats):
        notes.append(
            f"all {len(floats)} answers that are floats are whole numbers, such as {floats[0]!r}, and only that text "
            "in the box is correct; were they integers? (pandas makes floats of a column with missing values)"
        )
    return notes


def _prompt(value: object, path: Path, number: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return the text of a prompt, and its messages if it is a conversation."""
    where = f"{path}, row {number}, field 'prompt'"
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: is empty, expected a string or a list of messages")
        return unicode_text(value, "prompt", path, number), ()
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: found {type(value).__name__}, expected a string or a list of messages")
    messages = []
    for message in value:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise DataError(
                f"{where}: found message {repr(message)[:80]}, expected a 'role' of {', '.join(ROLES)} and a "
                "string 'content'"
            )
        messages.append((role, unicode_text(content, "prompt", path, number)))
    return "\n".join(content for _, content in messages), tuple(messages)


def _filled(row: DatasetRow, template: str | None, answer: str) -> DatasetRow:
    """Return the row with `prompt` and `answer`, built from its fields if a template or an answer field is given."""
    values = dict(row.values)
    named = [*(fields_of(template) if template is not None else ()), *([answer] if answer != "answer" else [])]
    lacking = [name for name in dict.fromkeys(named) if not {name, name.partition(".")[0]} & row.values.keys()]
    if lacking:
        raise DataError(row.lacks(lacking))
    if answer != "answer":
        values["answer"] = row.take(answer)
    if template is not None:
        values["prompt"] = fill(template, {name: _field_text(row, name) for name in fields_of(template)})
    return DatasetRow(values, row.where, row.number)


def _field_text(row: DatasetRow, name: str) -> str:
    """Return a field as prompt text: a string unchanged, a number as written, a list of strings as options."""
    value = row.take(name)
    if isinstance(value, list):
        texts = row.texts(name, value)
        return "\n".join(f"{chr(ord('A') + place)}. {text}" for place, text in enumerate(texts))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        row.refuse(name, value, "a string, a number, or a list of strings")
    return unicode_text(str(value), name, Path(row.where), row.number)
