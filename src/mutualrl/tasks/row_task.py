"""Tasks whose prompts are rows of a public data set: read from the hub, a local file, or a directory of files."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from mutualrl.errors import DataError
from mutualrl.records import Prompt, prompt_id
from mutualrl.references import is_hub
from mutualrl.tasks.base import PAPER_TOKENS, NumberedRows, Split, TaskData, TaskSource, held_out
from mutualrl.tasks.files import data_files
from mutualrl.tasks.hub_data import HubSource, hub_rows, parse_reference
from mutualrl.tasks.rows import DatasetRow, read_rows, version_of

_SPLIT_WORDS = {
    "train": "train",
    "validation": "validation",
    "valid": "validation",
    "dev": "validation",
    "val": "validation",
    "test": "test",
}
_SPLIT = re.compile(r"(?:^|[._-])(" + "|".join(_SPLIT_WORDS) + r")(?=[._-]|$)", re.IGNORECASE)
DEPTH = 3  # of the directory search


@dataclass(frozen=True, slots=True)
class PromptFields:
    """Fields of a prompt built from a row: the prompt as the model sees it, the canonical answer, the group, further
    facets, and a worked solution if the row has one."""

    text: str
    answer: str
    group: str
    facets: Mapping[str, str] = field(default_factory=dict)
    solution: str | None = None


_ROW_TASKS: list[RowTask] = []  # all instances, for hints

#: maps a row and the name of its part to the prompt's fields, or to the reason why the row is dropped
Build = Callable[[DatasetRow, str], PromptFields | str]


@dataclass(frozen=True)
class RowTask:
    """Task over rows.

    `hub`: sources of its rows on the hub, one per part. `build`: the template. `fields`: required fields of a row.
    `files`: prefixes of its file names (lower case), one per part; in a directory named `folder` or one of `files`, a
    file needs no prefix unless there are several parts. `stand_in`: stem of a file to evaluate in a directory without
    another (results name the file)."""

    name: str
    hub: tuple[HubSource, ...]
    build: Build
    fields: tuple[str, ...]
    files: tuple[str, ...]
    folder: str
    stand_in: str = ""
    id_field: str = "id"
    max_new_tokens: int = PAPER_TOKENS
    takes_data: bool = True

    def __post_init__(self) -> None:
        """Register the task for hints about the task that a row's fields belong to."""
        _ROW_TASKS.append(self)

    @property
    def reads(self) -> str:
        """Return the hub data set and the split that is evaluated."""
        first = self.hub[0]
        return first.origin("validation")

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return the rows of a split as prompts. Without validation data, a fixed fraction of the training rows is
        held out, unless they are from the hub, or from a directory with an evaluation split. Raises DataError."""
        location = source.data if split == "train" or source.validation_data is None else source.validation_data
        if location is None:
            origin = "; ".join(dict.fromkeys(part.origin(split) for part in self.hub))
            return _prompts(self, self.hub, split, origin, ())
        complete = source.validation_data is not None
        if is_hub(location):
            parts: tuple[HubSource | Path, ...] = (parse_reference(location, evaluated=self.hub[0].evaluated),)
        elif location.is_dir():
            parts, complete = self._of_directory(location, split)
        else:
            parts = (location,)
        origin = ", ".join(part.name if isinstance(part, Path) else part.origin(split) for part in parts)
        versions = tuple(version_of(part) for part in parts if isinstance(part, Path))
        data = _prompts(self, parts, split if complete else "train", origin, versions)
        if complete:
            return data
        validation = split == "validation"
        held = held_out(data.prompts, source.hold_out)
        prompts = [prompt for prompt, out in zip(data.prompts, held, strict=True) if out == validation]
        label = f"held-out rows of {origin}" if validation else origin
        return TaskData(prompts, label, data.dropped, held_out=validation)

    def _of_directory(self, directory: Path, split: Split) -> tuple[tuple[Path, ...], bool]:
        """Return the files of a split in a directory, and whether all their rows belong to the split: without an
        evaluation split, a fraction of the training rows is held out. Raises DataError if there are no files."""
        evaluated = tuple(self._split_files(directory, "validation"))
        if split == "validation" and evaluated:
            return evaluated, True
        if train := tuple(self._split_files(directory, "train")):
            return train, bool(evaluated)
        raise DataError(self._no_file_message(directory, split))

    def _split_files(self, directory: Path, split: Split) -> list[Path]:
        """Return a split's files in a directory; validation: the evaluated split, else another with labels."""
        splits = ["train"] if split == "train" else [self.hub[0].evaluated, "validation", "test", ""]
        files = [(path, part) for path in data_files(directory, DEPTH) if (part := self._part(path)) is not None]
        for name in splits:
            of_split = [(path, part) for path, part in files if split_of(path) == name]
            if of_split:
                return self._all_parts(of_split, directory, name)
        if split == "validation" and self.stand_in:
            others = [(path, 0) for path in data_files(directory, DEPTH) if path.stem.lower() == self.stand_in]
            return self._all_parts(others, directory, self.stand_in) if others else []
        return []

    def _all_parts(self, files: list[tuple[Path, int]], directory: Path, split: str) -> list[Path]:
        present = {number for _, number in files}
        missing = [name for number, name in enumerate(self.files) if len(self.files) > 1 and number not in present]
        if missing:
            names = ", ".join(path.name for path, _ in files)
            raise DataError(
                f"{directory}: task {self.name!r} needs {' and '.join(self.files)} ({split}); found {names}, not "
                f"{', '.join(missing)}: add it, or use task {self.files[min(present)]!r}"
            )
        if len(files) > max(1, len(self.files)):
            names = ", ".join(str(path.relative_to(directory)) for path, _ in files)
            raise DataError(f"{directory}: several files could be task {self.name!r} ({names}); name one with --data")
        return [path for path, _ in sorted(files, key=lambda item: item[1])]

    def _part(self, path: Path) -> int | None:
        """Return the number of a file's part of the task; None if the file does not belong to it."""
        stem = path.stem.lower()
        for number, prefix in enumerate(self.files):
            if re.match(re.escape(prefix) + r"(?![a-z0-9])", stem):
                return number
        in_folder = len(self.files) == 1 and path.parent.name.lower() in (self.folder, *self.files)
        return 0 if in_folder and split_of(path) else None

    def _no_file_message(self, directory: Path, split: str) -> str:
        wanted = "train" if split == "train" else self.hub[0].evaluated
        examples = ", ".join(f"{self.folder}/{name}.{wanted}.jsonl" for name in self.files)
        return f"{directory}: no file of task {self.name!r} for the {wanted} split; expected {examples}"


def split_of(path: Path) -> str:
    """Return the split in a file's name; empty if there is none."""
    match = _SPLIT.search(path.stem)
    return _SPLIT_WORDS[match[1].lower()] if match else ""


@cache
def _prompts(
    task: RowTask,
    parts: tuple[HubSource | Path, ...],
    split: Split,
    origin: str,
    versions: tuple[object, ...],
) -> TaskData:
    """Return all rows of the parts as prompts; `versions` of their files are a cache key. Raises DataError for an
    invalid row."""
    prompts: list[Prompt] = []
    dropped: list[str] = []
    seen: dict[str, str] = {}
    for part in parts:
        where, rows, label = _open(part, split)
        for number, values in rows:
            row = DatasetRow(values, where, number)
            _check_fields(task, row)
            built = task.build(row, label)
            if isinstance(built, str):
                dropped.append(f"{where}, row {number}: {built}")
                continue
            row_id = row.label(task.id_field) or str(number)
            prompt = Prompt(
                prompt_id(task.name, split, row_id, built.text),
                built.text,
                built.answer,
                built.group,
                facets=built.facets,
                solution=built.solution,
            )
            if prompt.id in seen:
                raise DataError(f"{where}, row {number}: the same prompt and {task.id_field} as {seen[prompt.id]}")
            seen[prompt.id] = f"row {number}"
            prompts.append(prompt)
    if not prompts:
        raise DataError(f"{origin}: no row has an answer" if dropped else f"{origin}: the data set has no rows")
    return TaskData(prompts, origin, tuple(dropped))


def _open(part: HubSource | Path, split: Split) -> tuple[str, NumberedRows, str]:
    if isinstance(part, Path):
        return str(part), read_rows(part), part.stem
    return part.origin(split), hub_rows(part, split), part.part or part.config or ""


def _check_fields(task: RowTask, row: DatasetRow) -> None:
    """Raise DataError for a missing field, with a hint at the task that has the row's fields, if any."""
    missing = [name for name in task.fields if name not in row.values]
    if not missing:
        return
    matching = [other for other in _ROW_TASKS if set(other.fields) <= set(row.values)]
    others = [other.name for other in sorted(matching, key=lambda other: -len(other.fields))]
    try:
        row.take(missing[0])
    except DataError as error:
        hint = f"; these are the fields of task {others[0]!r}" if others else ""
        raise DataError(f"{error}{hint}") from None
