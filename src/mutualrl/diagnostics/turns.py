"""What survives a chat template: nine kinds of conversations as a learner's tokens (`thl-check --suite turns`).

Kept: TRL reads the same message back from the tokens that would be trained, and results stand between them whole.
Markers: the template's own `{% generation %}` blocks, by which supervised training masks, against what is sampled.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers.utils import get_json_schema
from trl.chat_template_utils import add_response_schema

from mutualrl.adapter.rendering import Renderer, Unrenderable
from mutualrl.console.display import cell
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.errors import DataError, UsageError
from mutualrl.sources.prepare import malformed_note
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.calculator import calculate
from mutualrl.tasks.files import FORMATS, data_files, file_rows
from mutualrl.tasks.messages import from_text
from mutualrl.tasks.run_reader import CONVERSATIONS, tools_of, trajectory_of
from mutualrl.tiny import path_of, resolve_path
from mutualrl.trajectory import Conversation, Message, ToolCall

KEPT = "kept"
DEFAULT = ("tiny:jan", "tiny:kim")
_ASKED = Message("user", "What is three times four?")
_CALL = ToolCall("calculate", {"operation": "times", "a": 3, "b": 4})
_OTHER = ToolCall("calculate", {"operation": "plus", "a": 5, "b": 6})
_RESULT = Message("tool", "12", name="calculate")
_SAID = Message("assistant", "It is twelve.")

#: by kind: the prompt, and what follows it
KINDS: dict[str, tuple[list[Message], list[Message]]] = {
    "plain": ([_ASKED], [_SAID]),
    "system prompt": ([Message("system", "Answer in words."), _ASKED], [_SAID]),
    "several turns": ([_ASKED], [_SAID, Message("user", "And plus one?"), Message("assistant", "Thirteen.")]),
    "call": ([_ASKED], [Message("assistant", "", tool_calls=(_CALL,)), _RESULT, _SAID]),
    "call beside content": ([_ASKED], [Message("assistant", "Let me see.", tool_calls=(_CALL,)), _RESULT, _SAID]),
    "parallel calls": (
        [_ASKED],
        [
            Message("assistant", "", tool_calls=(_CALL, _OTHER)),
            _RESULT,
            Message("tool", "11", name="calculate"),
            _SAID,
        ],
    ),
    "reasoning": ([_ASKED], [Message("assistant", "It is twelve.", reasoning="Three fours are twelve.")]),
    "reasoning and a call": (
        [_ASKED],
        [Message("assistant", "", reasoning="I need the product.", tool_calls=(_CALL,)), _RESULT, _SAID],
    ),
    "two calls in turn": (
        [_ASKED],
        [
            Message("assistant", "", tool_calls=(_CALL,)),
            _RESULT,
            Message("assistant", "", tool_calls=(_OTHER,)),
            Message("tool", "11", name="calculate"),
            _SAID,
        ],
    ),
}


@dataclass(frozen=True)
class TemplateCheck:
    """What a template keeps, by kind of conversation: `kept`, or what is lost. `end`: what ends a turn; `markers`: its
    marks of what is generated, against what is sampled."""

    name: str
    end: str
    reasoning_key: str
    kinds: dict[str, str]
    markers: str

    @property
    def keeps_all(self) -> bool:
        """Return whether every kind is kept."""
        return all(found == KEPT for found in self.kinds.values())


def check_turns(
    names: Sequence[str], rollouts: Path | None = None, *, trust_remote_code: bool = False
) -> list[TemplateCheck] | list[FileCheck]:
    """Check models, tokenizers, or files of a template (`*.jinja`), with the nine kinds or the conversations of a file.
    Raises UsageError for one without a template, DataError for a file without conversations."""
    tokenizers = {name: tokenizer_of(name, trust_remote_code=trust_remote_code) for name in names}
    if rollouts is None:
        return [check_template(name, tokenizer) for name, tokenizer in tokenizers.items()]
    found = recorded(rollouts)
    return [check_file(name, tokenizer, found) for name, tokenizer in tokenizers.items()]


def tokenizer_of(name: str, *, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer of a name. A file of a template has that of `tiny:jan`, and TRL's parser of its family if it
    has one."""
    if name.endswith((".jinja", ".jinja2")):
        tokenizer = copy.deepcopy(load_tokenizer(str(path_of("jan"))))
        try:
            tokenizer.chat_template = Path(name).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{name}: cannot be read: {error.strerror}") from None
        tokenizer.response_template = None
    else:
        tokenizer = load_tokenizer(resolve_path(name), trust_remote_code=trust_remote_code)
    if not tokenizer.chat_template:
        raise UsageError(f"{name}: has no chat template; expected a chat model, or a file of a template (*.jinja)")
    if getattr(tokenizer, "response_template", None) is None:
        _add_parser(tokenizer, name)
    return tokenizer


def _add_parser(tokenizer: Any, name: str) -> None:
    """Add TRL's parser of a known template. TRL's training templates have that of the template beside them; of others
    the texts are compared."""
    template, beside = tokenizer.chat_template, Path(name.replace("_training.jinja", ".jinja"))
    known = [template, *([beside.read_text(encoding="utf-8")] if str(beside) != name and beside.exists() else [])]
    for each in known:
        tokenizer.chat_template = each
        try:
            add_response_schema(tokenizer)
            break
        except ValueError:
            continue
    tokenizer.chat_template = template


class FileConversations(NamedTuple):
    """The conversations of a file, with the schemas of their tools; `malformed`: how many others are no run, by their
    problem."""

    conversations: list[tuple[Conversation, list[JsonObject]]]
    malformed: Counter[str]


@dataclass(frozen=True)
class FileCheck:
    """How many conversations of a file a template keeps, and of the others how many are lost for each reason.
    `malformed`: those that are no run, by their problem: no template is asked for them."""

    name: str
    kept: int
    lost: dict[str, int]
    malformed: dict[str, int]

    @property
    def keeps_all(self) -> bool:
        """Return whether every conversation is kept."""
        return not self.lost and not self.malformed


def recorded(path: Path) -> FileConversations:
    """Return the conversations of a file or a directory: rows with `messages` (or another column of conversations) and
    `tools`. Raises DataError for a row without."""
    conversations: list[tuple[Conversation, list[JsonObject]]] = []
    malformed: Counter[str] = Counter()
    files = data_files(path) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path}: the directory has no file of conversations ({', '.join(FORMATS)})")
    for file in files:
        for number, row in file_rows(file):
            read = trajectory_of(row)
            if read is None or not read.after:
                raise DataError(
                    f"{file}, row {number}: found no conversation with an answer; expected a list of messages in one "
                    f"of {', '.join(CONVERSATIONS)}"
                )
            if read.problem:
                malformed[read.problem] += 1
                continue
            tools = from_text(tools_of(row))
            schemas = [dict(each) for each in tools if isinstance(each, Mapping)] if isinstance(tools, list) else []
            conversations.append((read, schemas))
    return FileConversations(conversations, malformed)


def check_file(name: str, tokenizer: Any, found: FileConversations) -> FileCheck:
    """Return what a tokenizer's template keeps of the conversations of a file."""
    lost: Counter[str] = Counter()
    renderers: dict[str, Renderer] = {}  # one per set of tools, which most files have once
    for each, schemas in found.conversations:
        tools = json.dumps(schemas)
        renderer = renderers.get(tools) or renderers.setdefault(tools, Renderer(tokenizer, schemas))
        try:
            renderer.row(each.prompt, each.after)
        except Unrenderable as reason:
            lost[str(reason)] += 1
    kept = len(found.conversations) - lost.total()
    return FileCheck(name, kept, dict(lost.most_common()), dict(found.malformed.most_common()))


def file_markdown(checks: Sequence[FileCheck]) -> str:
    """Return the table of a file's conversations by template, then why others are lost: to the reader, which is no
    template's fault, and to each template."""
    lines = ["| template | conversations | kept |", "|---|---|---|"]
    for check in checks:
        total = check.kept + sum(check.lost.values()) + sum(check.malformed.values())
        lines.append(f"| {cell(Path(check.name).name)} | {total:,} | {check.kept:,} |")
    if malformed := checks[0].malformed:
        lines += ["", f"Left out, whatever the template: {cell(malformed_note(malformed))}"]
    reasons = [
        f"- {cell(Path(check.name).name)}, {count:,}: {cell(reason)}"
        for check in checks
        for reason, count in check.lost.items()
    ]
    return "\n".join([*lines, "", *reasons])


def check_template(name: str, tokenizer: Any) -> TemplateCheck:
    """Return what a tokenizer's template keeps."""
    renderer = Renderer(tokenizer, [schema()])
    kinds: dict[str, str] = {}
    for kind, (prompt, after) in KINDS.items():
        try:
            renderer.row(prompt, after)
            kinds[kind] = KEPT
        except Unrenderable as reason:
            kinds[kind] = str(reason)
    return TemplateCheck(name, renderer.end, renderer.reasoning_key, kinds, markers(tokenizer, renderer))


def schema() -> JsonObject:
    """Return the schema of the conversations' tool."""
    of_tool: JsonObject = get_json_schema(calculate)
    return of_tool


def markers(tokenizer: Any, renderer: Renderer) -> str:
    """Return how a template's generation markers mark a plain answer: `as sampled`, `more` or `less` than is sampled,
    or `none`."""
    if "generation %}" not in tokenizer.chat_template and "generation -%}" not in tokenizer.chat_template:
        return "none"
    prompt, after = KINDS["plain"]
    try:
        sampled = renderer.answer(prompt, after[0])
    except Unrenderable:
        return "not comparable"
    chats = [{"role": message.role, "content": message.text} for message in (*prompt, *after)]
    encoded = tokenizer.apply_chat_template(
        chats, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, tools=[schema()]
    )
    marked = [token for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
    text = tokenizer.decode(marked)
    if text == sampled:
        return "as sampled"
    return "more" if len(text) > len(sampled) else "less"


def as_json(check: TemplateCheck | FileCheck) -> JsonObject:
    """Return a check as a JSON object."""
    return {**asdict(check), "keeps_all": check.keeps_all}


def markdown(checks: Sequence[TemplateCheck] | Sequence[FileCheck]) -> str:
    """Return the table of kinds, or of a file's conversations, by template, then what is lost."""
    files = [check for check in checks if isinstance(check, FileCheck)]
    return file_markdown(files) if files else _kinds([c for c in checks if isinstance(c, TemplateCheck)])


def _kinds(checks: Sequence[TemplateCheck]) -> str:
    """Return the table of the nine kinds by template, then what is lost."""
    names = [cell(Path(check.name).name) for check in checks]
    lines = [f"| conversation | {' | '.join(names)} |", "|---|" + "---|" * len(checks)]
    for kind in KINDS:
        marks = ["kept" if check.kinds[kind] == KEPT else "lost" for check in checks]
        lines.append(f"| {kind} | {' | '.join(marks)} |")
    lines.append(f"| markers | {' | '.join(check.markers for check in checks)} |")
    lines.append(f"| end of a turn | {' | '.join(f'`{cell(check.end)}`' for check in checks)} |")
    lost = [
        f"- {name}, {kind}: {cell(found)}"
        for name, check in zip(names, checks, strict=True)
        for kind, found in check.kinds.items()
        if found != KEPT
    ]
    return "\n".join([*lines, "", *lost])
