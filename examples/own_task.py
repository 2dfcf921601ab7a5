"""A custom task: sums and products of two numbers, generated from a seed, scored by the boxed answer.

mutualrl train --regime sgt --pool tiny --task examples/own_task.py:TASK
"""

import random

from mutualrl.records import Prompt, prompt_id
from mutualrl.tasks import Split, TaskData, TaskSource


class SmallSums:
    """Task with the answer ` 5 \\boxed{5}` to `2+3:` and ` 6 \\boxed{6}` to `2*3:`; the group is the operation."""

    name = "small-sums"
    max_new_tokens = 20
    takes_data = False
    reads = "problems made from a seed"

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return the prompts of a split: every fifth problem is held out."""
        prompts = []
        for number, (a, b, sign) in enumerate((a, b, sign) for a in range(2, 8) for b in range(2, 8) for sign in "+*"):
            if (number % 5 == 0) == (split == "validation"):
                text, answer = f"{a}{sign}{b}:", str(a + b if sign == "+" else a * b)
                solution = f" {answer} \\boxed{{{answer}}}"
                prompts.append(Prompt(prompt_id(self.name, split, number, text), text, answer, sign, solution=solution))
        if split == "train":
            random.Random(source.seed).shuffle(prompts)
        return TaskData(prompts, "made from a seed")


TASK = SmallSums()
