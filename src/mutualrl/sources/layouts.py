"""Layouts of files of recorded texts: where a row has its prompt, its responses, and whether they were cut off.

Read are texts in a list column (OpenR1's `generations`), in several columns (DeepMath's `r1_solution_1` ...), one per
row (SYNTHETIC-1, TRL's completions, verifiers' results, rollouts of this project), and in conversations
(`conversations` with `from` and `value`, `messages` with `role` and `content`, `nodes` of a trace of verifiers, `steps`
of ATIF). Runs of agents, with calls and results, are read for tasks with tools and left out for others. A layout is
guessed from the names of the columns, once per file, unless the user names them.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from mutualrl.errors import DataError
from mutualrl.sources.section import Columns, Reasoning
from mutualrl.tasks.base import unicode_text
from mutualrl.tasks.columns import is_messages, texts_of, truth_of
from mutualrl.tasks.messages import from_text, is_cut_off, opens_reasoning, without_end, without_reasoning
from mutualrl.tasks.rows import DatasetRow
from mutualrl.tasks.run_reader import CONVERSATIONS, is_conversation, read_trajectory, tools_of
from mutualrl.trajectory import Conversation, Message, Trajectory

#: names of columns, in order of preference
IDS = ("prompt_id", "uuid", "problem_id", "example_id", "doc_id", "id")
PROMPTS = ("prompt", "x_text", "problem", "question", "instruction", "query", "input")
LISTS = ("generations", "completions", "responses", "solutions", "outputs")
NUMBERED = re.compile(r"(?:[a-z0-9]+_)?(?:solution|completion|response|generation|output)_\d+")
SINGLE = (
    *("completion", "y_text", "response", "llm_response", "generation", "generated_solution", "output"),
    *("text", "solution"),
)
#: columns with the reason why a text ended
REASONS = ("finish_reason", "finish_reasons", "stop_reason")
#: columns that say whether a text is complete, and the truth value that says it is not; `calls`: of a trace, the calls
#: of the model, each with its finish_reason
CUT: Mapping[str, bool | None] = {
    **dict.fromkeys(REASONS),
    "calls": None,
    "is_reasoning_complete": False,
    "ended": False,
    "truncated": True,
    "is_truncated": True,
}
LONGEST = 1_000_000  # characters of a text
#: columns with the reward of a run
REWARDS = ("reward", "score")


@dataclass(frozen=True, slots=True)
class Layout:
    """Columns of a file. `texts`: columns of responses (a string, a list of strings, or messages); `conversation`: they
    hold the prompt, too. `cut`: columns that say whether a text is complete. `named`: columns that the user named; of
    these, values of another kind are refused, of guessed ones left out."""

    ids: tuple[str, ...]
    prompt: str | None
    texts: tuple[str, ...]
    conversation: bool
    cut: tuple[str, ...]
    verdict: str | None
    named: frozenset[str] = frozenset()

    def describe(self) -> str:
        """Return what is read, for the user."""
        names = ", ".join(map(repr, self.texts[:4])) + (", ..." if len(self.texts) > 4 else "")
        parts = [f"texts from {names}"]
        if not self.conversation:
            of = [repr(name) for name in (*self.ids, self.prompt) if name is not None]
            parts.append(f"prompts from {' and '.join(of)}")
        if self.cut:
            parts.append(f"cut-off texts from {', '.join(map(repr, self.cut))}")
        if self.verdict is not None:
            parts.append(f"without texts whose {self.verdict!r} is false")
        return "; ".join(parts)

    @property
    def columns(self) -> list[str]:
        """Return all columns that are read."""
        single = [name for name in (self.prompt, self.verdict) if name]
        return [*self.ids, *single, *self.texts, *self.cut]


@dataclass(frozen=True, slots=True)
class RecordedText:
    """One response of a row. `cut`: it is not complete. `rejected`: its verdict is false. `reward`: what the file says
    of it (`reward_of`)."""

    trajectory: Trajectory
    cut: bool = False
    rejected: bool = False
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class RecordedRow:
    """What a row has: the ids and the texts by which it may name its prompt, and its responses. `skipped`: numbers of
    its texts that are `too_long` to be read, `empty`, whose conversation has `several_turns`, or whose answer has
    `calls` of tools or `parts` that are no text; and `branches` of a trace beside the last. `malformed`: numbers of
    conversations that are no run, by their problem."""

    ids: tuple[str, ...]
    prompts: tuple[str, ...]
    responses: tuple[RecordedText, ...]
    skipped: Mapping[str, int]
    malformed: Mapping[str, int]


#: what begins a turn where a whole conversation was rendered as one text
_TURNS = ("<|im_start|>", "<|start_header_id|>", "<start_of_turn>", "<|user|>", "<|assistant|>", "[INST]", "<|turn>")


def conversation_texts(rows: Sequence[Mapping[str, object]]) -> list[str]:
    """Return the columns of single responses that hold whole conversations, prompt and marks included: they are no
    responses."""
    columns = []
    for name in SINGLE:
        values = [value for row in rows if isinstance(value := row.get(name), str) and value.strip()]
        if values and sum(any(mark in value for mark in _TURNS) for value in values) > len(values) / 2:
            columns.append(name)
    return columns


def find_layout(names: Sequence[str], columns: Columns, where: str) -> Layout:
    """Return the layout of a file with columns of these names. Raises DataError if it has none, or lacks a column that
    the user named."""
    named = columns.named
    missing = [name for name in named if name not in names and name.partition(".")[0] not in names]
    if missing:
        raise DataError(f"{where}: no column {missing[0]!r}, which sources.columns names (found: {_found(names)})")
    texts = columns.text or _text_columns(names)
    if not texts:
        texts = tuple(name for name in CONVERSATIONS if name in names and is_conversation(name, names))[:1]
    conversation = bool(texts) and texts[0] in CONVERSATIONS
    if not texts:
        raise DataError(
            f"{where}: no column with responses (found: {_found(names)}); name it: --set "
            "sources.NAME.columns.text=COLUMN (also a list of columns)"
        )
    ids = (columns.id,) if columns.id else tuple(name for name in IDS if name in names)
    prompt = columns.prompt or next((name for name in PROMPTS if name in names and name not in texts), None)
    if not ids and prompt is None and not conversation:
        raise DataError(
            f"{where}: no column with prompts or their ids (found: {_found(names)}); name it: --set "
            "sources.NAME.columns.prompt=COLUMN, or sources.NAME.columns.id=COLUMN"
        )
    cut = (columns.ended,) if columns.ended else tuple(name for name in CUT if name in names)
    return Layout(ids, prompt, tuple(texts), conversation, cut, columns.verdict, frozenset(named))


def _text_columns(names: Sequence[str]) -> tuple[str, ...]:
    numbered = sorted((name for name in names if NUMBERED.fullmatch(name)), key=_by_number)
    lists = [name for name in LISTS if name in names]
    single = [name for name in SINGLE if name in names]
    conversation = any(name in names for name in CONVERSATIONS)
    if numbered or lists:
        return tuple(numbered or lists[:1])
    # a data set of conversations often has the reference solution in a column of its own
    return () if conversation and single[:1] in ([], ["solution"], ["text"]) else tuple(single[:1])


def _by_number(name: str) -> tuple[str, int]:
    stem, _, number = name.rpartition("_")
    return stem, int(number)


def _found(names: Sequence[str]) -> str:
    return ", ".join(sorted(map(str, names))[:20])[:300] or "none"


def read_row(row: DatasetRow, layout: Layout, reasoning: Reasoning, *, turns: bool = False) -> RecordedRow:
    """Return the prompt and the responses of a row. `turns`: runs of agents are responses, too. Raises DataError naming
    file, row and column."""
    prompts: list[str] = []
    skipped: Counter[str] = Counter()
    malformed: Counter[str] = Counter()
    if layout.prompt is not None and (value := _value(row, layout.prompt)) is not None:
        prompts += _prompt_texts(row, layout.prompt, value)
    texts: list[str | None] = []
    runs: dict[int, Trajectory] = {}
    for column in layout.texts:
        value = _value(row, column)
        if column == "y_text" and row.values.get("messages") is not None:  # a run, in an exported exchange
            value = from_text(row.values["messages"])
        if layout.conversation or is_messages(value):
            read = _trajectory(row, column, value)
            skipped["branches"] += read.branches
            prompts += read.prompts if layout.conversation and value is not None else []
            if read.problem:
                malformed[read.problem] += 1
                value = None
            elif turns and read.is_run:
                kept = [_without_thoughts(message) for message in read.after] if reasoning == "drop" else read.after
                runs[len(texts)] = Trajectory.of_run(kept)
                value = Trajectory(tuple(kept)).text or " "
            else:
                value = _only_answer([message for message in read.after if message.role == "assistant"], skipped)
        found = _texts(row, column, value)
        texts += found or ([None] if len(layout.texts) > 1 else [])  # flags count the columns
    cut = [_are_cut(row, layout, column, len(texts)) for column in layout.cut]
    rejected = _rejected(row, layout, len(texts))
    reward = reward_of(row.values)
    responses = []
    for place, text in enumerate(texts):
        if text is None:
            continue
        run = runs.get(place)
        if len(text) + len("" if run is None else run.stored or "") > LONGEST:
            skipped["too_long"] += 1
            continue
        unicode_text(text, layout.texts[0], Path(row.where), row.number)
        if run is not None:
            responses.append(RecordedText(run, any(flags[place] for flags in cut), rejected[place], reward))
            continue
        is_cut = any(flags[place] for flags in cut) or opens_reasoning(text)
        answer = without_end(without_reasoning(text) if reasoning == "drop" and not is_cut else text)
        if not answer.strip():
            skipped["empty"] += 1
            continue
        responses.append(RecordedText(Trajectory.of_text(answer), is_cut, rejected[place], reward))
    return RecordedRow(_ids(row, layout), tuple(prompts), tuple(responses), +skipped, malformed)


def _without_thoughts(message: Message) -> Message:
    return message._replace(reasoning="", text=without_reasoning(message.text))


def reward_of(values: Mapping[str, object]) -> float | None:
    """Return the reward that a file gives a row: `reward` or `score`, that of the `rewards` of a trace (the only one,
    or the sum of their scores by weight), or that of the `final_metrics` of ATIF. None without one; NaN for one that is
    no number."""
    rewards, metrics = values.get("rewards"), values.get("final_metrics")
    found: list[object] = [values[name] for name in REWARDS if name in values]
    scores = list(rewards.values()) if isinstance(rewards, Mapping) else []
    if len(scores) == 1:
        found += [each.get("score") if isinstance(each, Mapping) else each for each in scores]
    elif scores and all(isinstance(each, Mapping) and "weight" in each for each in scores):
        parts = [(each.get("score"), each["weight"]) for each in scores if isinstance(each, Mapping)]
        numbers = [a * b for a, b in parts if isinstance(a, int | float) and isinstance(b, int | float)]
        found.append(sum(numbers) if len(numbers) == len(scores) else None)
    if isinstance(metrics, Mapping) and "reward" in metrics:
        found.append(metrics["reward"])
    if not found:
        return None
    try:
        return float(found[0]) if isinstance(found[0], int | float) else math.nan
    except OverflowError:
        return math.nan


def _only_answer(answered: Sequence[Message], skipped: Counter[str]) -> str | None:
    """Return the text of a conversation's answer after its reasoning. None, and counted, for several turns, an answer
    with calls of tools or parts that are no text, or reasoning alone."""
    if len(answered) != 1:
        skipped["several_turns"] += len(answered) > 1
        return None
    (answer,) = answered
    for reason, found in (("calls", answer.tool_calls), ("parts", answer.others), ("empty", not answer.text.strip())):
        if found:
            skipped[reason] += 1
            return None
    return answer.with_reasoning


def _value(row: DatasetRow, column: str) -> object:
    """Return the value of a column; None where a row lacks it."""
    value: object = row.values
    for part in [column] if column in row.values else column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _ids(row: DatasetRow, layout: Layout) -> tuple[str, ...]:
    ids = []
    for column in layout.ids:
        value = _value(row, column)
        if isinstance(value, str | int) and not isinstance(value, bool):
            ids += [str(value)] if value != "" else []
        elif value is not None and column in layout.named:
            row.refuse(column, value, "a string or an integer")
    return tuple(ids)


def _prompt_texts(row: DatasetRow, column: str, value: object) -> list[str]:
    known = texts_of(value)
    if known is None and not _is_list(value):
        row.refuse(column, value, "a string or a list of messages")
    return _trajectory(row, column, value).prompts if known is None else known  # which names the message that is none


def _trajectory(row: DatasetRow, column: str, value: object) -> Conversation:
    """Return the conversation in a value, without messages if that is null. Raises DataError for a value that is
    none."""
    if value is None:
        return Conversation(())
    read = read_trajectory(value, tools_of(row.values))
    if read is not None:
        return read
    listed = from_text(value)
    if not _is_list(listed):
        row.refuse(column, value, "a list of messages")
    odd = next(each for each in listed if read_trajectory([each]) is None)
    return row.refuse(column, odd, "a message with 'role' and 'content', or 'from' and 'value', both strings")


def _texts(row: DatasetRow, column: str, value: object) -> list[str | None]:
    """Return the responses in a value: a string, or a list of strings; None for one that is null."""
    if value is None:
        return []
    if isinstance(value, str):
        return [value]
    if not _is_list(value):
        row.refuse(column, value, "a string, a list of strings, or a list of messages")
    texts: list[str | None] = []
    for item in value:
        if item is not None and not isinstance(item, str):
            row.refuse(column, item, "a string")
        texts.append(item)
    return texts


def _are_cut(row: DatasetRow, layout: Layout, column: str, count: int) -> list[bool]:
    """Return for each of `count` texts whether a column says that it was cut off."""
    value = _value(row, column)
    if column == "calls":
        calls = value if _is_list(value) else []
        return [any(isinstance(call, Mapping) and is_cut_off(call.get("finish_reason")) for call in calls)] * count
    values = _per_text(row, column, value, count)
    if column in REASONS and column not in layout.named:
        return list(map(is_cut_off, values))
    if column in REASONS and any(isinstance(item, str) and truth_of(item) is None for item in values):
        return list(map(is_cut_off, values))
    incomplete = CUT.get(column, False)
    return [_checked_truth(row, layout, column, item) is incomplete for item in values]


def _rejected(row: DatasetRow, layout: Layout, count: int) -> list[bool]:
    """Return for each of `count` texts whether its verdict is false."""
    if layout.verdict is None:
        return [False] * count
    values = _per_text(row, layout.verdict, _value(row, layout.verdict), count)
    return [_checked_truth(row, layout, layout.verdict, item) is False for item in values]


def _per_text(row: DatasetRow, column: str, value: object, count: int) -> list[object]:
    """Return one value per text: those of a list, or one for all."""
    if not _is_list(value):
        return [value] * count
    if len(value) != count and count:
        row.refuse(column, value, f"one value per text: {count}")
    return list(value)[:count]


def _checked_truth(row: DatasetRow, layout: Layout, column: str, value: object) -> bool | None:
    """Return a truth value, None if there is none. Raises DataError for another value in a column that the user
    named."""
    truth = truth_of(value)
    if truth is None and value not in (None, "") and column in layout.named:
        row.refuse(column, value, "true or false")
    return truth


def _is_list(value: object) -> TypeGuard[Sequence[object]]:
    return isinstance(value, list | tuple)
