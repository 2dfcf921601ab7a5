"""The memory estimate, against hand calculations."""

from __future__ import annotations

from pathlib import Path

import pytest

from mutualrl.errors import MachineError
from mutualrl.machine.devices import Machine
from mutualrl.mwra.memory import (
    GIB,
    MemoryEstimate,
    estimate,
    estimate_allocation,
    format_estimate,
    parameter_count,
    require_fit,
)
from mutualrl.mwra.placement import place
from mutualrl.recipes import Recipe, Request, resolve

FOUR = Machine(("0", "1", "2", "3"), 8)


@pytest.mark.parametrize(
    ("strategy", "weights", "optimizer", "reference"),
    [
        # 1e9 weights on 4 GPUs: 2 bytes per weight, 14 for gradient and AdamW
        ("ddp", 2e9, 14e9, 2e9),
        ("zero2", 2e9, 14e9 / 4, 2e9),
        ("zero3", 2e9 / 4, 14e9 / 4, 2e9 / 4),
        ("fsdp2", 2e9 / 4, 14e9 / 4, 2e9 / 4),
    ],
)
def test_each_strategy_shards_its_parts(strategy: str, weights: float, optimizer: float, reference: float) -> None:
    result = estimate(10**9, 4, strategy, reference=True, vllm_share=0.3)
    assert (result.weights, result.optimizer, result.reference) == (weights, optimizer, reference)
    assert result.bytes == weights + optimizer + reference
    assert estimate(10**9, 4, strategy, reference=False, vllm_share=0.3).reference == 0


def test_adapters_add_trained_weights_to_the_frozen_ones() -> None:
    result = estimate(10**9, 1, "ddp", trained=10**6, reference=False, vllm_share=0)
    assert result.weights == 2 * (10**9 + 10**6)
    assert result.optimizer == 14 * 10**6


def test_number_of_weights_is_read_from_the_configuration_alone() -> None:
    recipe = resolve(Request(pool="tiny"))
    counts = [parameter_count(policy) for policy in recipe.policies]
    from transformers import AutoModelForCausalLM

    from mutualrl.tiny import path_of

    assert counts == [AutoModelForCausalLM.from_pretrained(path_of(name)).num_parameters() for name in ("ada", "bob")]


def recipe(tmp_path: Path, *assignments: str) -> Recipe:
    pool = tmp_path / "p.yaml"
    pool.write_text('policies: [{name: a, model: "tiny:ada"}, {name: b, model: "tiny:bob"}]\n')
    return resolve(Request(pool=str(pool), regime="sgt", assignments=assignments))


def test_reference_is_counted_with_a_kl_term_and_not_with_adapters(tmp_path: Path) -> None:
    def reference(*assignments: str) -> float:
        resolved = recipe(tmp_path, *assignments)
        result = estimate_allocation(resolved, place(resolved, FOUR).allocations[0])
        assert result is not None
        return result.reference

    assert reference("trainer.beta=0.01") > 0
    assert reference("trainer.beta=0") == 0
    assert reference("trainer.beta=0.01", "lora.r=4") == 0


def test_vllm_memory_is_divided_among_the_policies_of_a_gpu(tmp_path: Path) -> None:
    settings = ("trainer.use_vllm=true", "trainer.vllm_mode=colocate", "trainer.vllm_gpu_memory_utilization=0.6")
    alone = recipe(tmp_path, *settings)
    shared = recipe(tmp_path, *settings, "launch.share_gpus=true")
    one = estimate_allocation(alone, place(alone, FOUR).allocations[0])
    two = estimate_allocation(shared, place(shared, FOUR).allocations[0])
    assert one is not None
    assert two is not None
    assert (one.vllm_share, two.vllm_share) == (0.6, 0.3)


def test_policies_that_share_for_want_of_gpus_must_fit(tmp_path: Path) -> None:
    """The estimate of both policies, by hand, against one byte less and as many."""
    resolved = recipe(tmp_path)
    alone = place(resolved, Machine(("0",), 4))
    needed = sum(estimated.bytes for each in alone.allocations if (estimated := estimate_allocation(resolved, each)))
    assert needed > 0
    require_fit(resolved, alone, Machine(("0",), 4, (int(needed) + 1,)))
    with pytest.raises(MachineError, match=r"share GPU 0 need .* GiB"):
        require_fit(resolved, alone, Machine(("0",), 4, (int(needed) - 1,)))
    told = recipe(tmp_path, "launch.share_gpus=true")
    require_fit(told, place(told, Machine(("0",), 4)), Machine(("0",), 4, (1,)))


def test_no_estimate_on_cpu_and_text_lists_all_parts(tmp_path: Path) -> None:
    resolved = recipe(tmp_path)
    assert estimate_allocation(resolved, place(resolved, Machine((), 2)).allocations[0]) is None
    assert format_estimate(None) == "unknown"
    text = format_estimate(MemoryEstimate(weights=GIB, optimizer=7 * GIB, reference=GIB, vllm_share=0.25))
    assert text == "9.00 GiB (weights 1.00, optimizer 7.00, reference 1.00) + vLLM 25% of the GPU"
    assert format_estimate(MemoryEstimate(GIB, GIB, 0, 0)) == "2.00 GiB (weights 1.00, optimizer 1.00)"
