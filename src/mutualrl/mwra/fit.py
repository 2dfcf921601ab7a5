"""Whether the members of a recipe fit their GPUs, by the estimate of `mwra.memory`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from mutualrl.errors import MachineError
from mutualrl.machine.devices import Machine
from mutualrl.mwra.memory import GIB, MemoryEstimate, Work, estimate
from mutualrl.mwra.model_shape import adapter_weights, model_shape, parameter_count
from mutualrl.mwra.placement import Placement
from mutualrl.recipes.schema import Policy, Recipe
from mutualrl.recipes.trainer_keys import quantization
from mutualrl.recipes.trainer_table import Settings, defaults
from mutualrl.storage.allocation import Allocation

WARN, REFUSE = 0.9, 1.2  # of a GPU's memory
_FUSED = "adamw_torch_fused"  # TRL's default
#: optimizers that the estimate knows, with the numbers that each keeps per weight
_OPTIMIZERS = {"adamw_torch": 2, _FUSED: 2, "sgd": 0}
#: dtypes of `model_init_kwargs`, in bytes; TRL loads float32 by default
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FROZEN = 2  # bytes per weight of a frozen source, in bf16

#: memory by policy; None where the model's configuration is not available
Estimates = Mapping[str, MemoryEstimate | None]


def estimates(recipe: Recipe, placement: Placement, prompt: int) -> Estimates:
    """Return the estimate of each policy on GPUs. `prompt`: tokens of the longest prompt."""
    return {each.policy: estimate_allocation(recipe, each, prompt) for each in placement.allocations if each.gpus}


def estimate_allocation(recipe: Recipe, allocation: Allocation, prompt: int) -> MemoryEstimate | None:
    """Return the estimate for a policy on its devices, or None if its configuration is not available."""
    settings = recipe.trainer_settings(allocation.policy)
    shape = model_shape(recipe.policy(allocation.policy)) if is_modelled(settings) else None
    if shape is None:
        return None
    work = work_of(recipe, allocation, prompt)
    result = estimate(shape, work, strategy=allocation.strategy, ranks=allocation.processes)
    share, sleeps = vllm_share(settings, allocation), bool(settings.get("vllm_enable_sleep_mode"))
    return replace(result, vllm_share=share, vllm_sleeps=bool(share) and sleeps)


def is_modelled(settings: Settings) -> bool:
    """Return whether the estimate knows how a policy's model is loaded and which optimizer it has."""
    loading = settings.get("model_init_kwargs") or {}
    known = loading.get("dtype") in (None, *_DTYPES) and str(settings.get("optim") or _FUSED) in _OPTIMIZERS
    return known and not quantization(settings)


def work_of(recipe: Recipe, allocation: Allocation, prompt: int) -> Work:
    """Return what each process of a policy computes at once, with completions of the longest allowed."""
    settings, batch = recipe.trainer_settings(allocation.policy), allocation.batch
    lora = recipe.lora_settings(allocation.policy)
    beta = float(settings.get("beta") or 0.0)
    nll = recipe.regime_of(allocation.policy).needs().nll_rows
    optimizer = str(settings.get("optim") or _FUSED)
    loading = settings.get("model_init_kwargs") or {}
    dtype, attention = loading.get("dtype"), str(loading.get("attn_implementation") or "sdpa")
    return Work(
        rows=batch.per_device,
        prompt=prompt,
        completion=int(settings.get("max_completion_length") or defaults()["max_completion_length"]),
        micro_batches=batch.micro_batches,
        sampled=0 if settings.get("use_vllm") else batch.per_device * batch.micro_batches * batch.optimizer_steps,
        full_logits=nll and float(settings.get("temperature") or 1.0) != 1.0,
        checkpointing=settings.get("gradient_checkpointing") is not False,
        half=settings.get("bf16") is not False or bool(settings.get("fp16")),
        reference=lora is None and beta > 0,
        adapters=None if lora is None else adapter_weights(recipe.policy(allocation.policy), lora),
        step="foreach" if optimizer == "adamw_torch" else "fused",
        weight=_DTYPES.get(str(dtype), 4),
        moments=_OPTIMIZERS[optimizer],
        squares="flash" not in attention,
    )


def vllm_share(settings: Settings, allocation: Allocation) -> float:
    """Return the fraction of a GPU that a policy's colocated vLLM engine reserves; 0 without one."""
    if not settings.get("use_vllm") or settings.get("vllm_mode", "colocate") != "colocate":
        return 0.0
    utilization = float(settings.get("vllm_gpu_memory_utilization", 0.3))
    return utilization / allocation.policies_per_gpu if allocation.memory is None else utilization * allocation.memory


def fit_notes(recipe: Recipe, placement: Placement, machine: Machine, found: Estimates) -> list[str]:
    """Return a note per group of GPUs of which the members' peaks take more than nine tenths.

    Raises MachineError if they take more than 1.2 of one, unless `launch.check_memory` is false: the estimate is less
    than that off (docs/operations.md, "Memory"). A model or a GPU whose size is not known is not checked.
    """
    notes: dict[str, list[str]] = {}
    for gpu, size in zip(machine.gpus, machine.memory, strict=False):
        allocations = [each for each in placement.allocations if gpu in each.gpus]
        members = [found[each.policy] for each in allocations]
        policies = [each for each in members if each is not None]
        if not policies or len(policies) < len(members):
            continue
        needed = _frozen_bytes(recipe, placement, gpu) + sum(each.on_device(size) for each in policies)
        if needed <= WARN * size:
            continue
        names = [each.policy for each in (*placement.sources, *allocations) if gpu in each.gpus]
        largest = max(allocations, key=lambda each: getattr(found[each.policy], "peak", 0.0))
        who = f"{' and '.join(names)}: about {needed / GIB:.3g} GiB at the peak, of {size / GIB:.3g}; "
        who += remedy(recipe, largest, found[largest.policy], size)
        if needed > REFUSE * size and recipe.launch.check_memory:
            raise MachineError(
                f"GPU {gpu} is too small for {who}; or start all the same: --set launch.check_memory=false "
                "(--dry-run shows each policy's memory)"
            )
        notes.setdefault(who, []).append(gpu)
    return [f"the memory of GPU {', '.join(gpus)} may not suffice for {who}" for who, gpus in notes.items()]


def _frozen_bytes(recipe: Recipe, placement: Placement, gpu: str) -> float:
    """Return the bytes of the frozen sources' weights on a GPU, where their sizes are known."""
    here = {each.policy for each in placement.sources if gpu in each.gpus}
    total = 0
    for source in recipe.frozen_sources:
        if source.name in here:
            trusted = source.trust_remote_code
            model = Policy(name=source.name, model=source.frozen, revision=source.revision, trust_remote_code=trusted)
            total += parameter_count(model) or 0
    return float(_FROZEN * total)


def remedy(recipe: Recipe, allocation: Allocation, result: MemoryEstimate | None, size: float) -> str:
    """Return what to change for a policy on a GPU of `size` bytes, by what takes the most."""
    assert result is not None
    settings, batch = recipe.trainer_settings(allocation.policy), allocation.batch
    engine = result.vllm_share * size
    if engine and (engine > result.peak or (result.vllm_sleeps and result.on_device(size) > result.peak)):
        return "lower trainer.vllm_gpu_memory_utilization"
    if result.states > 0.7 * result.peak:
        adapters = "" if recipe.lora_settings(allocation.policy) is not None else "adapters (--set lora.r=16), "
        return f"use more GPUs per policy, {adapters}or a smaller model"
    if result.instant == "generation":
        rows = batch.per_device * batch.micro_batches * batch.optimizer_steps
        return f"it samples {rows} rollouts at once: use fewer per round, or trainer.use_vllm=true"
    if settings.get("gradient_checkpointing") is False:
        return "--set trainer.gradient_checkpointing=true"
    return f"a pass has {batch.per_device} completions: lower trainer.per_device_train_batch_size"


def format_estimate(result: MemoryEstimate | None) -> str:
    """Return an estimate as text for a table cell."""
    if result is None:
        return "unknown"
    text = f"{result.peak / GIB:.2f} GiB ({result.instant}; states {result.states / GIB:.2f})"
    return text + (f" + vLLM {result.vllm_share:.0%} of the GPU" if result.vllm_share else "")
