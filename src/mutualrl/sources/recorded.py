"""Reader of recorded texts: files, directories of files, data sets on the hub, a run's exchange, the task's own
solutions. Rows are read one after another; only texts of the task's prompts are kept."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mutualrl.console.display import clean
from mutualrl.errors import DataError
from mutualrl.records import Prompt
from mutualrl.references import TINY, is_hub
from mutualrl.see.inspection import tables, writers
from mutualrl.see.location import record_store
from mutualrl.sources.layouts import (
    SINGLE,
    Layout,
    RecordedRow,
    RecordedText,
    conversation_texts,
    find_layout,
    read_row,
)
from mutualrl.sources.matching import PromptIndex
from mutualrl.sources.section import TASK, Columns, Reasoning
from mutualrl.storage.files import try_stat
from mutualrl.storage.rundir import RunDirectory
from mutualrl.tasks.base import NumberedRows
from mutualrl.tasks.files import FORMATS, data_files, file_rows
from mutualrl.tasks.hub_data import hub_rows, parse_reference
from mutualrl.tasks.rows import DatasetRow, read_rows
from mutualrl.tasks.run_reader import CONVERSATIONS
from mutualrl.trajectory import Trajectory


@dataclass
class MatchedTexts:
    """Distinct texts of each prompt, ordered by the sha256 of the text, and counts of what was read.

    `layout`: what was read, in words. `counts`: `rows`; `matched`, rows of one of the prompts; `duplicates`, texts that
    a prompt had already; `cut_off`, `rejected` (by `columns.verdict`), `too_long` to be read, `empty`, and texts of
    `several_turns`, with `calls` of tools or `parts` that are no text: these are left out. `malformed`: conversations
    that are no run, by their problem. `validation`: validation prompts with a text, which is left out.
    `examples`: a prompt of the file, for messages. `skipped`: files of a directory without recorded texts.
    """

    layout: str = ""
    texts: dict[str, dict[str, RecordedText]] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    malformed: Counter[str] = field(default_factory=Counter)
    validation: set[str] = field(default_factory=set)
    examples: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def add(self, prompt_ids: Sequence[str], responses: Sequence[RecordedText]) -> None:
        """Add the responses of a row to its prompts. A text that was cut off is no success, whatever its reward."""
        for response in responses:
            if response.cut or response.rejected:
                self.counts["cut_off" if response.cut else "rejected"] += 1
                continue
            key = hashlib.sha256((response.trajectory.stored or response.trajectory.text).encode()).hexdigest()
            for prompt_id in prompt_ids:
                known = self.texts.setdefault(prompt_id, {})
                self.counts["duplicates"] += key in known
                known[key] = response

    def responses(self, most: int | None = None) -> Iterator[tuple[str, RecordedText]]:
        """Yield (prompt id, response), those of a prompt in the order of their hashes, at most `most` of them."""
        for prompt_id in sorted(self.texts):
            ordered = sorted(self.texts[prompt_id].items(), key=lambda entry: entry[0])
            self.counts["over_limit"] += len(ordered[most:]) if most is not None else 0
            for _, response in ordered[:most]:
                yield prompt_id, response

    def in_order(self, most: int | None = None) -> Iterator[tuple[str, str]]:
        """Yield (prompt id, text), as `responses` does."""
        for prompt_id, response in self.responses(most):
            yield prompt_id, response.trajectory.text


def read_recorded(
    reference: str,
    columns: Columns,
    reasoning: Reasoning,
    prompts: Sequence[Prompt],
    validation: Sequence[Prompt],
    rendered: Sequence[Sequence[str]] = (),
    *,
    turns: bool = False,
) -> MatchedTexts:
    """Return the texts that a recorded file has for the prompts; with `turns`, also the runs of agents.

    `rendered`: the prompts' texts as policies' tokenizers write them, one list per tokenizer. Raises DataError naming
    file, row and column; for a file without a text for any prompt, with a prompt of each side.
    """
    if reference == TASK:
        return _of_task(columns, prompts)
    found = MatchedTexts()
    index, held = PromptIndex(prompts, rendered), PromptIndex(validation)
    for where, layout, rows in _readable(reference, columns, found):
        found.layout = found.layout or layout.describe()
        for number, values in rows:
            found.counts["rows"] += 1
            _add(found, read_row(DatasetRow(values, where, number), layout, reasoning, turns=turns), index, held)
    if not found.counts["rows"]:
        raise DataError(f"{reference}: has no rows")
    if not found.counts["matched"] and not found.validation:
        raise DataError(_no_match(reference, found, prompts))
    return found


def _add(found: MatchedTexts, row: RecordedRow, index: PromptIndex, held: PromptIndex) -> None:
    if not found.examples and row.prompts:
        found.examples.append(row.prompts[0])
    held_out = [prompt_id for text in row.prompts if not index.of_text(text) for prompt_id in held.of_text(text)]
    matched = [] if held_out else index.find(row)
    if not matched:
        found.validation.update((held_out or held.find(row)) if row.responses else ())
        return
    found.counts["matched"] += 1
    for reason, number in row.skipped.items():
        found.counts[reason] += number
    found.malformed.update(row.malformed)
    found.add(matched, row.responses)


def _of_task(columns: Columns, prompts: Sequence[Prompt]) -> MatchedTexts:
    """Return the solutions in the task's own data: `Prompt.solution`, or the columns that the user named."""
    names = columns.text or ("solution",)
    found = MatchedTexts(f"texts from {', '.join(map(repr, names))} of the task's data")
    for prompt in prompts:
        found.counts["rows"] += 1
        for name in names:
            text = prompt.solution if name == "solution" else prompt.columns.get(name)
            if isinstance(text, str) and text.strip():
                found.counts["matched"] += 1
                found.add([prompt.id], [RecordedText(Trajectory.of_text(text))])
    if not found.counts["matched"]:
        raise DataError(
            f"none of the {len(prompts)} training prompts has a text in the column {' or '.join(map(repr, names))}; "
            "expected rows with a solution (tasks math and dataset: field 'solution'), or another column: --set "
            "sources.NAME.columns.text=COLUMN"
        )
    return found


def _no_match(reference: str, found: MatchedTexts, prompts: Sequence[Prompt]) -> str:
    theirs = _shown(found.examples[0]) if found.examples else "(no prompt text)"
    return (
        f"{reference}: none of its {found.counts['rows']:,} rows is of a training prompt ({found.layout}). A prompt of "
        f"the file: {theirs}; of the task: {_shown(prompts[0].text)} (id {_shown(prompts[0].id)}). Prompts are matched "
        "by id, else by text; other columns: --set sources.NAME.columns.prompt=COLUMN or sources.NAME.columns.id=COLUMN"
    )


def _shown(text: str) -> str:
    shown = clean(" ".join(text.split()))
    return repr(shown if len(shown) <= 160 else f"{shown[:157]}...")


# ---- rows of a reference


def require_exists(reference: str) -> None:
    """Raise DataError for a file or directory of recorded texts that does not exist. The hub is not asked."""
    if reference.startswith(TINY) or is_hub(Path(reference)) or try_stat(Path(reference)) is not None:
        return
    raise DataError(f"recorded texts not found: {reference} (expected a file, a directory, or hub:OWNER/NAME)")


def _readable(reference: str, columns: Columns, found: MatchedTexts) -> Iterator[tuple[str, Layout, NumberedRows]]:
    """Yield the files that a reference names, each with its layout and its rows. Raises DataError if there are none."""
    if reference.startswith(TINY):
        reference = str(embedded(reference))
    if is_hub(Path(reference)):
        yield reference, *_with_layout(hub_rows(parse_reference(Path(reference)), "train"), columns, reference)
        return
    path = Path(reference)
    require_exists(reference)
    if (path / "run.json").is_file():
        where = str(path / "exchange")
        yield where, *_with_layout(_of_run(path), columns, where)
        return
    files = _files(path)
    for file in files:
        try:
            layout, rows = _with_layout(_of_file(file, columns), columns, str(file))
        except DataError:
            if len(files) == 1 or len(found.skipped) + 1 == len(files):
                raise
            found.skipped.append(file.name)  # a directory may have other files, too
            continue
        yield str(file), layout, rows


SAMPLE = 100  # rows from whose columns a layout is found


def _with_layout(rows: NumberedRows, columns: Columns, where: str) -> tuple[Layout, NumberedRows]:
    """Return the layout of rows, from the columns of the first ones, and the rows. A later row with a column that would
    have changed the layout is refused."""
    first = list(itertools.islice(rows, SAMPLE))
    if not first:
        raise DataError(f"{where}: has no rows")
    whole = [name for name in conversation_texts([values for _, values in first]) if name not in columns.named]
    names = dict.fromkeys(str(name) for _, values in first for name in values if name not in whole)
    try:
        layout = find_layout(list(names), columns, where)
    except DataError as error:
        if not whole:
            raise
        raise DataError(
            f"{error}. The column {whole[0]!r} is left out: it holds whole conversations, with a chat template's marks"
        ) from None

    def checked() -> NumberedRows:
        """Yield the rows. Raises DataError for one with a column by which the file would be read otherwise."""
        known = set(names)
        for number, values in itertools.chain(first, rows):
            if not values.keys() <= known:
                new = [str(name) for name in values if name not in known and name not in whole]
                if find_layout([*names, *new], columns, where) != layout:
                    raise DataError(
                        f"{where}, row {number}: has the column {new[0]!r}, which the first {SAMPLE} rows lack and by "
                        "which they would be read otherwise; name the columns: --set sources.NAME.columns.text=COLUMN"
                    )
                known.update(new)
            yield number, values

    return layout, checked()


def _of_file(file: Path, columns: Columns) -> NumberedRows:
    """Return the rows of a file, or of a directory that `datasets` saved."""
    return read_rows(file) if file.is_dir() else file_rows(file, lambda names: _needed(names, columns, file))


def _needed(names: list[str], columns: Columns, file: Path) -> list[str]:
    """Return the columns of a Parquet file to decode: those of its layout, and all that may hold responses, since what
    they hold decides."""
    wanted = [*find_layout(names, columns, str(file)).columns, *SINGLE, *CONVERSATIONS]
    return [name for name in names if name in wanted or any(each.partition(".")[0] == name for each in wanted)]


def _files(path: Path) -> list[Path]:
    """Return a file, or the data files of a directory, sorted; a directory that `datasets` saved is one."""
    if not path.is_dir() or (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return [path]
    files = data_files(path)
    if not files:
        raise DataError(f"{path}: the directory has no file of recorded texts ({', '.join(FORMATS)})")
    return files


def _of_run(path: Path) -> NumberedRows:
    """Yield the rollouts in a run's exchange that have a text."""

    run = RunDirectory(path)
    store, number = record_store(run), 0
    for table in tables(store, run.info().run_id, writers(store)):
        for row in table.select(["prompt_id", "ended", "x_text", "y_text", "messages", "tools", "reward"]).to_pylist():
            number += 1
            yield number, row


def embedded(reference: str) -> Path:
    """Return the path of a file of recorded texts in this package. Raises DataError for an unknown name."""
    directory = Path(__file__).resolve().parent / "embedded"
    files = {f"{TINY}{path.stem}": path for path in sorted(directory.glob("*.jsonl"))}
    if reference not in files:
        raise DataError(f"no embedded file {reference!r}; expected one of: {', '.join(files)}")
    return files[reference]
