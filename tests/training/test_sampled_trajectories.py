"""What is trained of trajectories that the policies of `tiny-tools` sample themselves, of both families.

The oracle of the tokens is the generation; that of the mask are the messages, rendered by code of this file, which
shares nothing with the package's or TRL's.
"""

from __future__ import annotations

import itertools
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from agent_harness import PROMPTS, run
from transformers.utils import get_json_schema

from mutualrl.adapter.data import as_dataset
from mutualrl.adapter.rendering import Renderer, Unrenderable
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.tasks.boxed import boxed_reward
from mutualrl.tasks.calculator import calculate
from mutualrl.tiny import path_of
from mutualrl.training.trainer import MutualGRPOTrainer
from mutualrl.trajectory import Message
from training_harness import Logs, config, sharing

pytestmark = pytest.mark.slow
ROUNDS, ROWS = 8, 32


class Watching(MutualGRPOTrainer):
    """Trainer that keeps what it samples by turn, and of each rollout its messages and what its loss reads."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.sampled: list[list[int]] = []
        self.rollouts: list[tuple[tuple[Message, ...], list[int], list[int]]] = []
        super().__init__(*args, **kwargs)

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        rows, logprobs = super()._generate_single_turn(*args, **kwargs)
        self.sampled += [list(row) for row in rows]
        return rows, logprobs

    def on_generated(self, batch: Any, generation: Any) -> None:
        loss_mask = (batch["completion_mask"] * batch["tool_mask"]).tolist()
        for row, ids in enumerate(generation.completion_ids):
            messages = generation.turns[row].run.messages
            assert batch["completion_ids"][row][: len(ids)].tolist() == list(ids)
            assert not any(loss_mask[row][len(ids) :])
            self.rollouts.append((messages, list(ids), loss_mask[row][: len(ids)]))
        super().on_generated(batch, generation)


def written(message: Message, family: str) -> str:
    """Return a message as its family's template has it."""
    if message.role == "tool":
        return f"<tool>{message.text}<eos>"
    calls = []
    for call in message.tool_calls:
        if family == "jan":
            calls.append(json.dumps({"name": call.name, "arguments": dict(call.arguments)}, ensure_ascii=False))
        else:
            calls.append("|".join([call.name, *(f"{key}={value}" for key, value in call.arguments.items())]))
    return message.text + "".join(f"<call>{call}</call>" for call in calls) + "<eos>"


def rendered(messages: tuple[Message, ...], family: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return ids and mask of a rollout from its messages alone."""
    ids: list[int] = []
    mask: list[int] = []
    for place, message in enumerate(messages):
        text = written(message, family)
        if message.role == "tool" and messages[place + 1 : place + 2] and messages[place + 1].role == "assistant":
            text += "<bot>"
        piece = tokenizer.encode(text, add_special_tokens=False)
        ids += piece
        mask += [int(message.role == "assistant")] * len(piece)
    return ids, mask


def spans(ids: list[int], mask: list[int]) -> list[tuple[int, list[int]]]:
    """Return the runs of equal mask, each with its ids."""
    groups = itertools.groupby(zip(mask, ids, strict=True), key=lambda pair: pair[0])
    return [(sampled, [token for _, token in pairs]) for sampled, pairs in groups]


@pytest.mark.parametrize("family", ["jan", "kim"])
def test_trained_tokens_are_those_that_the_policy_sampled(tmp_path: Path, family: str) -> None:
    tokenizer = load_tokenizer(str(path_of(family)))
    keys = {"max_completion_length": 64, "max_steps": ROUNDS, "num_iterations": 1, "beta": 0.0}
    trainer = Watching(
        model=str(path_of(family)),
        args=config(tmp_path / "out", **keys),
        processing_class=tokenizer,
        callbacks=[Logs()],
        sharing=sharing(tmp_path / "x", "grpo"),
        reward_funcs=boxed_reward,
        train_dataset=as_dataset(PROMPTS, tokenizer),
        tools=[calculate],
    )
    run(trainer)
    assert len(trainer.rollouts) == ROUNDS * ROWS
    turns = {tuple(ids) for ids in trainer.sampled}
    with_calls = canonical = rebuilt = 0
    renderer = Renderer(tokenizer, [get_json_schema(calculate)])
    for messages, ids, mask in trainer.rollouts:
        parts = spans(ids, mask)
        for sampled, part in parts:
            text = tokenizer.decode(part)
            if sampled:
                assert tuple(part) in turns, text  # a turn as it was sampled, end token included
            else:
                assert text.startswith("<tool>")
        turns_written = sum(message.role == "assistant" for message in messages)
        assert sum(sampled for sampled, _ in parts) == turns_written
        with_calls += len(parts) > 1
        own_ids, own_mask = rendered(messages, family, tokenizer)
        if own_ids == ids:
            assert own_mask == mask
            canonical += 1
            with suppress(Unrenderable):  # a text that TRL could not read as calls
                row = renderer.row([Message("user", "any")], messages)
                assert (row.ids, row.mask) == (ids, mask)
                rebuilt += 1
    assert rebuilt > ROUNDS * ROWS // 2
    assert with_calls > ROUNDS * ROWS // 4
    assert canonical > ROUNDS * ROWS * 3 // 4
