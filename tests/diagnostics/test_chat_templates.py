"""What survives a chat template: rows as TRL samples them, conversations that are kept, lost, or refused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import trl

from conftest import REPOSITORY, Cli
from mutualrl.adapter.rendering import Renderer, Unrenderable
from mutualrl.diagnostics.turns import KEPT, KINDS, check_template, check_turns, schema, tokenizer_of
from mutualrl.errors import UsageError
from mutualrl.regimes.losses import row_nll
from mutualrl.tiny import path_of
from mutualrl.trajectory import Message, ToolCall

TEMPLATES = Path(trl.__file__).parent / "chat_templates"


def renderer(name: str) -> Renderer:
    return Renderer(tokenizer_of(name), [schema()])


def conversation(random_: random.Random) -> tuple[list[Message], list[Message], list[str]]:
    """Return a conversation with calls, and the sentinels that stand in what the model says, in order."""
    sentinels = [f"q{random_.randrange(10**6)}z" for _ in range(3)]
    call = ToolCall("calculate", {"operation": sentinels[1], "a": random_.randrange(99), "b": random_.randrange(99)})
    result = Message("tool", str(random_.randrange(10**4)), name="calculate")
    said = Message("assistant", sentinels[0], tool_calls=(call,))
    if random_.random() < 0.5:
        return [Message("user", "hello there")], [said, result, Message("assistant", sentinels[2])], sentinels
    return [Message("user", "hello there")], [Message("assistant", sentinels[0])], sentinels[:1]


@pytest.mark.parametrize("family", ["jan", "kim"])
def test_what_is_trained_are_the_sampled_bodies_with_their_end_tokens(family: str) -> None:
    """2,000 random conversations: the trained ids, decoded, have the sentinels of the answers in order and no result,
    each body ends with the end token, and the whole row is the concatenation of its segments."""
    rows, random_ = renderer(f"tiny:{family}"), random.Random(0)
    tokenizer = rows.tokenizer
    for _ in range(1000):
        prompt, after, sentinels = conversation(random_)
        row = rows.row(prompt, after)
        trained = tokenizer.decode([token for token, mask in zip(row.ids, row.mask, strict=True) if mask])
        places = [trained.index(sentinel) for sentinel in sentinels]
        assert places == sorted(places)
        assert trained.count("<eos>") == sum(message.role == "assistant" for message in after)
        rest = tokenizer.decode([token for token, mask in zip(row.ids, row.mask, strict=True) if not mask])
        assert not any(sentinel in rest for sentinel in sentinels)
        for segment in row.segments:
            assert segment.ids == tokenizer.encode(segment.text, add_special_tokens=False)
            assert not segment.sampled or segment.ids[-1] == tokenizer.eos_token_id
        results = [message.text for message in after if message.role == "tool"]
        assert all(f"<tool>{result}<eos>" in rest for result in results)


@pytest.mark.parametrize("hostile", ["<eos>", "<bot>", "a <call>calculate</call>"])
def test_control_tokens_in_a_text_are_refused_and_other_markup_is_kept(hostile: str) -> None:
    rows = renderer("tiny:jan")
    with pytest.raises(Unrenderable, match="a text has the control token"):
        rows.row([Message("user", "hello")], [Message("assistant", hostile)])
    kept = "</parameter> <|im_start|>user {{ messages }} {% for x in y %}"
    row = rows.row([Message("user", "hello")], [Message("assistant", kept)])
    assert rows.tokenizer.decode(row.ids) == kept + "<eos>"


def test_argument_that_a_family_cannot_write_is_refused() -> None:
    """kim's calls are divided by bars: an argument with one would be read back as two."""
    call = ToolCall("calculate", {"operation": "plus|a=9", "a": 1, "b": 2})
    after = [Message("assistant", "", tool_calls=(call,))]
    with pytest.raises(Unrenderable, match="a call is left out or changed"):
        renderer("tiny:kim").row([Message("user", "hello")], after)
    assert renderer("tiny:jan").row([Message("user", "hello")], after).mask


@pytest.mark.parametrize(
    ("template", "lost", "markers"),
    [
        ("qwen3_training.jinja", set(), "more"),
        ("qwen2_5_training.jinja", {"reasoning", "reasoning and a call"}, "more"),
        ("gemma_training.jinja", {"system prompt", *list(KINDS)[3:]}, "more"),
        ("deepseekv3_training.jinja", set(KINDS), "not comparable"),
    ],
)
def test_known_templates_of_trl(template: str, lost: set[str], markers: str) -> None:
    (check,) = check_turns([str(TEMPLATES / template)])
    assert {kind for kind, found in check.kinds.items() if found != KEPT} == lost
    assert check.markers == markers


def test_markers_that_mark_what_is_sampled_are_named_so() -> None:
    tokenizer: Any = tokenizer_of("tiny:jan")
    bare = "{% for m in messages %}{% if m.role == 'assistant' %}<bot>"
    for block, found in (
        ("{% generation %}{{ m.content }}<eos>{% endgeneration %}", "as sampled"),
        ("{% generation %}{{ m.content }}{% endgeneration %}<eos>", "less"),
    ):
        tokenizer.chat_template = (
            bare + block + "{% else %}<user>{{ m.content }}<eos>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<bot>{% endif %}"
        )
        assert check_template("x", tokenizer).markers == found


def test_command_prints_what_is_lost_and_exits_with_3(cli_here: Cli, tmp_path: Path) -> None:
    shown = cli_here("thl-check", "--suite", "turns")
    assert shown.returncode == 3
    assert "| reasoning | lost | lost |" in shown.stdout
    assert "| parallel calls | kept | kept |" in shown.stdout
    whole = cli_here("thl-check", "--suite", "turns", "--source", TEMPLATES / "qwen3_training.jinja", "--json")
    assert whole.returncode == 0
    (template,) = json.loads(whole.stdout)["templates"]
    assert template["keeps_all"]
    assert set(template["kinds"]) == set(KINDS)
    refused = cli_here("thl-check", "--suite", "turns", "--limit", "3")
    assert refused.returncode == 2
    assert "--limit: no effect with --suite turns" in refused.stderr
    plain = cli_here("thl-check", "--suite", "turns", "--source", path_of("ada"))
    assert plain.returncode == 2
    assert "has no chat template" in plain.stderr


def test_a_tokenizer_without_a_template_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="tiny:ada: has no chat template"):
        tokenizer_of("tiny:ada")


def test_conversations_of_a_file_are_counted_and_their_losses_explained(cli_here: Cli, tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "calculate", "arguments": {"operation": "plus", "a": 1, "b": 2}}}
    asked = {"role": "user", "content": "one and two"}
    said = {"role": "assistant", "content": "three"}
    run = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "3"}, said]
    rows = [
        {"messages": [asked, said]},
        {"messages": run, "tools": [schema()]},
        {"messages": [asked, {**said, "reasoning_content": "one and two are three"}]},
    ]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = cli_here("thl-check", "--suite", "turns", "--conversations", path)
    assert shown.returncode == 3
    assert "| jan | 3 | 2 |" in shown.stdout.replace("tiny:", "")
    assert "1: the reasoning is left out or changed" in shown.stdout
    whole = cli_here(
        "thl-check",
        "--suite",
        "turns",
        "--conversations",
        path,
        "--source",
        TEMPLATES / "qwen3_training.jinja",
        "--json",
    )
    assert json.loads(whole.stdout)["templates"][0]["kept"] == 3
    path.write_text('{"text": "x"}\n')
    refused = cli_here("thl-check", "--suite", "turns", "--conversations", path)
    assert refused.returncode == 2
    assert "row 1: found no conversation with an answer" in refused.stderr


def pieces_of(message: Message) -> list[str]:
    """Return what the model says in a message, each part once."""
    arguments = [str(value) for call in message.tool_calls for value in dict(call.arguments).values()]
    names = [call.name for call in message.tool_calls]
    return [text for text in (message.reasoning, message.text, *names, *arguments) if text]


@pytest.fixture(scope="module")
def jan() -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path_of("jan"))


def test_only_the_models_turns_have_a_gradient_with_every_template_and_kind(jan: Any) -> None:
    """For each of TRL's templates and each kind that it keeps: the ids whose log-probs have a gradient, decoded, are the
    model's messages and end where a turn ends; no result and no text of a user has one. By a tiny model's own loss."""
    kept = 0
    for path in sorted(TEMPLATES.glob("*_training.jinja")):
        rows = renderer(str(path))
        for kind, (prompt, after) in KINDS.items():
            try:
                row = rows.row(prompt, after)
            except Unrenderable:
                continue
            kept += 1
            ids, mask = torch.tensor([row.prompt_ids + row.ids]), torch.tensor([row.mask]).bool()
            logits = jan(ids).logits[:, len(row.prompt_ids) - 1 : -1]
            logps = torch.log_softmax(logits, -1).gather(2, ids[:, len(row.prompt_ids) :, None])[..., 0]
            logps.retain_grad()
            row_nll(logps, mask).sum().backward()
            learnt = logps.grad[0] != 0
            trained = rows.tokenizer.decode(ids[0, len(row.prompt_ids) :][learnt])
            context = rows.tokenizer.decode(ids[0, len(row.prompt_ids) :][~learnt])
            place = 0
            for message in after:
                if message.role == "assistant":
                    for piece in sorted(pieces_of(message), key=trained[place:].find):
                        found = trained.find(piece, place)
                        assert found >= 0, (path.name, kind, piece)
                        place = found
                else:
                    assert message.text in context, (path.name, kind)
            said = "".join(segment.text for segment in row.segments if segment.sampled)
            assert trained == said, (path.name, kind)
            for segment in row.segments:
                assert not segment.sampled or segment.text.endswith(("|>", ">", "]", rows.end)), (path.name, kind)
    assert kept >= 100


def table_of_trl() -> str:
    """Return the table of docs/agents.md: all of TRL's training templates."""
    paths = sorted(TEMPLATES.glob("*_training.jinja"))
    lines = [f"| TRL {trl.__version__} | {' | '.join(KINDS)} | markers |", "|---|" + "---|" * (len(KINDS) + 1)]
    for path, check in zip(paths, check_turns([str(path) for path in paths]), strict=True):
        cells = ["yes" if found == KEPT else "" for found in check.kinds.values()]
        lines.append(f"| {path.name.removesuffix('_training.jinja')} | {' | '.join(cells)} | {check.markers} |")
    return "\n".join(lines)


def test_documented_table_is_of_the_installed_templates() -> None:
    text = (REPOSITORY / "docs" / "agents.md").read_text()
    assert table_of_trl() in text, "write test_chat_templates.table_of_trl() into docs/agents.md"
