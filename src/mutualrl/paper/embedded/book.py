r"""Recorded texts for the embedded pool: the file behind `--source book=recorded:tiny:book`.

A row is a training problem of task `arithmetic` with two solutions (`generations`) and what its author claims of them
(`correct`). On purpose 40 % of the solutions are wrong and are claimed to be correct: only the verifier tells. The file
is written by `python -m mutualrl.paper.embedded.book`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from mutualrl.sources.recorded import embedded
from mutualrl.tasks.arithmetic import OPERATIONS, ArithmeticProblem, split_problems

WRONG = 0.4  # fraction of the solutions
SOLUTIONS = 2  # per problem


def rows() -> Iterator[dict[str, object]]:
    """Yield the rows of the file."""
    for operation in OPERATIONS:
        for problem in split_problems(operation)[0]:
            texts = [_solution(problem, number) for number in range(SOLUTIONS)]
            yield {"problem": problem.prompt, "generations": texts, "correct": [True] * SOLUTIONS}


def _solution(problem: ArithmeticProblem, number: int) -> str:
    """Return a solution: correct, or wrong in its last step. Which one depends on the problem and the number only."""
    digest = hashlib.sha256(f"{problem.prompt}/{number}".encode()).digest()
    if digest[0] / 256 >= WRONG:
        return problem.working
    shown = [*problem.steps[1:-1], problem.steps[-1] + 1 + digest[1] % 3]
    return "".join(f" {step}" for step in shown) + f" \\boxed{{{shown[-1]}}}"


if __name__ == "__main__":
    path: Path = embedded("tiny:book")
    path.write_text("".join(json.dumps(row) + "\n" for row in rows()), encoding="utf-8")
