"""Task addition-chain: valid chains, rewards, gold chains, the split."""

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
    """Return the number of steps of the shortest chain, by iterative deepening over increasing chains."""

    def reaches(chain: list[int], remaining: int) -> bool:
        if chain[-1] == target:
            return True
        if remaining == 0 or chain[-1] << remaining < target:
            return False
        sums = sorted({a + b for a in chain for b in chain if chain[-1] < a + b <= target}, reverse=True)
        return any(reaches([*chain, value], remaining - 1) for value in sums)

    steps = fewest_steps(target)
    while not reaches([1], steps):
        steps += 1
    return steps


@pytest.mark.parametrize(
    ("chain", "valid"),
    [
        ([1, 2, 4, 5, 10, 11, 22, 23], True),
        ([1, 2, 3, 5, 10, 20, 23], True),
        ([1], True),
        ([1, 3], False),  # not a sum of two earlier numbers
        ([2, 4], False),  # does not start with 1
        ([1, 2, 2], False),  # does not increase
        ([1, 2, 4, 3], False),
        ([1, 2, 7], False),
        ([], False),
    ],
)
def test_chain_starts_with_1_and_increases_by_sums(chain: list[int], valid: bool) -> None:
    assert is_chain(chain) is valid


def test_reward_halves_per_extra_step_and_is_0_for_invalid_chains() -> None:
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
def test_gold_chains_are_valid_and_not_shorter_than_the_shortest(target: int) -> None:
    best = shortest(target)
    for chain in (by_bits(target), by_factors(target)):
        assert is_chain(chain)
        assert chain[-1] == target
        assert len(chain) - 1 >= best >= fewest_steps(target)


def test_shortest_chain_lengths_match_published_ones() -> None:
    # OEIS A003313: length of the shortest addition chain of n, n = 1 to 20
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
