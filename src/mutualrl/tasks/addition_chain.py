r"""Task addition-chain: reach a number from 1 by sums of earlier numbers, in as few steps as possible. Graded rewards.

An answer to `Write a short addition chain for 23.` is `\boxed{1, 2, 4, 5, 10, 11, 22, 23}`: it starts with 1, every
further number is the sum of two earlier ones (or twice one), and it ends with the target. The reward of a chain of n
numbers after the 1 is 2^-(n - ceil(log2 target)): 1 at the lower bound of n, halved by every further step; 0 if it is
not a chain. No fast method for the shortest chain is known, and most of the data's solutions are longer.

The data has solutions in several styles, one column each: `solution` doubles and adds one along the target's bits;
`factors` splits off the smallest prime factor, if any. A source `recorded: task` has those of one column.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import pairwise

from mutualrl.records import Prompt, prompt_id
from mutualrl.tasks.base import Split, TaskData, TaskSource, require_no_data
from mutualrl.tasks.boxed import completion_text, last_boxed

TARGETS = range(16, 4096)
HELD_OUT = 512
SPLIT_SEED = 0
REWARD = "mutualrl.tasks.addition_chain:chain_reward"
_LONGEST = 400  # characters of an answer
_CHAIN = re.compile(r"\s*[0-9]{1,6}(?:\s*,\s*[0-9]{1,6})*\s*")


def is_chain(chain: Sequence[int]) -> bool:
    """Return whether the numbers start with 1 and increase, and each further one is the sum of two earlier ones, or
    twice one."""
    if not chain or chain[0] != 1:
        return False
    earlier = [1]
    for before, value in pairwise(chain):
        known = set(earlier)
        if value <= before or not any(value - one in known for one in earlier):
            return False
        earlier.append(value)
    return True


def worth(text: str, target: int) -> float:
    r"""Return the reward of a completion: that of the chain in its last `\boxed{...}`, 0 without one."""
    content = last_boxed(text)
    if content is None or len(content) > _LONGEST or not _CHAIN.fullmatch(content):
        return 0.0
    chain = [int(part) for part in content.split(",")]
    if chain[-1] != target or not is_chain(chain):
        return 0.0
    return 2.0 ** (fewest_steps(target) - (len(chain) - 1))


def fewest_steps(target: int) -> int:
    """Return ceil(log2 target), a lower bound on the steps of a chain, since a step at most doubles."""
    return (target - 1).bit_length()


def chain_reward(completions: list[str | list[dict[str, str]]], target: list[int], **_: object) -> list[float]:
    """Return the `worth` of each completion: a reward function in TRL's form."""
    return [worth(completion_text(each), goal) for each, goal in zip(completions, target, strict=True)]


# ---- styles of the data's solution


def by_bits(target: int) -> list[int]:
    """Return the chain that doubles for each bit of the target, and adds one where the bit is 1."""
    chain = [1]
    for bit in bin(target)[3:]:
        chain.append(2 * chain[-1])
        if bit == "1":
            chain.append(chain[-1] + 1)
    return chain


def by_factors(target: int) -> list[int]:
    """Return the chain of the factor method: the chain of the smallest prime factor p, then that of target / p times
    p; for a prime, the chain of target - 1, then one more step (Knuth, TAOCP 2, 4.6.3)."""
    if target == 1:
        return [1]
    factor = _smallest_factor(target)
    if factor == target:
        return [*by_factors(target - 1), target] if target > 2 else [1, 2]
    return [*by_factors(factor), *(factor * value for value in by_factors(target // factor)[1:])]


def _smallest_factor(number: int) -> int:
    return next((divisor for divisor in range(2, int(number**0.5) + 1) if number % divisor == 0), number)


STYLES: Mapping[str, Callable[[int], list[int]]] = {"solution": by_bits, "factors": by_factors}


# ---- task


@cache
def held_out() -> tuple[int, ...]:
    """Return the held-out targets."""
    return tuple(random.Random(f"{SPLIT_SEED} addition chain").sample(TARGETS, HELD_OUT))


def training(seed: int) -> list[int]:
    """Return the training targets in a seed's order; none is held out."""
    outside = set(held_out())
    targets = [target for target in TARGETS if target not in outside]
    random.Random(f"{seed} addition chain training").shuffle(targets)
    return targets


class AdditionChainTask:
    """Task of problems generated from a seed; needs no file."""

    name = "addition-chain"
    max_new_tokens = 256
    takes_data = False
    reads = "problems made from a seed"
    reward = (REWARD,)

    def read(self, split: Split, source: TaskSource) -> TaskData:
        """Return the prompts of a split; `source.seed` sets the training order.

        Raises UsageError if a data file is given: the problems are generated.
        """
        require_no_data(self.name, source)
        train = split == "train"
        prompts = []
        for place, target in enumerate(training(source.seed) if train else held_out()):
            text = (
                f"Write a short addition chain for {target}: 1, then sums of two earlier numbers (or twice one), "
                f"rising to {target}. Put the numbers in \\boxed{{}}, with commas between."
            )
            texts = {style: f" \\boxed{{{', '.join(map(str, chain(target)))}}}" for style, chain in STYLES.items()}
            group = f"{target.bit_length()} bits"
            identity = prompt_id(self.name, split, place, text)
            columns = {"target": target, **texts}
            prompts.append(Prompt(identity, text, str(target), group, columns=columns, solution=texts["solution"]))
        return TaskData(prompts, "training problems" if train else "held-out problems")
