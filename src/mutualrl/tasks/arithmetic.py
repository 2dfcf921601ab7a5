r"""Task of the embedded pool: running sums and running products, a line of working, a boxed answer.

The answer to `4*3*5:` is ` 12 60 \boxed{60}`, to `4+3+5:` it is ` 7 12 \boxed{12}`. The operation is the group.
Held-out problems are never training problems: the split is drawn once, from a separate seed.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Literal

from mutualrl.records import Prompt, prompt_id
from mutualrl.tasks.base import Split, TaskData, TaskSource, require_no_data

Operation = Literal["+", "*"]
OPERATIONS: tuple[Operation, ...] = ("+", "*")
OPERANDS = range(2, 7)
LENGTHS = (2, 3)  # operands per problem
LARGEST = 99  # no intermediate result above this: two digits suffice
HELD_OUT = 32  # problems per operation
SPLIT_SEED = 0


@dataclass(frozen=True, slots=True)
class ArithmeticProblem:
    """Operation applied to operands from left to right."""

    operation: Operation
    operands: tuple[int, ...]

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the running results, the last of which is the answer."""
        apply = (lambda a, b: a + b) if self.operation == "+" else (lambda a, b: a * b)
        return tuple(itertools.accumulate(self.operands, apply))

    @property
    def prompt(self) -> str:
        """Return the prompt's text."""
        return self.operation.join(map(str, self.operands)) + ":"

    @property
    def answer(self) -> str:
        """Return the canonical answer."""
        return str(self.steps[-1])

    @property
    def working(self) -> str:
        r"""Return a correct solution: every running result, then the boxed answer."""
        return "".join(f" {step}" for step in self.steps[1:]) + f" \\boxed{{{self.answer}}}"


def all_problems(operation: Operation) -> list[ArithmeticProblem]:
    """Return every problem of an operation within the ranges, in a fixed order.

    Operands whose sum equals their product are excluded: they do not distinguish the skills.
    """
    problems = []
    for length in LENGTHS:
        for operands in itertools.product(OPERANDS, repeat=length):
            problem, other = (
                ArithmeticProblem(operation, operands),
                ArithmeticProblem("+" if operation == "*" else "*", operands),
            )
            if max(problem.steps) <= LARGEST and problem.answer != other.answer:
                problems.append(problem)
    return problems


def split_problems(operation: Operation) -> tuple[list[ArithmeticProblem], list[ArithmeticProblem]]:
    """Return the training and held-out problems of an operation, which are disjoint."""
    problems = all_problems(operation)
    held_out = random.Random(f"{SPLIT_SEED}{operation}").sample(problems, HELD_OUT)
    chosen = set(held_out)
    return [p for p in problems if p not in chosen], held_out


class ArithmeticTask:
    """Task of problems generated from a seed; needs no file."""

    name = "arithmetic"
    max_new_tokens = 64
    takes_data = False
    reads = "problems made from a seed"

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return the prompts of a split, the operations alternating; `source.seed` sets the training order.

        Raises UsageError if a data file is given: the problems are generated.
        """
        require_no_data(self.name, source)
        train = split == "train"
        by_operation = [split_problems(op)[0 if train else 1] for op in OPERATIONS]
        if train:
            rng = random.Random(source.seed)
            size = max(len(problems) for problems in by_operation)
            by_operation = [_balanced(problems, size, rng) for problems in by_operation]
        mixed = [p for pair in itertools.zip_longest(*by_operation) for p in pair if p is not None]
        prompts = [
            Prompt(prompt_id(self.name, split, i, p.prompt), p.prompt, p.answer, p.operation, solution=p.working)
            for i, p in enumerate(mixed)
        ]
        return TaskData(prompts, "training problems" if train else "held-out problems")


def _balanced(problems: list[ArithmeticProblem], size: int, rng: random.Random) -> list[ArithmeticProblem]:
    """Return `size` problems in random order, whose counts differ by at most one."""
    repeated: list[ArithmeticProblem] = []
    while len(repeated) < size:
        repeated += rng.sample(problems, len(problems))
    return repeated[:size]
