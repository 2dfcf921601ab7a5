"""Small trainings with tools in this process: the embedded policy `jan` on scripted turns, with real tools."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, set_seed

from mutualrl.adapter.data import as_dataset
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.records import Prompt, Rollout
from mutualrl.see import Exchange
from mutualrl.sources.source import Source
from mutualrl.tasks import TaskSource, get_task
from mutualrl.tasks.boxed import boxed_reward
from mutualrl.tasks.calculator import calculate
from mutualrl.tiny import path_of
from mutualrl.training.trainer import MutualGRPOTrainer
from mutualrl.trajectory import Message, ToolCall, Trajectory
from training_harness import Logs, config, sharing

JAN = path_of("jan")
PROMPTS = [p for p in get_task("calculator").read("train", TaskSource()).prompts if p.group != "repeat"][:8]
BY_ID = {prompt.id: prompt for prompt in PROMPTS}
WORKED = "What worked before"  # begins the hint

Turn = Callable[[str, list[str]], str]  # prompt, results so far -> what the policy writes


def call(name: str = "calculate", **arguments: Any) -> str:
    """Return a call as `jan` writes it."""
    import json

    return "<call>" + json.dumps({"name": name, "arguments": arguments}) + "</call>"


def numbers(prompt: str) -> dict[str, Any]:
    """Return the right call's arguments."""
    a, operation, b = re.match(r"(\d+) (\w+) (\d+)\?", prompt).groups()  # type: ignore[union-attr]
    return {"operation": operation, "a": int(a), "b": int(b)}


def one_call(prompt: str, results: list[str]) -> str:
    """Fail without a hint; with one, call once and answer."""
    if WORKED not in prompt:
        return "\\boxed{0}"
    return f"\\boxed{{{results[-1]}}}" if results else call(**numbers(prompt))


def two_calls(prompt: str, results: list[str]) -> str:
    """Fail without a hint; with one, call twice, with a word before the second call."""
    if WORKED not in prompt:
        return "\\boxed{0}"
    if len(results) == 2:
        return f"\\boxed{{{results[-1]}}}"
    return "".join(["17" * len(results), call(**numbers(prompt))])


def after_an_error(prompt: str, results: list[str]) -> str:
    """Fail without a hint; with one, call wrongly, then rightly."""
    if WORKED not in prompt:
        return "\\boxed{0}"
    if not results:
        return call(**{**numbers(prompt), "operation": "multiply"})
    return call(**numbers(prompt)) if "error" in results[-1] else f"\\boxed{{{results[-1]}}}"


class Scripted(MutualGRPOTrainer):
    """Trainer whose policy writes what a script says; TRL parses it and calls the tools."""

    script: Turn = staticmethod(one_call)

    def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> tuple[list[list[int]], None]:
        tokenizer = self._tokenizer
        rows = []
        for ids in prompt_ids:
            user, *rest = tokenizer.decode(ids).split("<eos>")
            results = [part.removeprefix("<tool>") for part in rest if part.startswith("<tool>")]
            text = type(self).script(user.removeprefix("<user>"), results) + "<eos>"
            rows.append(tokenizer.encode(text, add_special_tokens=False))
        return rows, None


def assert_learns_sampled_tokens(trainer: Any, kept: Sequence[torch.Tensor], pieces: Callable[[Prompt], Any]) -> int:
    """Compare loss and gradients of a trained step with a version from the formula: 0.3 times the mean over rows of the
    mean NLL of the sampled tokens. Return their number. `pieces`: of a row, texts with whether each was sampled."""
    tokenizer, model = load_tokenizer(str(JAN)), AutoModelForCausalLM.from_pretrained(JAN)
    losses, tokens = [], 0
    for prompt in PROMPTS:
        first = tokenizer.encode(f"<user>{prompt.text}<eos><bot>", add_special_tokens=False)
        encoded = [(tokenizer.encode(text, add_special_tokens=False), sampled) for text, sampled in pieces(prompt)]
        ids = [token for piece, _ in encoded for token in piece]
        learnt = torch.tensor([sampled for piece, sampled in encoded for _ in piece])
        logits = model(torch.tensor([first + ids])).logits[0, len(first) - 1 : -1]
        logps = torch.log_softmax(logits, -1).gather(1, torch.tensor(ids)[:, None])[:, 0]
        losses.append(-logps[learnt].mean())
        tokens += int(learnt.sum())
    loss = 0.3 * torch.stack(losses).mean()
    loss.backward()
    for one, parameter in zip(kept, model.parameters(), strict=True):
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert torch.allclose(one, expected, atol=1e-6), float((one - expected).abs().max())
    (row,) = trainer.logs
    assert row["loss"] == pytest.approx(loss.item(), abs=1e-6)
    return tokens


def plan_of(prompt: Prompt) -> str:
    """Return a peer's run: one call, its result and the answer."""
    made = ToolCall("calculate", numbers(prompt.text))
    return Trajectory.of_run(
        [
            Message("assistant", "", tool_calls=(made,), sampled=True),
            Message("tool", prompt.answer, name="calculate"),
            Message("assistant", f"\\boxed{{{prompt.answer}}}", sampled=True),
        ]
    ).stored


def publish_plans(root: Path, rounds: Sequence[Sequence[str]], messages: Callable[[Prompt], str] = plan_of) -> None:
    """Publish rounds of bob, who solves every prompt with one call."""
    exchange = Exchange(root, "bob", "script")
    for number, prompt_ids in enumerate(rounds):
        records = [
            Rollout(
                key,
                0,
                1.0,
                True,
                trajectory=Trajectory.of_stored(f"\\boxed{{{BY_ID[key].answer}}}", messages(BY_ID[key])),
            )
            for key in dict.fromkeys(prompt_ids)
        ]
        exchange.publish(number, records, number)


def trainer_of(
    output: Path,
    exchange: Path,
    kind: type[MutualGRPOTrainer] = Scripted,
    *,
    keys: Any = None,
    regime: str = "hinted",
    sources: Sequence[Source] = (),
    **settings: Any,
) -> Any:
    """Build a trainer of a regime with these settings; all eight prompts are in every round. `keys`: of GRPOConfig."""
    own = dict(keys or {})
    if regime == "hinted":
        settings = {"hint": "plan", "samples": 1, "weight": 0.3, **settings}
    tools = {"tools": own.pop("tools", [calculate])} if "environment_factory" not in own else {}
    tools |= {key: own.pop(key) for key in ("environment_factory", "reward_funcs", "train_dataset") if key in own}
    tokenizer = load_tokenizer(str(JAN))
    logs = Logs()
    arguments: dict[str, Any] = {
        "reward_funcs": boxed_reward,
        "train_dataset": as_dataset(PROMPTS, tokenizer),
        **tools,
    }
    trainer: Any = kind(
        model=str(JAN),
        args=config(output, **{"max_completion_length": 64, "max_steps": 1, "beta": 0.0, "max_grad_norm": 1e9, **own}),
        processing_class=tokenizer,
        callbacks=[logs],
        sharing=replace(sharing(exchange, regime, sources=sources, **settings), max_length=None),
        **arguments,
    )
    trainer.logs = logs.rows
    return trainer


def run(trainer: Any) -> Any:
    """Train, seeded."""
    set_seed(11)
    trainer.train()
    return trainer
