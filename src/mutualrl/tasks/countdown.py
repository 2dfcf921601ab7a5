r"""Task countdown: make a target from given numbers, each used once. Many expressions are correct.

An answer to `Use each of 3, 4, 2, 7 exactly once, with + - * / and parentheses, to make 25.` is any `\boxed{...}` with
such an expression, checked by a small grammar with exact rationals (`tasks.expressions`). Held-out problems share no
multiset of numbers and target with training ones. The group is the number of numbers: four to six, and always three in
task `countdown-three`.

The data has solutions in several styles, one column each: `solution` writes every step and then the expression, the
larger operand of + and * first; `mirrored` likewise, the smaller operand first; `bare` writes only the expression of
`solution`. A source `recorded: task` has those of one column.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from mutualrl.records import Prompt, prompt_id
from mutualrl.tasks.base import Split, TaskData, TaskSource, require_no_data
from mutualrl.tasks.boxed import completion_text, last_boxed
from mutualrl.tasks.expressions import Expression, ExpressionError, apply, number, parse

SIZES: Mapping[str, tuple[int, ...]] = {"countdown": (4, 5, 6), "countdown-three": (3,)}  # numbers per problem
NUMBERS = range(1, 13)  # with four to six numbers; three are drawn from a wider range, or there were too few problems
NUMBERS_OF_THREE = range(1, 21)
TARGETS = range(1, 100)
LARGEST = 999  # no intermediate result of the data's solution is above this
TRAINING, HELD_OUT = 3000, 576  # problems
SPLIT_SEED = 0
REWARD = "mutualrl.tasks.countdown:reaches_target"


@dataclass(frozen=True, slots=True)
class CountdownProblem:
    """Numbers in the order shown, and an expression that reaches the target."""

    numbers: tuple[int, ...]
    solution: Expression

    @property
    def target(self) -> int:
        """Return the target."""
        return int(self.solution.value)

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Return the identity of a problem: the multiset of numbers, and the target."""
        return tuple(sorted(self.numbers)), self.target

    @property
    def prompt(self) -> str:
        """Return the prompt's text."""
        numbers = ", ".join(map(str, self.numbers))
        return (
            f"Use each of {numbers} exactly once, with + - * / and parentheses, to make {self.target}. "
            "Put the expression in \\boxed{}."
        )


def draw(size: int, rng: random.Random) -> CountdownProblem:
    """Return a random problem: numbers are combined at random until one is left; every step is a positive integer."""
    while True:
        numbers = tuple(rng.choice(NUMBERS_OF_THREE if size == 3 else NUMBERS) for _ in range(size))
        parts = [number(value) for value in numbers]
        while len(parts) > 1:
            left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            choices = [apply(operation, left, right) for operation in "+-*/" if operation != "/" or right.value != 0]
            valid = [each for each in choices if each.value.denominator == 1 and 0 < each.value <= LARGEST]
            if not valid:
                break
            parts.append(rng.choice(valid))
        if len(parts) == 1 and parts[0].value in TARGETS:
            return CountdownProblem(numbers, parts[0])


def distinct(
    size: int, count: int, rng: random.Random, taken: set[tuple[tuple[int, ...], int]]
) -> list[CountdownProblem]:
    """Return `count` different problems, none of them in `taken`, and add them to it."""
    problems: list[CountdownProblem] = []
    while len(problems) < count:
        problem = draw(size, rng)
        if problem.key not in taken:
            taken.add(problem.key)
            problems.append(problem)
    return problems


@cache
def held_out(sizes: tuple[int, ...]) -> tuple[CountdownProblem, ...]:
    """Return the held-out problems, the sizes alternating."""
    return _alternating(sizes, HELD_OUT, f"{SPLIT_SEED} countdown", set())


@cache
def training(sizes: tuple[int, ...], seed: int) -> tuple[CountdownProblem, ...]:
    """Return the training problems of a seed, the sizes alternating; none is held out."""
    return _alternating(sizes, TRAINING, f"{seed} countdown training", {problem.key for problem in held_out(sizes)})


def _alternating(
    sizes: tuple[int, ...], count: int, seed: str, taken: set[tuple[tuple[int, ...], int]]
) -> tuple[CountdownProblem, ...]:
    by_size = [distinct(size, count // len(sizes), random.Random(f"{seed} {size}"), taken) for size in sizes]
    return tuple(problem for row in zip(*by_size, strict=True) for problem in row)


# ---- styles of the data's solution


def in_order(expression: Expression, *, larger_first: bool) -> Expression:
    """Return the expression with the operands of every + and * in order of their values."""
    if expression.left is None or expression.right is None:
        return expression
    left = in_order(expression.left, larger_first=larger_first)
    right = in_order(expression.right, larger_first=larger_first)
    if expression.operation in "+*" and left.value != right.value and (left.value < right.value) == larger_first:
        left, right = right, left
    return apply(expression.operation, left, right)


def steps_and_result(expression: Expression) -> str:
    r"""Return every step with its result, then the expression: ` 4+3=7 7*2=14 \boxed{(4+3)*2}`."""
    lines = [f" {left.value}{step.operation}{right.value}={step.value}" for step, left, right in expression.steps()]
    return "".join(lines) + f" \\boxed{{{expression}}}"


def solution(expression: Expression) -> str:
    """Return the steps and the result, the larger operand of + and * first."""
    return steps_and_result(in_order(expression, larger_first=True))


def mirrored(expression: Expression) -> str:
    """Return the steps and the result, the smaller operand of + and * first."""
    return steps_and_result(in_order(expression, larger_first=False))


def bare(expression: Expression) -> str:
    r"""Return only the expression of `solution`: ` \boxed{(4+3)*2}`."""
    return f" \\boxed{{{in_order(expression, larger_first=True)}}}"


STYLES: Mapping[str, Callable[[Expression], str]] = {"solution": solution, "mirrored": mirrored, "bare": bare}


# ---- reward and task


def reached(text: str, numbers: Sequence[int], target: int) -> bool:
    r"""Return whether the last `\boxed{...}` of a text is an expression of exactly these numbers with this value."""
    content = last_boxed(text)
    if content is None:
        return False
    try:
        expression = parse(content)
    except ExpressionError:
        return False
    return sorted(expression.numbers) == sorted(numbers) and expression.value == target


def reaches_target(
    completions: list[str | list[dict[str, str]]], numbers: list[list[int]], target: list[int], **_: object
) -> list[float]:
    """Return 1.0 for each completion that reaches its target, else 0.0: a reward function in TRL's form."""
    rows = zip(completions, numbers, target, strict=True)
    return [float(reached(completion_text(completion), operands, goal)) for completion, operands, goal in rows]


class CountdownTask:
    """Task of problems generated from a seed; needs no file."""

    max_new_tokens = 256
    takes_data = False
    reads = "problems made from a seed"
    reward = (REWARD,)

    def __init__(self, name: str) -> None:
        self.name = name
        self._sizes = SIZES[name]

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return the prompts of a split; training problems are drawn from `source.seed`.

        Raises UsageError if a data file is given: the problems are generated.
        """
        require_no_data(self.name, source)
        train = split == "train"
        prompts = []
        for place, problem in enumerate(training(self._sizes, source.seed) if train else held_out(self._sizes)):
            texts = {style: write(problem.solution) for style, write in STYLES.items()}
            prompts.append(
                Prompt(
                    prompt_id(self.name, split, place, problem.prompt),
                    problem.prompt,
                    str(problem.target),
                    f"{len(problem.numbers)} numbers",
                    columns={"numbers": list(problem.numbers), "target": problem.target, **texts},
                    solution=texts["solution"],
                )
            )
        return TaskData(prompts, "training problems" if train else "held-out problems")


COUNTDOWN_TASKS = tuple(CountdownTask(name) for name in SIZES)
