"""Specifications of the embedded policies. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """Warm-up on sums and products. `strong`: the operation that it teaches; `scarce`: the fraction of examples of the
    other one, drawn from `scarce_problems` different problems."""

    strong: Literal["+", "*"]
    scarce: float
    scarce_problems: int


@dataclass(frozen=True, slots=True)
class Countdown:
    """Warm-up on countdown with three numbers and solutions in one style of the task (`tasks.countdown`). `hinted`:
    fraction of examples whose prompt shows a solution in the other style, as the regime `hinted` does."""

    style: Literal["solution", "mirrored"]
    problems: int = 6_000
    hinted: float = 0.0

    @property
    def other_style(self) -> Literal["solution", "mirrored"]:
        """Return the style of the hints."""
        return "mirrored" if self.style == "solution" else "solution"


@dataclass(frozen=True, slots=True)
class Tools:
    """Warm-up on the calculator. `calls`: how the policy writes its calls. `weak`: the kind of problem that it fails,
    since it calls with an operation that there is not ("how") or guesses in place of a call ("when"). `over_calls`: the
    fraction of calls where none is needed. `hinted`: fraction of examples whose prompt shows a plan, which is
    followed."""

    calls: Literal["json", "fields"]
    weak: Literal["how", "when"]
    over_calls: float = 0.0
    hinted: float = 0.4


@dataclass(frozen=True, slots=True)
class TinySpec:
    """One embedded policy: architecture, tokenizer, and its warm-up.

    `ada` and `bob` are the pool `tiny`; `cyd`, average at both operations, joins them in `tiny-three`; `dee` and
    `eli`, whose skills overlap, are `tiny-near`. `fay` and `gus` are `tiny-countdown`: equally able, in different
    styles. `hal` and `ivy` are `tiny-hints`: each can say in its own style what the other's solution says. `jan` and
    `kim` are `tiny-tools`: jan knows when to call the calculator, kim how.
    """

    architecture: Literal["qwen3", "llama", "olmo2"]
    isolate_digits: bool
    warm_up: Arithmetic | Countdown | Tools
    steps: int
    learning_rate: float = 3e-3
    batch_size: int = 64
    weight_decay: float = 0.01
    seed: int = 0
    hidden: int = 64
    intermediate: int = 256
    layers: int = 2
    heads: int = 2
    head_dim: int = 32
    vocabulary: int = 512


POLICIES: dict[str, TinySpec] = {
    "ada": TinySpec("qwen3", isolate_digits=True, warm_up=Arithmetic("+", 0.03, 8), steps=450),
    "bob": TinySpec("llama", isolate_digits=False, warm_up=Arithmetic("*", 0.03, 8), steps=250),
    "cyd": TinySpec("olmo2", isolate_digits=False, warm_up=Arithmetic("+", 0.5, 60), steps=350, vocabulary=264),
    "dee": TinySpec("qwen3", isolate_digits=True, warm_up=Arithmetic("+", 0.3, 60), steps=450, seed=1),
    "eli": TinySpec("llama", isolate_digits=False, warm_up=Arithmetic("*", 0.3, 60), steps=250, seed=1),
    "fay": TinySpec("qwen3", isolate_digits=False, warm_up=Countdown("solution"), steps=700),
    "gus": TinySpec("llama", isolate_digits=True, warm_up=Countdown("mirrored"), steps=700),
    "hal": TinySpec("qwen3", isolate_digits=False, warm_up=Countdown("solution", hinted=0.5), steps=1000),
    "ivy": TinySpec("llama", isolate_digits=True, warm_up=Countdown("mirrored", hinted=0.5), steps=1000),
    "jan": TinySpec("qwen3", isolate_digits=True, warm_up=Tools("json", "how"), steps=1200, seed=2),
    "kim": TinySpec("llama", isolate_digits=False, warm_up=Tools("fields", "when", over_calls=0.5), steps=1200, seed=2),
}
