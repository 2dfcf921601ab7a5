"""Six question-answering sets of the paper, with its exact templates.

Source: paper, Appendix "Prompt Templates for Evaluation". `\\\\` there is one newline, `\\\\[0.5ex]` two; options are
lines `A. text`. A row with more or fewer options than the template mentions keeps its own: the range in the question is
that of its letters, and digit labels become letters. Fields are inserted unchanged, whitespace included."""

from __future__ import annotations

from collections.abc import Sequence

from mutualrl.tasks.hub_data import HubSource
from mutualrl.tasks.row_task import PromptFields, RowTask
from mutualrl.tasks.rows import LETTERS, DatasetRow
from mutualrl.tasks.template import INSTRUCTION, fill

HELLASWAG = f"{{story}}\n\nWhich option ({{range}}) best completes the sentence?\n{INSTRUCTION}\n\n{{joined}}"
ARC = f"{{question}}\n\nWhich option ({{range}}) is the correct answer?\n{INSTRUCTION}\n\n{{choices_text}}"
BOOLQ = (
    "Passage: {passage}\n\nQuestion: {question}\n\n"
    f"Answer the question with Yes or No based on the passage above.\n{INSTRUCTION}"
)
OPENBOOKQA = (
    "Fact: {fact1}\n\nQuestion: {question_stem}\n\n"
    f"Which option ({{range}}) is the correct answer?\n{INSTRUCTION}\n\n{{choices_text}}"
)
PIQA = f"{{goal}}\n\nWhich option (A-B) is the better solution?\n{INSTRUCTION}\n\nA. {{sol1}}\nB. {{sol2}}"
SOCIAL_I_QA = (
    "Context: {context}\n\nQuestion: {question}\n\n"
    f"Which option (A-C) is the correct answer?\n{INSTRUCTION}\n\nA. {{answerA}}\nB. {{answerB}}\nC. {{answerC}}"
)

_NO_TEST_LABELS = "the test split has no public labels"


def _options(letters: Sequence[str], texts: Sequence[str]) -> str:
    return "\n".join(f"{letter}. {text}" for letter, text in zip(letters, texts, strict=True))


def _range(letters: Sequence[str]) -> str:
    return f"{letters[0]}-{letters[-1]}"


def _choices(row: DatasetRow) -> tuple[list[str], list[str], str]:
    """Return letters, texts and the answer's letter of a row with `choices` and `answerKey`."""
    choices = row.take("choices")
    if not isinstance(choices, dict) or not {"text", "label"} <= set(choices):
        row.refuse("choices", choices, "an object with 'text' and 'label'")
    texts = row.texts("choices", choices["text"])
    labels = row.texts("choices", choices["label"])
    letters = [_letter(label) for label in labels]
    if len(letters) != len(texts) or "" in letters or len(set(letters)) != len(letters):
        row.refuse("choices", choices["label"], f"a label for each of the {len(texts)} texts, letters or digits")
    key = row.take("answerKey")
    if key == "":
        row.index("answerKey", len(texts), first=1)  # raises: a split without labels
    if not isinstance(key, str) or _letter(key) not in letters:
        row.refuse("answerKey", key, f"one of {', '.join(labels)}")
    return letters, texts, _letter(key)


def _letter(label: str) -> str:
    """Return a label as a letter; empty if it is neither a letter nor a digit 1 to 9."""
    if len(label) == 1 and label in LETTERS:
        return label
    return LETTERS[int(label) - 1] if len(label) == 1 and label in "123456789" else ""


def _arc(row: DatasetRow, part: str) -> PromptFields:
    letters, texts, answer = _choices(row)
    values = {
        "question": row.text("question"),
        "range": _range(letters),
        "choices_text": _options(letters, texts),
    }
    levels = [name for name in ("Easy", "Challenge") if name.lower() in part.lower()]
    return PromptFields(fill(ARC, values), answer, levels[0] if levels else "arc")


def _openbookqa(row: DatasetRow, part: str) -> PromptFields:
    letters, texts, answer = _choices(row)
    values = {
        "fact1": row.text("fact1"),
        "question_stem": row.text("question_stem"),
        "range": _range(letters),
        "choices_text": _options(letters, texts),
    }
    return PromptFields(fill(OPENBOOKQA, values), answer, "openbookqa")


def _boolq(row: DatasetRow, part: str) -> PromptFields:
    values = {name: row.text(name) for name in ("passage", "question")}
    answer = row.take("answer")
    if not isinstance(answer, bool):
        row.refuse("answer", answer, "true or false")
    return PromptFields(fill(BOOLQ, values), "Yes" if answer else "No", "boolq")


def _piqa(row: DatasetRow, part: str) -> PromptFields:
    values = {"goal": row.text("goal"), "sol1": row.string("sol1"), "sol2": row.string("sol2")}
    return PromptFields(fill(PIQA, values), LETTERS[row.index("label", 2, first=0)], "piqa")


def _hellaswag(row: DatasetRow, part: str) -> PromptFields:
    endings = row.texts("endings", row.take("endings"))
    letters = LETTERS[: len(endings)]
    values = {"story": row.text("ctx"), "range": _range(letters), "joined": _options(letters, endings)}
    return PromptFields(fill(HELLASWAG, values), letters[row.index("label", len(endings), first=0)], "hellaswag")


def _social_i_qa(row: DatasetRow, part: str) -> PromptFields:
    values = {name: row.text(name) for name in ("context", "question")}
    values |= {name: row.string(name) for name in ("answerA", "answerB", "answerC")}
    return PromptFields(fill(SOCIAL_I_QA, values), LETTERS[row.index("label", 3, first=1)], "social_i_qa")


_EASY = HubSource("allenai/ai2_arc", "ARC-Easy", part="Easy")
_CHALLENGE = HubSource("allenai/ai2_arc", "ARC-Challenge", part="Challenge")
_ARC_FIELDS = ("question", "choices", "answerKey")
_PARQUET = "refs/convert/parquet"  # the hub's conversion: the main branch of these is a script, which is never run

QA_TASKS = (
    RowTask("arc", (_EASY, _CHALLENGE), _arc, _ARC_FIELDS, ("arc-easy", "arc-challenge"), "arc"),
    RowTask("arc-easy", (_EASY,), _arc, _ARC_FIELDS, ("arc-easy",), "arc-easy"),
    RowTask("arc-challenge", (_CHALLENGE,), _arc, _ARC_FIELDS, ("arc-challenge",), "arc-challenge"),
    RowTask(
        "openbookqa",
        (HubSource("allenai/openbookqa", "additional"),),
        _openbookqa,
        ("fact1", "question_stem", "choices", "answerKey"),
        ("openbookqa",),
        "openbookqa",
    ),
    RowTask(
        "boolq",
        (HubSource("google/boolq", evaluated="validation", note="there is no test split"),),
        _boolq,
        ("passage", "question", "answer"),
        ("boolq",),
        "boolq",
    ),
    RowTask(
        "piqa",
        (HubSource("ybisk/piqa", evaluated="validation", revision=_PARQUET, note=_NO_TEST_LABELS),),
        _piqa,
        ("goal", "sol1", "sol2", "label"),
        ("piqa",),
        "piqa",
    ),
    RowTask(
        "hellaswag",
        (HubSource("Rowan/hellaswag", evaluated="validation", note=_NO_TEST_LABELS),),
        _hellaswag,
        ("ctx", "endings", "label"),
        ("hellaswag",),
        "hellaswag",
    ),
    RowTask(
        "social_i_qa",
        (HubSource("allenai/social_i_qa", evaluated="validation", revision=_PARQUET, note="there is no test split"),),
        _social_i_qa,
        ("context", "question", "answerA", "answerB", "answerC", "label"),
        ("social_i_qa",),
        "social_i_qa",
    ),
)
