"""Specification of the embedded pool. Numbers only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TinySpec:
    """One embedded policy: architecture, tokenizer, and what its warm-up teaches it.

    `strong` is the operation of its warm-up; `scarce` is the share of warm-up examples of the other one,
    drawn from `scarce_problems` different problems. `ada` and `bob` are the pool `tiny`; `cyd`, middling at both
    operations, joins them in `tiny-three`; `dee` and `eli` know much of the same, and are `tiny-near`.
    """

    architecture: Literal["qwen3", "llama", "olmo2"]
    isolate_digits: bool
    strong: Literal["+", "*"]
    scarce: float
    scarce_problems: int
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
    "ada": TinySpec("qwen3", isolate_digits=True, strong="+", scarce=0.03, scarce_problems=8, steps=450),
    "bob": TinySpec("llama", isolate_digits=False, strong="*", scarce=0.03, scarce_problems=8, steps=250),
    "cyd": TinySpec(
        "olmo2", isolate_digits=False, strong="+", scarce=0.5, scarce_problems=60, steps=350, vocabulary=264
    ),
    "dee": TinySpec("qwen3", isolate_digits=True, strong="+", scarce=0.3, scarce_problems=60, steps=450, seed=1),
    "eli": TinySpec("llama", isolate_digits=False, strong="*", scarce=0.3, scarce_problems=60, steps=250, seed=1),
}
