"""The memory estimate, against hand calculations and against what torch's trackers counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conftest import REPOSITORY
from mutualrl.errors import MachineError
from mutualrl.machine.devices import Machine
from mutualrl.mwra.fit import estimate_allocation, estimates, fit_notes, format_estimate
from mutualrl.mwra.memory import GIB, MemoryEstimate, ModelShape, Work, estimate
from mutualrl.mwra.model_shape import model_shape, parameter_count, shape_of
from mutualrl.mwra.placement import place
from mutualrl.recipes import Recipe, Request, resolve
from mutualrl.recipes.schema import Policy
from mutualrl.storage.allocation import Strategy
from mutualrl.tiny import path_of

FOUR = Machine(("0", "1", "2", "3"), 8)
#: two layers: 4 attention matrices of 8 x 8, 8 x 4, 8 x 4, 8 x 8, three of 8 x 16, two norms of 8; 100 x 8 embeddings
SMALL = ModelShape(
    parameters=2 * 592 + 800 + 8,
    layer=592,
    layers=2,
    hidden=8,
    intermediate=16,
    query=8,
    key=4,
    vocabulary=100,
    tied=True,
    head_norms=False,
)
WORK = Work(rows=2, prompt=3, completion=5, micro_batches=2)
BILLION = replace(SMALL, parameters=10**9)


@pytest.mark.parametrize(
    ("strategy", "weights", "gradients", "optimizer"),
    [
        # 1e9 weights on 4 GPUs; fp32 weights, gradients (twice under DDP, in its buckets) and AdamW's two moments
        ("ddp", 4e9, 8e9, 8e9),
        ("fsdp2", 1e9, 1e9, 2e9),
        # DeepSpeed: bf16 weights and gradients, an fp32 copy beside the moments
        ("zero2", 2e9, 0.5e9, 3e9),
        ("zero3", 0.5e9, 0.5e9, 3e9),
    ],
)
def test_each_strategy_shards_its_parts(strategy: Strategy, weights: float, gradients: float, optimizer: float) -> None:
    result = estimate(BILLION, WORK, strategy=strategy, ranks=4)
    assert (result.weights, result.gradients, result.optimizer) == (weights, gradients, optimizer)
    assert result.states == weights + gradients + optimizer
    with_reference = estimate(BILLION, replace(WORK, reference=True), strategy=strategy, ranks=4)
    assert with_reference.reference == weights


def test_adapters_add_trained_weights_to_the_frozen_ones() -> None:
    result = estimate(BILLION, replace(WORK, adapters=10**6), strategy="ddp", ranks=1)
    assert result.weights == 4 * (10**9 + 10**6)
    assert (result.gradients, result.optimizer) == (4e6, 8e6)


def test_instants_of_a_small_model_by_hand() -> None:
    """16 tokens. Kept per layer: 16 x 8 x 4 = 512 bytes; mask 2 x 8^2 = 128; last norm and head's input 1,536. bf16
    casts of both layers 2,368. The head's tile: 16 x 100 x 2 and a cast of 100 x 8 x 2 = 4,800. A recomputed layer:
    416 bytes per token and the mask in bf16, 6,912."""
    stays, gradients, kept = 4 * 1992 + 8 * 1992, 4 * 1992, 2 * 512 + 128 + 1536
    result = estimate(SMALL, WORK, strategy="ddp", ranks=1)
    assert result.logprobs == stays + 2368 + 16 * 64 + 4800
    assert result.forward == stays + gradients + 2368 + kept + 4800
    # in a layer, while the tied output matrix's gradient (3,200) waits: checkpoints, mask, layer, gradients in flight
    in_layer = kept - 1536 + 6912 + 16 * 2 * 3 * 16 + 3200 + 2 * 592 * 2
    assert result.backward == stays + gradients + in_layer
    assert result.update == stays + gradients
    updates = {"fused": 0, "foreach": 4 * 1992, "single": 2 * 3200}
    for step, copies in updates.items():
        other = estimate(SMALL, replace(WORK, step=step), strategy="ddp", ranks=1)
        assert other.update == stays + gradients + copies
    assert result.generation == 0
    assert (result.peak, result.instant) == (result.backward, "backward")


def test_whole_logits_take_eight_bytes_forward_and_twelve_backward() -> None:
    """At another temperature: fp32 logits and their log-probs; in the backward also the gradient of both."""
    wide = replace(SMALL, vocabulary=10**6)
    work = replace(WORK, full_logits=True)
    fused, whole = (estimate(wide, each, strategy="ddp", ranks=1) for each in (WORK, work))
    logits = 2 * 5 * 10**6
    tile = 2 * 16 * 32768 + 2 * 32768 * 8
    assert whole.forward - fused.forward == 8 * logits - tile
    kept = 2 * 512 + 128 + 1536
    assert whole.backward == 24 * wide.parameters - 8 * wide.parameters + kept + 12 * logits


def test_no_checkpointing_keeps_every_layer() -> None:
    plain = replace(WORK, checkpointing=False)
    kept, all_kept = (estimate(SMALL, each, strategy="ddp", ranks=1).forward for each in (WORK, plain))
    assert all_kept - kept == 2 * 6912 - 2 * 512


def test_zero_has_its_bucket_and_its_gradients_from_the_start() -> None:
    """On two devices, a bucket of 500: bf16 weights and gradients, the bucket, fp32 copy and moments; in the step the
    part's gradients in fp32. All 1,992 weights are gathered, and a bucket has a copy while it is reduced."""
    work = replace(WORK, bucket=500)
    result = estimate(SMALL, work, strategy="zero3", ranks=2)
    part = 1992 / 2
    stays = (2 + 2 + 12) * part + 2 * 500
    assert result.update == stays + 4 * part
    assert result.logprobs == stays + 2 * 1992 + 16 * (4 + 2) * 8 + 2 * 16 * 100
    kept = 2 * 16 * 2 * 8 + 128 + 16 * (6 * 8 + 2 * 8)  # residuals in bf16
    assert result.forward == stays + 2 * 1992 + kept + 2 * 16 * 100
    head = 2 * 16 * 100 + 4 * 800 + 16 * 4 * 8 + kept
    assert result.backward >= stays + 2 * 1992 + head + 2 * 500


def test_flash_attention_reads_no_mask(tmp_path: Path) -> None:
    """128 bytes of the mask; per layer that keeps it, in bf16."""
    for checkpointing, masks in ((True, 128), (False, 128 + 2 * 2 * 128)):
        with_mask, without = (
            estimate(SMALL, replace(WORK, checkpointing=checkpointing, squares=squares), strategy="ddp", ranks=1)
            for squares in (True, False)
        )
        assert with_mask.forward - without.forward == masks
    flash = "trainer.model_init_kwargs={attn_implementation: flash_attention_2}"
    assert first(recipe(tmp_path, flash)).backward < first(recipe(tmp_path)).backward


def test_generation_has_the_cache_and_the_logits() -> None:
    """Six rows of eight tokens, two layers, four keys of 4 bytes (rotated in fp32) and four values of 2."""
    work = replace(WORK, sampled=6)
    result = estimate(SMALL, work, strategy="ddp", ranks=1)
    cache, repeated, logits = 6 * 8 * 2 * (4 + 2) * 4, 6 * 8 * 2 * 2 * 8, 4 * 4 * 6 * 100
    assert result.generation == 12 * 1992 + 592 * 2 + cache + repeated + logits


def counted() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads((REPOSITORY / "benchmarks/results/memory.json").read_text())["rows"]
    return rows


def test_predictions_are_within_fifteen_percent_of_torch_s_tracker() -> None:
    """Computed again from what the tracker counted, of .04 to 8 B weights; half of them had no part in the formula."""
    import memory

    deviations = []
    for row in counted():
        case = memory.Case(**row["case"])
        again = memory.compared(case, {"peaks": row["counted"], "adapters": row["adapters"]})
        assert again["predicted"] == pytest.approx(row["predicted"])
        deviations.append(abs(again["deviation"]))
    assert len(deviations) == 20
    assert sum(row["case"]["held_back"] for row in counted()) == 10
    assert memory.percentile(deviations, 0.9) < 0.15


def test_number_of_weights_is_read_from_the_configuration_alone() -> None:
    resolved = resolve(Request(pool="tiny"))
    counts = [parameter_count(policy) for policy in resolved.policies]
    from transformers import AutoModelForCausalLM

    from mutualrl.tiny import path_of

    assert counts == [AutoModelForCausalLM.from_pretrained(path_of(name)).num_parameters() for name in ("ada", "bob")]


def test_shape_of_a_model_has_all_its_weights() -> None:
    shape = model_shape(resolve(Request(pool="tiny")).policies[0])
    assert shape is not None
    assert shape.layers * shape.layer + shape.outside == shape.parameters
    outside = shape.matrix * (1 if shape.tied else 2) + shape.hidden
    assert shape.outside == outside


def recipe(tmp_path: Path, *assignments: str) -> Recipe:
    pool = tmp_path / "p.yaml"
    pool.write_text('policies: [{name: a, model: "tiny:ada"}, {name: b, model: "tiny:bob"}]\n')
    return resolve(Request(pool=str(pool), regime="sgt", assignments=assignments))


def first(resolved: Recipe) -> MemoryEstimate:
    result = estimate_allocation(resolved, place(resolved, FOUR).allocations[0], 20)
    assert result is not None
    return result


def test_reference_is_counted_with_a_kl_term_and_not_with_adapters(tmp_path: Path) -> None:
    assert first(recipe(tmp_path, "trainer.beta=0.01")).reference > 0
    assert first(recipe(tmp_path, "trainer.beta=0")).reference == 0
    assert first(recipe(tmp_path, "trainer.beta=0.01", "lora.r=4")).reference == 0


def test_nll_rows_at_another_temperature_need_whole_logits(tmp_path: Path) -> None:
    """The regime says whether it adds such rows."""
    one, half = recipe(tmp_path, "trainer.temperature=1.0"), recipe(tmp_path, "trainer.temperature=0.5")
    assert first(half).forward > first(one).forward
    plain = resolve(Request(pool=str(tmp_path / "p.yaml"), regime="grpo", assignments=("trainer.temperature=0.5",)))
    assert first(plain).forward == first(one).forward


def loaded(tmp_path: Path, *settings: str) -> MemoryEstimate | None:
    resolved = recipe(tmp_path, *settings)
    return estimate_allocation(resolved, place(resolved, FOUR).allocations[0], 20)


def test_weights_and_moments_are_those_of_dtype_and_optimizer(tmp_path: Path) -> None:
    """bf16: 2 bytes per weight, gradient and moment; SGD keeps nothing. What is not known has no estimate."""
    whole = loaded(tmp_path, "launch.strategy=ddp", "launch.weights={a: 1, b: 3}")
    half = loaded(
        tmp_path, "launch.strategy=ddp", "launch.weights={a: 1, b: 3}", "trainer.model_init_kwargs={dtype: bfloat16}"
    )
    assert whole is not None
    assert half is not None
    assert (half.weights, half.gradients, half.optimizer) == (
        whole.weights / 2,
        whole.gradients / 2,
        whole.optimizer / 2,
    )
    plain = loaded(tmp_path, "trainer.optim=sgd", "launch.strategy=ddp")
    assert plain is not None
    assert plain.optimizer == 0
    four_bits = "trainer.model_init_kwargs={quantization_config: {load_in_4bit: true}}"
    assert loaded(tmp_path, four_bits, "lora.r=4") is None
    assert loaded(tmp_path, "trainer.optim=adafactor") is None


def test_a_model_that_is_not_here_has_the_shape_of_its_configuration(tmp_path: Path) -> None:
    known = Policy(name="a", model="tiny:ada")
    absent = Policy(name="a", model="someone/a-model-that-is-not-here")
    assert model_shape(absent) is None
    (tmp_path / "config.json").write_bytes((path_of("ada") / "config.json").read_bytes())
    for config in (tmp_path, tmp_path / "config.json"):
        described = absent.model_copy(update={"config": str(config)})
        assert model_shape(described) == model_shape(known) is not None


def test_models_that_are_no_dense_decoders_have_no_shape() -> None:
    import torch
    import transformers

    for name, keys in (("mamba", {}), ("lfm2", {"num_hidden_layers": 4}), ("mixtral", {"num_hidden_layers": 1})):
        with torch.device("meta"):
            sizes = {"hidden_size": 64, "vocab_size": 100, **keys}
            model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(name, **sizes))
        assert shape_of(model) is None, name


def test_adapters_are_not_advised_to_who_has_them(tmp_path: Path) -> None:
    resolved = recipe(tmp_path, "lora.r=4", "trainer.max_completion_length=2", "trainer.use_vllm=true")
    placed = place(resolved, Machine(("0", "1"), 4))
    with pytest.raises(MachineError) as refused:
        fit_notes(resolved, placed, Machine(("0", "1"), 4, (2**10, 2**10)), estimates(resolved, placed, 2))
    assert "lora" not in str(refused.value)


def test_vllm_memory_is_divided_among_the_policies_of_a_gpu(tmp_path: Path) -> None:
    settings = ("trainer.use_vllm=true", "trainer.vllm_mode=colocate", "trainer.vllm_gpu_memory_utilization=0.6")
    alone, shared = recipe(tmp_path, *settings), recipe(tmp_path, *settings, "launch.share_gpus=true")
    assert (first(alone).vllm_share, first(shared).vllm_share) == (0.6, 0.3)
    assert first(alone).generation == 0
    asleep = first(recipe(tmp_path, *settings, "trainer.vllm_enable_sleep_mode=true"))
    size = 10 * asleep.peak
    assert first(alone).on_device(size) == first(alone).peak + 0.6 * size
    assert asleep.on_device(size) == asleep.weights + asleep.optimizer + asleep.reference + 0.6 * size


def test_members_are_warned_of_from_nine_tenths_and_refused_above_1_2(tmp_path: Path) -> None:
    """Two policies on one GPU, of the size at which each bound is just kept, and just not."""
    resolved = recipe(tmp_path)
    placed = place(resolved, Machine(("0",), 4))
    found = estimates(resolved, placed, 20)
    needed = sum(each.peak for each in found.values() if each is not None)

    def notes(size: float, told: Recipe = resolved) -> list[str]:
        return fit_notes(told, placed, Machine(("0",), 4, (int(size),)), found)

    assert notes(needed / 0.9 + 2) == []
    (note,) = notes(needed / 0.9 - 2)
    assert note.startswith("the memory of GPU 0 may not suffice for a and b: about ")
    assert len(notes(needed / 1.2 + 2)) == 1
    with pytest.raises(MachineError, match=r"GPU 0 is too small for a and b: .*launch.check_memory=false"):
        notes(needed / 1.2 - 2)
    assert len(notes(1, recipe(tmp_path, "launch.check_memory=false"))) == 1
    assert fit_notes(resolved, placed, Machine(("0",), 4), found) == []  # a GPU of unknown size


@pytest.mark.parametrize(
    ("assignment", "advice"),
    [
        ("trainer.gradient_checkpointing=false", "--set trainer.gradient_checkpointing=true"),
        ("trainer.temperature=0.5", "a pass has 8 completions: lower trainer.per_device_train_batch_size"),
        ("round.optimizer_steps=8", "it samples 64 rollouts at once: use fewer per round, or trainer.use_vllm=true"),
    ],
)
def test_advice_is_about_the_largest_instant(tmp_path: Path, assignment: str, advice: str) -> None:
    resolved = recipe(tmp_path, assignment)
    placed = place(resolved, Machine(("0", "1"), 4))
    with pytest.raises(MachineError) as refused:
        fit_notes(resolved, placed, Machine(("0", "1"), 4, (2**20, 2**20)), estimates(resolved, placed, 20))
    assert advice in str(refused.value)


def test_no_estimate_on_cpu_and_text_names_the_instant(tmp_path: Path) -> None:
    resolved = recipe(tmp_path)
    assert estimates(resolved, place(resolved, Machine((), 2)), 20) == {}
    assert format_estimate(None) == "unknown"
    parts = MemoryEstimate(GIB, GIB, 2 * GIB, 0, 3 * GIB, 5 * GIB, 6 * GIB, 4 * GIB, 0, vllm_share=0.25)
    assert format_estimate(parts) == "6.00 GiB (backward; states 4.00) + vLLM 25% of the GPU"
