"""Any data set with `prompt` and `answer` columns: JSON Lines, CSV, Parquet, or a directory of Hugging Face `datasets`.

`prompt` is a text or a conversation (a list of messages with `role` and `content`); `answer` is the canonical label, or
what the reward function expects. Other columns reach the reward function as they are (of a CSV file: as text); a text
column `group` names what accuracy is reported by. Without a validation file, one row in 16 is held out.
"""

from __future__ import annotations

import csv
import hashlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from mutualrl.errors import DataError
from mutualrl.records import Prompt, prompt_id
from mutualrl.tasks.base import Split, TaskSource, read_jsonl, unicode_text

HELD_OUT_SHARE = 16
ROLES = ("system", "user", "assistant", "tool", "developer")
#: names that TRL gives to what it passes to a reward function, or reads from a row itself.
RESERVED = frozenset(
    ("prompts", "completions", "completion", "completion_ids", "image", "images", "tools", "environment")
) | {"environments", "trainer_state", "log_extra", "log_metric", "chat_template_kwargs"}
_OURS = ("prompt", "answer", "group", "prompt_id")


class DatasetTask:
    """Prompts and answers from a file; scored by exact match of the boxed answer unless `task.reward` is set."""

    name = "dataset"

    def load(self, split: Split, source: TaskSource) -> list[Prompt]:
        """Prompts of `split`: from the validation file where one is named, else the held-out share."""
        path = source.data if split == "train" or source.validation_data is None else source.validation_data
        if path is None:
            raise DataError("task 'dataset' needs data: add --data FILE with columns 'prompt' and 'answer'")
        if source.validation_data is not None:
            return list(read_prompts(path, split))
        return [p for p in read_prompts(path, "train") if _held_out(p.text) == (split == "validation")]


def _held_out(text: str) -> bool:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[0] % HELD_OUT_SHARE == 0


@cache
def read_prompts(path: Path, split: str) -> tuple[Prompt, ...]:
    """The rows of a data set as prompts, in order. Raises DataError naming file, row and field."""
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, row in _rows(path):
        if taken := sorted(RESERVED & set(row)):
            raise DataError(f"{path}, row {number}: column {taken[0]!r} has a meaning of its own in TRL; rename it")
        for field in ("prompt", "answer"):
            if row.get(field) is None:
                found = ", ".join(sorted(map(str, row))[:12])[:200] or "none"
                raise DataError(f"{path}, row {number}: no field '{field}' (found: {found})")
        text, messages = _prompt(row["prompt"], path, number)
        answer = row["answer"]
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise DataError(f"{path}, row {number}, field 'answer': found {type(answer).__name__}, expected a text")
        if str(answer) == "":
            raise DataError(f"{path}, row {number}, field 'answer': is empty; an empty box would count as a success")
        prompts.append(
            Prompt(
                id=str(row.get("prompt_id") or prompt_id("dataset", split, number, text)),
                text=text,
                answer=unicode_text(str(answer), "answer", path, number),
                group=unicode_text(str(row.get("group") or "all"), "group", path, number),
                messages=messages,
                columns={str(key): value for key, value in row.items() if key not in _OURS},
            )
        )
        if (first := seen.setdefault(prompts[-1].id, number)) != number:
            raise DataError(f"{path}, rows {first} and {number} have the same prompt_id {prompts[-1].id!r}")
    if not prompts:
        raise DataError(f"{path}: the data set has no rows")
    return tuple(prompts)


def _prompt(value: Any, path: Path, number: int) -> tuple[str, tuple[tuple[str, str], ...]]:
    """The text of a prompt, and its messages where it is a conversation."""
    where = f"{path}, row {number}, field 'prompt'"
    if isinstance(value, str):
        if not value.strip():
            raise DataError(f"{where}: is empty, expected a text or a list of messages")
        return unicode_text(value, "prompt", path, number), ()
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: found {type(value).__name__}, expected a text or a list of messages")
    messages = []
    for message in value:
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        if role not in ROLES or not isinstance(content, str):
            raise DataError(
                f"{where}: found message {repr(message)[:80]}, expected a 'role' of {', '.join(ROLES)} and a "
                "text 'content'"
            )
        messages.append((role, unicode_text(content, "prompt", path, number)))
    return "\n".join(content for _, content in messages), tuple(messages)


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """(row number from 1, row) of a file by its suffix, or of a directory that `datasets` reads."""
    suffix = path.suffix.lower()
    if not path.is_dir() and suffix not in (".csv", ".parquet"):
        yield from read_jsonl(path)
        return
    if not path.exists():
        raise DataError(f"data file not found: {path} (expected .jsonl, .csv, .parquet, or a directory of `datasets`)")
    if suffix == ".csv":  # by hand: any guess at types would turn the label 3 into 3.0, and 007 into 7
        with path.open(encoding="utf-8", newline="") as file:
            yield from enumerate(csv.DictReader(file), 1)
        return
    from datasets import load_dataset, load_from_disk
    from datasets.exceptions import DatasetGenerationError

    try:
        if path.is_dir():
            saved = (path / "state.json").is_file() or (path / "dataset_dict.json").is_file()
            data = load_from_disk(str(path)) if saved else load_dataset(str(path), split="train")
        else:
            data = load_dataset("parquet", data_files=str(path), split="train")
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise DataError(f"{path}: cannot be read as a data set ({error})") from error
    if isinstance(data, dict):
        raise DataError(f"{path}: holds the splits {', '.join(data)}; name the directory of one of them")
    for number, row in enumerate(data, 1):
        yield number, dict(row)
