r"""Task addition-chain: which numbers are a chain, what it is worth, the data's chains, the split."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.errors import UsageError
from mutualrl.tasks import get_task
from mutualrl.tasks.addition_chain import (
    HELD_OUT,
    STYLES,
    TARGETS,
    by_bits,
    by_factors,
    chain_reward,
    fewest_steps,
    held_out,
    is_chain,
    training,
    worth,
)
from mutualrl.tasks.base import TaskSource


def shortest(target: int) -> int:
    """Return the steps of the shortest chain, by iterative deepening over rising chains."""

    def reaches(chain: list[int], left: int) -> bool:
        if chain[-1] == target:
            return True
        if left == 0 or chain[-1] << left < target:
            return False
        sums = sorted({a + b for a in chain for b in chain if chain[-1] < a + b <= target}, reverse=True)
        return any(reaches([*chain, value], left - 1) for value in sums)

    steps = fewest_steps(target)
    while not reaches([1], steps):
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("chain", "right"),
    [
        ([1, 2, 4, 5, 10, 11, 22, 23], True),
        ([1, 2, 3, 5, 10, 20, 23], True),
        ([1], True),
        ([1, 3], False),  # no sum of two earlier ones
        ([2, 4], False),  # does not begin with 1
        ([1, 2, 2], False),  # does not rise
        ([1, 2, 4, 3], False),
        ([1, 2, 7], False),
        ([], False),
    ],
)
def test_a_chain_begins_with_1_rises_and_adds(chain: list[int], right: bool) -> None:
    assert is_chain(chain) is right


def test_half_as_much_with_every_further_step_and_nothing_for_no_chain() -> None:
    assert fewest_steps(16) == 4
    assert (fewest_steps(17), fewest_steps(23)) == (5, 5)
    assert worth("\\boxed{1, 2, 4, 8, 16}", 16) == 1.0
    assert worth("so \\boxed{1,2,4,5,10,11,22,23}", 23) == 0.25  # 7 steps
    assert worth("\\boxed{1, 2, 3, 5, 10, 20, 23}", 23) == 0.5  # 6 steps
    texts = ["\\boxed{1, 2, 4, 8, 16}", "\\boxed{1, 3, 23}", "\\boxed{23}", "1, 2", "\\boxed{}", "\\boxed{1;2}", ""]
    assert chain_reward([*texts], [23] * len(texts)) == [0.0] * len(texts)
    assert worth("\\boxed{" + "1, " * 500 + "16}", 16) == 0.0
    assert worth("\\boxed{1, 2, 4, 8, 00000000016}", 16) == 0.0


@pytest.mark.parametrize("target", [16, 17, 23, 31, 47, 71, 127, 191])
def test_the_data_s_chains_are_chains_and_no_better_than_the_shortest(target: int) -> None:
    best = shortest(target)
    for chain in (by_bits(target), by_factors(target)):
        assert is_chain(chain)
        assert chain[-1] == target
        assert len(chain) - 1 >= best >= fewest_steps(target)


def test_shortest_chains_are_the_published_ones() -> None:
    # OEIS A003313: steps of the shortest addition chain of n, n = 1 to 20
    published = [0, 1, 2, 2, 3, 3, 4, 3, 4, 4, 5, 4, 5, 5, 5, 4, 5, 5, 6, 5]
    assert [shortest(n) for n in range(1, 21)] == published
    assert (len(by_bits(15)) - 1, len(by_factors(15)) - 1) == (6, 5)  # Knuth: the factor method wins at 15


def test_no_held_out_target_is_trained_on() -> None:
    assert len(set(held_out())) == HELD_OUT >= 512
    assert not set(held_out()) & set(training(0))
    assert sorted([*held_out(), *training(3)]) == list(TARGETS)
    assert training(0) != training(1)
    for style in STYLES.values():
        for target in TARGETS:
            chain = style(target)
            assert chain[-1] == target
            assert is_chain(chain)


def test_each_style_is_a_column() -> None:
    prompts = get_task("addition-chain").read("validation", TaskSource()).prompts
    for prompt in prompts[:50]:
        assert prompt.solution == prompt.columns["solution"]
        for style in STYLES:
            assert worth(prompt.columns[style], prompt.columns["target"]) > 0
    assert any(prompt.columns["factors"] != prompt.solution for prompt in prompts)
    with pytest.raises(UsageError, match="makes its own problems"):
        get_task("addition-chain").read("train", TaskSource(data=Path("x.jsonl")))
