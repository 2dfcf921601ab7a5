"""Agents' runs in the notations of files: each takes a prompt and turns, and returns the row that holds them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mutualrl.trajectory import Message, ToolCall

Call = tuple[str, dict[str, Any]]
Row = dict[str, Any]


class Turn(NamedTuple):
    """What the model said and called, and the results."""

    text: str
    reasoning: str
    calls: list[Call]
    results: list[str]


def expected(prompt: str, turns: Sequence[Turn], *, reasoning: bool = True) -> tuple[Message, ...]:
    """Return the messages that every notation of a run becomes."""
    messages = [Message("user", prompt)]
    for turn in turns:
        calls = tuple(ToolCall(name, arguments) for name, arguments in turn.calls)
        messages.append(Message("assistant", turn.text, turn.reasoning if reasoning else "", calls))
        messages += [
            Message("tool", result, name=name) for (name, _), result in zip(turn.calls, turn.results, strict=True)
        ]
    return tuple(messages)


def _ids(place: int, turn: Turn) -> list[str]:
    return [f"c{place}-{number}" for number in range(len(turn.calls))]


def openai(prompt: str, turns: Sequence[Turn], arguments: Callable[[Any], Any] = json.dumps) -> Row:
    messages: list[Row] = [{"role": "user", "content": prompt}]
    for place, turn in enumerate(turns):
        ids = _ids(place, turn)
        calls = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": arguments(given)}}
            for key, (name, given) in zip(ids, turn.calls, strict=True)
        ]
        chat = {"role": "assistant", "content": turn.text or None, "reasoning_content": turn.reasoning}
        messages.append({**chat, "tool_calls": calls or None})
        answers = [
            {"role": "tool", "tool_call_id": key, "content": text} for key, text in zip(ids, turn.results, strict=True)
        ]
        messages += reversed(answers)  # in any order: they have ids
    return {"messages": messages}


def objects(prompt: str, turns: Sequence[Turn]) -> Row:
    return openai(prompt, turns, arguments=dict)


def twice_encoded(prompt: str, turns: Sequence[Turn]) -> Row:
    """Arguments as JSON text within JSON text, the list of calls as text, the whole conversation as text."""
    row = openai(prompt, turns, arguments=lambda given: json.dumps(json.dumps(given)))
    for message in row["messages"]:
        if message.get("tool_calls"):
            message["tool_calls"] = json.dumps([json.dumps(call) for call in message["tool_calls"]])
    return {"messages": json.dumps(row["messages"])}


def function_call(prompt: str, turns: Sequence[Turn]) -> Row:
    """OpenAI's older form: one call per message, its result by the tool's name; several in messages of their own."""
    messages: list[Row] = [{"role": "user", "content": prompt}]
    for turn in turns:
        said: Row = {"role": "assistant", "content": turn.text, "reasoning": turn.reasoning}
        first = said
        for number, (name, given) in enumerate(turn.calls):
            call = {"function_call": {"name": name, "arguments": json.dumps(given)}}
            messages.append({**first, **call} if not number else {"role": "assistant", "content": None, **call})
        messages += [] if turn.calls else [said]
        messages += [
            {"role": "function", "name": name, "content": text}
            for (name, _), text in zip(turn.calls, turn.results, strict=True)
        ]
    return {"messages": messages}


def anthropic(prompt: str, turns: Sequence[Turn]) -> Row:
    messages: list[Row] = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
    for place, turn in enumerate(turns):
        ids = _ids(place, turn)
        parts: list[Row] = (
            [{"type": "thinking", "thinking": turn.reasoning, "signature": "x"}] if turn.reasoning else []
        )
        parts += [{"type": "text", "text": turn.text}] if turn.text else []
        parts += [
            {"type": "tool_use", "id": key, "name": name, "input": given}
            for key, (name, given) in zip(ids, turn.calls, strict=True)
        ]
        messages.append({"role": "assistant", "content": parts})
        if turn.calls:
            results = [
                {"type": "tool_result", "tool_use_id": key, "content": [{"type": "text", "text": text}]}
                for key, text in zip(ids, turn.results, strict=True)
            ]
            messages.append({"role": "user", "content": results})
    return {"messages": messages}


def gemini(prompt: str, turns: Sequence[Turn]) -> Row:
    messages: list[Row] = [{"role": "user", "parts": [{"text": prompt}]}]
    for turn in turns:
        parts: list[Row] = [{"text": turn.reasoning, "thought": True}] if turn.reasoning else []
        parts += [{"text": turn.text}] if turn.text else []
        parts += [{"functionCall": {"name": name, "args": given}} for name, given in turn.calls]
        messages.append({"role": "model", "parts": parts})
        if turn.calls:
            results = [
                {"functionResponse": {"name": name, "response": {"output": text}}}
                for (name, _), text in zip(turn.calls, turn.results, strict=True)
            ]
            messages.append({"role": "user", "parts": results})
    return {"messages": messages}


def bedrock(prompt: str, turns: Sequence[Turn]) -> Row:
    messages: list[Row] = [{"role": "user", "content": [{"text": prompt}]}]
    for place, turn in enumerate(turns):
        ids = _ids(place, turn)
        parts: list[Row] = [{"text": turn.text}] if turn.text else []
        parts += [
            {"toolUse": {"toolUseId": key, "name": name, "input": given}}
            for key, (name, given) in zip(ids, turn.calls, strict=True)
        ]
        messages.append({"role": "assistant", "content": parts})
        if turn.calls:
            results = [
                {"toolResult": {"toolUseId": key, "content": [{"text": text}], "status": "success"}}
                for key, text in zip(ids, turn.results, strict=True)
            ]
            messages.append({"role": "user", "content": results})
    return {"messages": messages}


def responses(prompt: str, turns: Sequence[Turn]) -> Row:
    """The items of OpenAI's Responses."""
    items: list[Row] = [{"role": "user", "content": [{"type": "input_text", "text": prompt}]}]
    for place, turn in enumerate(turns):
        ids = _ids(place, turn)
        if turn.reasoning:
            items.append({"type": "reasoning", "summary": [{"type": "summary_text", "text": turn.reasoning}]})
        if turn.text:
            items.append(
                {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": turn.text}]}
            )
        items += [
            {"type": "function_call", "call_id": key, "name": name, "arguments": json.dumps(given)}
            for key, (name, given) in zip(ids, turn.calls, strict=True)
        ]
        items += [
            {"type": "function_call_output", "call_id": key, "output": text}
            for key, text in zip(ids, turn.results, strict=True)
        ]
    return {"messages": items}


def langchain(prompt: str, turns: Sequence[Turn]) -> Row:
    messages: list[Row] = [{"type": "human", "content": prompt}]
    for place, turn in enumerate(turns):
        ids = _ids(place, turn)
        calls = [
            {"name": name, "args": given, "id": key, "type": "tool_call"}
            for key, (name, given) in zip(ids, turn.calls, strict=True)
        ]
        messages.append({"type": "ai", "content": turn.text, "tool_calls": calls})
        messages += [
            {"type": "tool", "tool_call_id": key, "content": text} for key, text in zip(ids, turn.results, strict=True)
        ]
    return {"messages": messages}


def sharegpt(prompt: str, turns: Sequence[Turn]) -> Row:
    """LLaMA-Factory's form: several calls are a list, their results follow one by one."""
    messages = [{"from": "human", "value": prompt}]
    for turn in turns:
        messages += [{"from": "gpt", "value": turn.text}] if turn.text else []
        calls = [{"name": name, "arguments": given} for name, given in turn.calls]
        if calls:
            messages.append({"from": "function_call", "value": json.dumps(calls[0] if len(calls) == 1 else calls)})
        messages += [{"from": "observation", "value": text} for text in turn.results]
    return {"conversations": messages}


def atif(prompt: str, turns: Sequence[Turn]) -> Row:
    steps: list[Row] = [{"step_id": 1, "source": "user", "message": prompt}]
    for place, turn in enumerate(turns):
        ids = _ids(place, turn)
        calls = [
            {"tool_call_id": key, "function_name": name, "arguments": given}
            for key, (name, given) in zip(ids, turn.calls, strict=True)
        ]
        results = [{"source_call_id": key, "content": text} for key, text in zip(ids, turn.results, strict=True)]
        step: Row = {"step_id": place + 2, "source": "agent", "message": turn.text, "reasoning_content": turn.reasoning}
        steps.append({**step, "tool_calls": calls, "observation": {"results": results}} if calls else step)
    return {"schema_version": "ATIF-v1.7", "agent": {"name": "x", "version": "1"}, "steps": steps}


def traces(prompt: str, turns: Sequence[Turn]) -> Row:
    """verifiers' nodes, beside a branch that ended elsewhere."""
    messages = openai(prompt, turns)["messages"]
    nodes = [{"parent": None, "message": messages[0]}, {"parent": 0, "message": {"role": "assistant", "content": "-"}}]
    for place, message in enumerate(messages[1:]):
        nodes.append({"parent": 0 if not place else len(nodes) - 1, "message": message})
    return {"nodes": nodes}


def hermes(prompt: str, turns: Sequence[Turn]) -> Row:
    """Everything as text, as a chat template without roles for tools writes it."""
    messages = [{"role": "user", "content": prompt}]
    for turn in turns:
        thought = f"<think>\n{turn.reasoning}\n</think>\n\n" if turn.reasoning else ""
        calls = [json.dumps({"name": name, "arguments": given}) for name, given in turn.calls]
        written = [turn.text, *(f"<tool_call>\n{call}\n</tool_call>" for call in calls)]
        messages.append({"role": "assistant", "content": thought + "\n".join(part for part in written if part)})
        results = "\n".join(f"<tool_response>\n{text}\n</tool_response>" for text in turn.results)
        messages += [{"role": "user", "content": results}] if turn.calls else []
    return {"messages": messages}


#: those that hold what was thought, and those that have no place for it
NOTATIONS = (
    *(openai, objects, twice_encoded, function_call, anthropic, gemini, responses, atif, traces, hermes),
    *(bedrock, langchain, sharegpt),
)
WITHOUT_REASONING = (bedrock, langchain, sharegpt)
