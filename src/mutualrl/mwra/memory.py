"""Estimate of a policy's training memory per GPU, from the model's configuration only."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mutualrl.errors import MachineError
from mutualrl.machine.devices import Machine
from mutualrl.mwra.placement import Placement, shares_gpus
from mutualrl.recipes.schema import LoraSection, Policy, Recipe
from mutualrl.storage.allocation import SHARDED, Allocation, Strategy
from mutualrl.storage.hub import hub_problem
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GIB = 2**30
_WEIGHT, _GRADIENT, _ADAM = 2, 2, 12  # bytes per weight: bf16, bf16, fp32 master copy and two fp32 moments


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes on one GPU: weights; gradients and optimizer states; the KL term's reference model; and the fraction of
    the GPU that colocated vLLM reserves. Activations are not included."""

    weights: float
    optimizer: float
    reference: float
    vllm_share: float

    @property
    def bytes(self) -> float:
        """Return weights, optimizer and reference together."""
        return self.weights + self.optimizer + self.reference


def estimate(
    parameters: int, ranks: int, strategy: Strategy, *, trained: int | None = None, reference: bool, vllm_share: float
) -> MemoryEstimate:
    """Return the bytes on one of `ranks` GPUs. Every strategy keeps 16 bytes per trained weight (2 weight, 2 gradient,
    12 AdamW) and 2 per frozen one; ZeRO-3 and FSDP2 shard all of them over the ranks, ZeRO-2 gradients and optimizer,
    DDP none.

    `trained`: number of adapter weights, if only adapters train. Example: 1.5e9 weights on 4 GPUs under ZeRO-3 take
    16 * 1.5e9 / 4 = 6.0e9 bytes, and 2 * 1.5e9 / 4 = 0.75e9 for the reference.
    """
    count = parameters if trained is None else trained
    frozen = 0 if trained is None else parameters
    shard = ranks if strategy in SHARDED else 1
    moments = 1 if strategy == "ddp" else ranks
    return MemoryEstimate(
        weights=_WEIGHT * (count + frozen) / shard,
        optimizer=(_GRADIENT + _ADAM) * count / moments,
        reference=_WEIGHT * parameters / shard if reference else 0.0,
        vllm_share=vllm_share,
    )


def estimate_allocation(recipe: Recipe, allocation: Allocation) -> MemoryEstimate | None:
    """Return the estimate for a policy on its GPUs, or None if its configuration is not available or it runs on CPU."""
    if not allocation.gpus:
        return None
    policy = recipe.policy(allocation.policy)
    settings = recipe.trainer_settings(allocation.policy)
    parameters = parameter_count(policy)
    if parameters is None:
        return None
    lora = recipe.lora_settings(allocation.policy)
    vllm_share = 0.0
    if settings.get("use_vllm") and settings.get("vllm_mode", "colocate") == "colocate":
        utilization = float(settings.get("vllm_gpu_memory_utilization", 0.3))
        if allocation.memory is None:
            vllm_share = utilization / allocation.policies_per_gpu
        else:
            vllm_share = utilization * allocation.memory
    return estimate(
        parameters,
        allocation.processes,
        allocation.strategy,
        trained=None if lora is None else _adapter_weights(policy, lora),
        reference=lora is None and float(settings.get("beta", 0.0)) > 0,
        vllm_share=vllm_share,
    )


def require_fit(recipe: Recipe, placement: Placement, machine: Machine) -> None:
    """Raise MachineError if policies that share GPUs because there are too few do not fit: weights, gradients,
    optimizer states and what vLLM reserves, on each GPU. Activations, logits and caches are not counted. A model or a
    GPU whose size is not known is not checked."""
    if recipe.launch.share_gpus is not None or not machine.memory or not shares_gpus(recipe, machine):
        return
    memory = dict(zip(machine.gpus, machine.memory, strict=True))
    needed: dict[str, float] = dict.fromkeys(memory, 0.0)
    for source in placement.sources:
        frozen = next((each.frozen for each in recipe.frozen_sources if each.name == source.policy), None)
        count = None if frozen is None else parameter_count(Policy(name=source.policy, model=frozen))
        for gpu in source.gpus if count is not None else ():
            needed[gpu] += _WEIGHT * (count or 0)
    for allocation in placement.allocations:
        if (estimated := estimate_allocation(recipe, allocation)) is None:
            return
        for gpu in allocation.gpus:
            needed[gpu] += estimated.bytes + estimated.vllm_share * memory.get(gpu, 0)
    for gpu, size in memory.items():
        if needed[gpu] > size:
            raise MachineError(
                f"the members that would share GPU {gpu} need {needed[gpu] / GIB:.1f} GiB for weights, gradients, "
                f"optimizer and vLLM's share, and it has {size / GIB:.1f}; use smaller models, adapters "
                "(lora: {r: 16}), more GPUs, the CPU (--set hardware.gpus=0), or share all the same: "
                "--set launch.share_gpus=true"
            )


def parameter_count(policy: Policy) -> int | None:
    """Return the number of weights of a policy's model, from its configuration; none is loaded or allocated.

    None if the configuration is not available: a hub model without network or cache.
    """
    model = _empty_model(policy)
    return None if model is None else sum(p.numel() for p in model.parameters())


def layer_names(policy: Policy) -> list[str] | None:
    """Return the names of a model's layers; None if its configuration is not available."""
    model = _empty_model(policy)
    return None if model is None else [name for name, _ in model.named_modules()]


def _adapter_weights(policy: Policy, lora: LoraSection) -> int:
    """Return the number of adapter weights: r * (in + out) for every linear layer in `target_modules`, as in PEFT: the
    last part of a layer's name, or `all-linear` for all but the output layer."""
    model = _empty_model(policy)
    import torch

    assert model is not None
    output = model.get_output_embeddings()
    total = 0
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear):
            continue
        if isinstance(lora.target_modules, str):
            adapted = module is not output
        else:
            adapted = any(name == target or name.endswith(f".{target}") for target in lora.target_modules)
        if adapted:
            total += lora.r * (module.in_features + module.out_features)
    return total


def _empty_model(policy: Policy) -> PreTrainedModel | None:
    import torch
    import transformers

    source, local = resolve_path(policy.model), True
    if not Path(source).is_dir():
        local = hub_problem() is not None
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        config = transformers.AutoConfig.from_pretrained(
            source,
            revision=policy.revision or "main",
            trust_remote_code=policy.trust_remote_code,
            local_files_only=local,
        )
        with torch.device("meta"):
            model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(
                config, trust_remote_code=policy.trust_remote_code
            )
    except (OSError, ValueError, KeyError):  # not available, or not supported by this version of transformers
        return None
    finally:
        logger.setLevel(level)
    return model


def format_estimate(result: MemoryEstimate | None) -> str:
    """Return an estimate as text for a table cell."""
    if result is None:
        return "unknown"
    text = f"{result.bytes / GIB:.2f} GiB (weights {result.weights / GIB:.2f}, optimizer {result.optimizer / GIB:.2f}"
    text += f", reference {result.reference / GIB:.2f})" if result.reference else ")"
    return text + (f" + vLLM {result.vllm_share:.0%} of the GPU" if result.vllm_share else "")
