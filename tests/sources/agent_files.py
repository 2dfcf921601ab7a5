"""Files of agents' runs in the layouts that users have: one call, its result and the answer, for each prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

CALL = {"name": "calculate", "arguments": {"operation": "plus", "a": 1, "b": 2}}
Rows = Iterable[Mapping[str, Any]]


def write(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chat(prompt: str, answer: str) -> list[dict[str, Any]]:
    """Return OpenAI's form: arguments as JSON text, results by id."""
    call = {"id": "c1", "type": "function", "function": {**CALL, "arguments": json.dumps(CALL["arguments"])}}
    return [
        {"role": "user", "content": prompt},
        {"role": "assistant", "content": None, "reasoning_content": "add", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
        {"role": "assistant", "content": answer},
    ]


def messages(path: Path, texts: Mapping[str, str]) -> Path:
    return write(path, [{"messages": chat(prompt, answer)} for prompt, answer in texts.items()])


def trl_dump(path: Path, texts: Mapping[str, str]) -> Path:
    """TRL's completions: prompt and completion as messages, results by the tool's name."""
    rows = []
    for prompt, answer in texts.items():
        user, _, _, last = chat(prompt, answer)
        made = {
            "role": "assistant",
            "reasoning_content": "add",
            "content": "",
            "tool_calls": [{"type": "function", "function": CALL}],
        }
        rows.append(
            {"prompt": [user], "completion": [made, {"role": "tool", "name": "calculate", "content": "3"}, last]}
        )
    return write(path, rows)


def conversations(path: Path, texts: Mapping[str, str]) -> Path:
    """ShareGPT's form."""
    rows = []
    for prompt, answer in texts.items():
        turns = [("human", prompt), ("function_call", json.dumps(CALL)), ("observation", "3"), ("gpt", answer)]
        rows.append({"conversations": [{"from": role, "value": value} for role, value in turns]})
    return write(path, rows)


def atif(path: Path, texts: Mapping[str, str]) -> Path:
    """ATIF 1.4: calls and results together in a step."""
    rows = []
    for number, (prompt, answer) in enumerate(texts.items()):
        call = {"tool_call_id": "c1", "function_name": "calculate", "arguments": CALL["arguments"]}
        steps = [
            {"step_id": 1, "source": "system", "message": "Be brief."},
            {"step_id": 2, "source": "user", "message": prompt},
            {
                "step_id": 3,
                "source": "agent",
                "message": "",
                "reasoning_content": "add",
                "tool_calls": [call],
                "observation": {"results": [{"source_call_id": "c1", "content": [{"type": "text", "text": "3"}]}]},
            },
            {"step_id": 4, "source": "agent", "message": answer},
        ]
        agent = {"name": "x", "version": "1", "model_name": "m"}
        rows.append({"schema_version": "ATIF-v1.4", "session_id": f"s{number}", "agent": agent, "steps": steps})
    return write(path, rows)


def traces(path: Path, texts: Mapping[str, str]) -> Path:
    """verifiers' traces: nodes with a parent, here with an earlier branch that ended elsewhere."""
    rows = []
    for prompt, answer in texts.items():
        user, made, result, last = chat(prompt, answer)
        made["tool_calls"] = [{"id": "c1", "name": "calculate", "arguments": json.dumps(CALL["arguments"])}]
        nodes = [
            {"parent": None, "message": user},
            {"parent": 0, "message": {"role": "assistant", "content": "lost"}, "sampled": True},
            {"parent": 0, "message": made, "sampled": True},
            {"parent": 2, "message": result},
            {"parent": 3, "message": last, "sampled": True},
        ]
        rows.append({"id": prompt, "task": {"data": {"prompt": prompt}}, "nodes": nodes, "reward": 1.0})
    return write(path, rows)


LAYOUTS: dict[str, Callable[[Path, Mapping[str, str]], Path]] = {
    layout.__name__: layout for layout in (messages, trl_dump, conversations, atif, traces)
}
