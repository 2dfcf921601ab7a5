r"""Task countdown: make a target from given numbers, each used once. Many expressions are right.

`Use each of 3, 4, 2, 7 exactly once, with + - * / and parentheses, to make 25.` is answered by any `\boxed{...}` with
such an expression, checked by a small grammar with exact rationals (`tasks.expressions`). Held-out problems share no
multiset of numbers and target with training ones. The group is how many numbers there are.

The data's solution comes in styles, a task each: `countdown` writes every step, then the expression; `countdown-bare`
the expression alone; `countdown-mirrored` every step of the same expression with the operands of + and * exchanged.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mutualrl.records import Prompt, prompt_id
from mutualrl.tasks.base import Split, TaskData, TaskSource, require_no_data
from mutualrl.tasks.boxed import completion_text, last_boxed
from mutualrl.tasks.expressions import Expression, ExpressionError, apply, number, parse

SIZES = (4, 5, 6)  # numbers of a problem
NUMBERS = range(1, 13)
TARGETS = range(1, 100)
LARGEST = 999  # no intermediate result of the data's solution is above this
TRAINING, HELD_OUT = 2000, 192  # problems of each size
SPLIT_SEED = 0
REWARD = "mutualrl.tasks.countdown:reaches_target"


@dataclass(frozen=True, slots=True)
class Problem:
    """Numbers in the order in which they are shown, and an expression that reaches the target."""

    numbers: tuple[int, ...]
    solution: Expression

    @property
    def target(self) -> int:
        """Return the target."""
        return int(self.solution.value)

    @property
    def key(self) -> tuple[tuple[int, ...], int]:
        """Return what makes two problems the same: the multiset of numbers, and the target."""
        return tuple(sorted(self.numbers)), self.target

    @property
    def prompt(self) -> str:
        """Return the question as a model sees it."""
        numbers = ", ".join(map(str, self.numbers))
        return (
            f"Use each of {numbers} exactly once, with + - * / and parentheses, to make {self.target}. "
            "Put the expression in \\boxed{}."
        )


def draw(size: int, rng: random.Random) -> Problem:
    """Return a random problem: numbers joined at random until one is left, with whole, positive steps."""
    while True:
        numbers = tuple(rng.choice(NUMBERS) for _ in range(size))
        parts = [number(value) for value in numbers]
        while len(parts) > 1:
            left, right = (parts.pop(rng.randrange(len(parts))) for _ in range(2))
            choices = [apply(operation, left, right) for operation in "+-*/" if operation != "/" or right.value != 0]
            sound = [each for each in choices if each.value.denominator == 1 and 0 < each.value <= LARGEST]
            if not sound:
                break
            parts.append(rng.choice(sound))
        if len(parts) == 1 and parts[0].value in TARGETS:
            return Problem(numbers, parts[0])


def distinct(size: int, count: int, rng: random.Random, taken: set[tuple[tuple[int, ...], int]]) -> list[Problem]:
    """Return `count` problems, no two alike and none alike to one that is taken; they are taken then."""
    problems: list[Problem] = []
    while len(problems) < count:
        problem = draw(size, rng)
        if problem.key not in taken:
            taken.add(problem.key)
            problems.append(problem)
    return problems


def held_out() -> list[Problem]:
    """Return the held-out problems, the sizes alternating."""
    taken: set[tuple[tuple[int, ...], int]] = set()
    by_size = [distinct(size, HELD_OUT, random.Random(f"{SPLIT_SEED} countdown {size}"), taken) for size in SIZES]
    return [problem for row in zip(*by_size, strict=True) for problem in row]


def training(seed: int) -> list[Problem]:
    """Return the training problems of a seed, the sizes alternating; none is held out."""
    taken = {problem.key for problem in held_out()}
    by_size = [distinct(size, TRAINING, random.Random(f"{seed} countdown training {size}"), taken) for size in SIZES]
    return [problem for row in zip(*by_size, strict=True) for problem in row]


# ---- the data's solution, in styles


def steps_and_result(expression: Expression) -> str:
    r"""Return every step with its result, then the expression: ` 3+4=7 7*2=14 \boxed{(3+4)*2}`."""
    lines = [f" {left.value}{step.operation}{right.value}={step.value}" for step, left, right in expression.steps()]
    return "".join(lines) + bare(expression)


def bare(expression: Expression) -> str:
    r"""Return the expression alone: ` \boxed{(3+4)*2}`."""
    return f" \\boxed{{{expression}}}"


def mirrored(expression: Expression) -> str:
    r"""Return every step of the expression with the operands of + and * exchanged: ` 4+3=7 2*7=14 \boxed{2*(4+3)}`."""
    return steps_and_result(_exchanged(expression))


def _exchanged(expression: Expression) -> Expression:
    if expression.left is None or expression.right is None:
        return expression
    left, right = _exchanged(expression.left), _exchanged(expression.right)
    if expression.operation in "+*":
        left, right = right, left
    return apply(expression.operation, left, right)


STYLES: Mapping[str, Callable[[Expression], str]] = {
    "countdown": steps_and_result,
    "countdown-bare": bare,
    "countdown-mirrored": mirrored,
}


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
    """Return 1.0 for each completion that reaches its target, else 0.0: a reward function as TRL calls it."""
    rows = zip(completions, numbers, target, strict=True)
    return [float(reached(completion_text(completion), own, goal)) for completion, own, goal in rows]


class CountdownTask:
    """Problems made from a seed. Needs no file."""

    max_new_tokens = 256
    takes_data = False
    reads = "problems made from a seed"
    reward = (REWARD,)

    def __init__(self, name: str) -> None:
        self.name = name
        self._style = STYLES[name]

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return prompts of a split; training problems are drawn from `source.seed`.

        Raises UsageError when a data file is named: the problems are generated.
        """
        require_no_data(self.name, source)
        train = split == "train"
        prompts = [
            Prompt(
                prompt_id("countdown", split, place, problem.prompt),  # of every style: the same problems
                problem.prompt,
                str(problem.target),
                f"{len(problem.numbers)} numbers",
                columns={"numbers": list(problem.numbers), "target": problem.target},
                solution=self._style(problem.solution),
            )
            for place, problem in enumerate(training(source.seed) if train else held_out())
        ]
        return TaskData(prompts, "training problems" if train else "held-out problems")


COUNTDOWN_TASKS = tuple(CountdownTask(name) for name in STYLES)
