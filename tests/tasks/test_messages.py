"""The one reading of a chat message: text, reasoning, parts, and what is left out."""

from __future__ import annotations

import pytest

from mutualrl.tasks.messages import continued, is_cut_off, read_message
from mutualrl.trajectory import Message, ToolCall


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"role": "assistant", "content": "4"}, Message("assistant", "4")),
        ({"from": "gpt", "value": "4"}, Message("gpt", "4")),
        ({"message": {"role": "assistant", "content": "4"}, "token_ids": [1]}, Message("assistant", "4")),
        ({"role": "a", "content": [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]}, Message("a", "42")),
        ({"role": "a", "content": ["4", {"type": "image_url", "image_url": {}}]}, Message("a", "4", others=1)),
        ({"role": "a", "content": None, "reasoning_content": "hm"}, Message("a", "", "hm")),
        ({"role": "a", "content": "4", "thinking": "hm"}, Message("a", "4", "hm")),
        (
            {
                "role": "a",
                "content": [{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, {"text": "4"}],
            },
            Message("a", "4", "hm"),
        ),
        (
            {
                "role": "a",
                "content": "",
                "tool_calls": [{"id": "1"}, {"function": {"name": "add", "arguments": "[1]"}}],
            },
            Message("a", "", tool_calls=(ToolCall("", {}, "1"), ToolCall("add", "[1]"))),
        ),
        (
            {"role": "a", "function_call": {"name": "add", "arguments": '{"a": 1, "b": "1"}'}},
            Message("a", "", tool_calls=(ToolCall("add", {"a": 1, "b": "1"}),)),
        ),
        (
            {"role": "tool", "name": "add", "tool_call_id": "7", "content": "3"},
            Message("tool", "3", name="add", call_id="7"),
        ),
        ({"role": "a", "content": 4}, None),
        ({"content": "4"}, None),
        ("4", None),
    ],
)
def test_message_is_read(value: object, expected: Message | None) -> None:
    assert read_message(value) == expected


def test_reasoning_comes_first_in_a_block_of_its_own() -> None:
    assert Message("a", "4", " two and two \n").with_reasoning == "<think>\ntwo and two\n</think>\n\n4"
    assert Message("a", "4", " ").with_reasoning == "4"


@pytest.mark.parametrize(
    ("text", "taught"),
    [
        ("<think>\nhm\n</think>\n\n4", "hm\n</think>\n\n4"),  # the prompt has opened the block
        ("hm</think>4", "hm</think>4"),  # of a model whose prompt opens it, too
        ("4", None),
        ("<think>hm", None),
    ],
)
def test_a_block_that_the_prompt_opened_is_not_opened_again(text: str, taught: str | None) -> None:
    assert continued(text) == taught


def test_only_known_reasons_cut_a_text_off() -> None:
    assert [
        reason
        for reason in ("length", "LENGTH", "max_tokens", "stop", "eos", "tool_calls", None, 3)
        if is_cut_off(reason)
    ] == [*("length", "LENGTH", "max_tokens")]
