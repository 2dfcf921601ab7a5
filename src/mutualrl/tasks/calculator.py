r"""Task of the pool `tiny-tools`: answers that need a calculator, and answers that need none.

`37 times 58?` and `37 plus 58?` need `calculate`, which takes integers, not text; `repeat 37 58` needs no call. The
answer is `\boxed{...}`. The kind is the group, and the column `needs_tool` says whether a call is needed: a call where
none is counts as over-calling.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Literal

from mutualrl.records import Prompt, prompt_id
from mutualrl.tasks.base import Split, TaskData, TaskSource, require_no_data

Kind = Literal["plus", "times", "repeat"]
KINDS: tuple[Kind, ...] = ("plus", "times", "repeat")
NUMBERS = range(11, 100)
TRAINING, HELD_OUT = 900, 192  # problems, a third of each kind
SPLIT_SEED = 0


def calculate(operation: str, a: int, b: int) -> int:
    """Calculate with two integers.

    Args:
        operation: Either plus or times.
        a: The first number.
        b: The second number.

    Returns:
        The result.
    """
    for name, value in (("a", a), ("b", b)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} is text")
    results = {"plus": a + b, "times": a * b}
    if operation not in results:
        raise ValueError("unknown operation")
    return results[operation]


@dataclass(frozen=True, slots=True)
class CalculatorProblem:
    """Two numbers, and what is to be done with them."""

    kind: Kind
    a: int
    b: int

    @property
    def prompt(self) -> str:
        """Return the prompt's text."""
        return f"repeat {self.a} {self.b}" if self.kind == "repeat" else f"{self.a} {self.kind} {self.b}?"

    @property
    def answer(self) -> str:
        """Return the answer."""
        return f"{self.a} {self.b}" if self.kind == "repeat" else str(calculate(self.kind, self.a, self.b))

    @property
    def arguments(self) -> Mapping[str, int | str]:
        """Return the arguments of the call that gives the answer."""
        return {"operation": self.kind, "a": self.a, "b": self.b}


def draw(kind: Kind, count: int, rng: random.Random, taken: set[CalculatorProblem]) -> list[CalculatorProblem]:
    """Return `count` problems of a kind, none of them in `taken`, and add them to it."""
    problems: list[CalculatorProblem] = []
    while len(problems) < count:
        problem = CalculatorProblem(kind, rng.choice(NUMBERS), rng.choice(NUMBERS))
        if problem not in taken:
            taken.add(problem)
            problems.append(problem)
    return problems


@cache
def held_out() -> tuple[CalculatorProblem, ...]:
    """Return the held-out problems, the kinds alternating."""
    return _alternating(HELD_OUT, f"{SPLIT_SEED} calculator", set())


@cache
def training(seed: int) -> tuple[CalculatorProblem, ...]:
    """Return the training problems of a seed, the kinds alternating; none is held out."""
    return _alternating(TRAINING, f"{seed} calculator training", set(held_out()))


def _alternating(count: int, seed: str, taken: set[CalculatorProblem]) -> tuple[CalculatorProblem, ...]:
    by_kind = [draw(kind, count // len(KINDS), random.Random(f"{seed} {kind}"), taken) for kind in KINDS]
    return tuple(problem for row in zip(*by_kind, strict=True) for problem in row)


class CalculatorTask:
    """Task of problems generated from a seed; needs no file."""

    name = "calculator"
    max_new_tokens = 64
    takes_data = False
    reads = "problems made from a seed"

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return the prompts of a split; training problems are drawn from `source.seed`.

        Raises UsageError if a data file is given: the problems are generated.
        """
        require_no_data(self.name, source)
        train = split == "train"
        prompts = []
        for place, problem in enumerate(training(source.seed) if train else held_out()):
            prompts.append(
                Prompt(
                    prompt_id(self.name, split, place, problem.prompt),
                    problem.prompt,
                    problem.answer,
                    problem.kind,
                    messages=(("user", problem.prompt),),
                    columns={"needs_tool": problem.kind != "repeat"},
                )
            )
        return TaskData(prompts, "training problems" if train else "held-out problems")
