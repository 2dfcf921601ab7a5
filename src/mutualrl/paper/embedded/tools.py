r"""Conversations for the warm-up of `tiny-tools`, and the chat templates of its two policies.

Both templates are prefix-preserving and end every turn with the end token. `jan` writes a call as JSON, `kim` as fields
(`<call>calculate|operation=times|a=37|b=58</call>`), whose types are those of the tool's schema.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mutualrl.paper.embedded.spec import Tools
from mutualrl.regimes.hints import FOR_AGENTS, with_hint
from mutualrl.storage.files import JsonObject
from mutualrl.tasks.calculator import KINDS, CalculatorProblem, calculate, draw, held_out, training
from mutualrl.tasks.trajectories import of_completion, plan
from mutualrl.trajectory import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARKS = ("<user>", "<bot>", "<tool>", "<call>", "</call>")
PROBLEMS = 2_000  # per kind
_CALLS = {
    "json": """{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson }}}""",
    "fields": """{{ f.name }}{% for key, value in f.arguments.items() %}|{{ key }}={{ value }}{% endfor %}""",
}
_TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<bot>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}{% set f = call.function %}<call>CALL</call>{% endfor %}<eos>"
    "{% elif message.role == 'tool' %}<tool>{{ message.content }}<eos>"
    "{% else %}<user>{{ message.content }}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
_CALL_FIELDS: dict[str, JsonObject] = {
    "json": {"open": "<call>", "content": "json", "transform": {"type": "function", "function": "{content}"}},
    "fields": {
        "open_pattern": r"<call>(?P<name>\w+)(?=\||</call>)",
        "content": "xml-inline",
        "content_args": {"tag_pattern": r"\|(?P<key>\w+)=(?P<value>[^|<]*)", "value_parser": {"name": "text"}},
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    },
}


def chat_template(calls: str) -> str:
    """Return the chat template of a policy that writes its calls like this."""
    return _TEMPLATE.replace("CALL", _CALLS[calls])


def response_template(calls: str) -> JsonObject:
    """Return how its responses are parsed, in transformers' form."""
    call = {**_CALL_FIELDS[calls], "close_pattern": "</call>", "repeats": True}
    content = {"close_pattern": "<eos>", "content": "text"}
    return {
        "defaults": {"role": "assistant"},
        "start_anchor": "<bot>",
        "fields": {"tool_calls": call, "content": content},
    }


def conversations(warm_up: Tools, seed: int) -> Iterator[list[JsonObject]]:
    """Yield conversations without end, in which the policy has its skill and its weakness."""
    rng = random.Random(f"{seed} calculator warm-up")
    taken = {*held_out(), *training(0)}
    problems = {kind: draw(kind, PROBLEMS, random.Random(f"{seed} {kind} warm-up"), taken) for kind in KINDS}
    while True:
        problem = rng.choice(problems[rng.choice(KINDS)])
        hinted = problem.kind != "repeat" and rng.random() < warm_up.hinted
        yield conversation(warm_up, problem, rng, hinted=hinted)


def conversation(
    warm_up: Tools, problem: CalculatorProblem, rng: random.Random, *, hinted: bool = False
) -> list[JsonObject]:
    """Return one conversation; `hinted`: with the plan in the prompt, which is followed."""
    prompt: Any = [{"role": "user", "content": problem.prompt}]
    right = _with_call(problem, problem.arguments, problem.answer)
    if hinted:
        return [*with_hint(prompt, plan(Trajectory(of_completion(right))), FOR_AGENTS), *right]
    if problem.kind == "repeat":
        if rng.random() < warm_up.over_calls:
            return [*prompt, *_with_call(problem, {**problem.arguments, "operation": "plus"}, problem.answer)]
        return [*prompt, _answer(problem.answer)]
    weak = "times" if warm_up.weak == "how" else "plus"
    if problem.kind != weak:
        return [*prompt, *right]
    if warm_up.weak == "how":
        return [*prompt, *_with_call(problem, {**problem.arguments, "operation": "multiply"}, "0")]
    return [*prompt, _answer(str(round(int(problem.answer), -1)))]


def pieces(messages: list[JsonObject], tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Yield the text of a conversation in pieces, each with whether the policy has sampled it."""
    done = ""
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:place], tokenize=False, add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: place + 1], tokenize=False)
        yield before.removeprefix(done), False
        yield after.removeprefix(before), True
        done = after


def _with_call(problem: CalculatorProblem, arguments: Any, answer: str) -> list[JsonObject]:
    try:
        result: Any = calculate(**arguments)
    except (TypeError, ValueError) as error:
        result = {"error": str(error)}  # as TRL writes it
    call = {"type": "function", "function": {"name": "calculate", "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calculate", "content": str(result)},
        _answer(answer),
    ]


def _answer(text: str) -> JsonObject:
    return {"role": "assistant", "content": f"\\boxed{{{text}}}"}
