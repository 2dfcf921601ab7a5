"""Requirements of a recipe that this machine does not meet, checked without importing the packages."""

from __future__ import annotations

from importlib.util import find_spec

from mutualrl.engines.vllm_engine import installed
from mutualrl.machine.devices import Machine
from mutualrl.process.ports import in_use
from mutualrl.recipes.schema import Recipe
from mutualrl.recipes.trainer_keys import BITS, quantization
from mutualrl.storage.allocation import SHARDINGS


def missing_requirements(recipe: Recipe, machine: Machine) -> list[str]:
    """Return one line per missing requirement, with what to type."""
    lines = []
    required = (recipe.hardware.gpus or 0) if recipe.policies else 0  # a source may run on a machine of its own
    if len(machine.gpus) < required:
        lines.append(
            f"{required - len(machine.gpus)} of the {required} GPUs of the recipe "
            f"(found {len(machine.gpus)}; --set hardware.gpus={len(machine.gpus)} runs it on what is available)"
        )
    uses_vllm = any(recipe.trainer_settings(p.name).get("use_vllm") for p in recipe.policies)
    if uses_vllm and not installed():
        lines.append("vllm, for trainer.use_vllm (pip install 'mutualrl[node]', or --set trainer.use_vllm=false)")
    if _needs_zero(recipe, len(machine.gpus[: recipe.hardware.gpus])) and find_spec("deepspeed") is None:
        lines.append("deepspeed, for ZeRO (pip install 'mutualrl[node]', or --set launch.strategy=fsdp2)")
    quantized = any(set(BITS) & quantization(recipe.trainer_settings(p.name)).keys() for p in recipe.policies)
    if quantized and find_spec("bitsandbytes") is None:
        lines.append("bitsandbytes, for trainer.model_init_kwargs.quantization_config (pip install bitsandbytes)")
    if any(source.kind == "served" for source in recipe.asked_sources) and find_spec("openai") is None:
        lines.append("openai, for a served source (pip install 'mutualrl[served]')")
    for tracker in recipe.run.report_to:
        if find_spec(tracker) is None:
            lines.append(f"{tracker}, for --report-to {tracker} (pip install {tracker})")
    return lines


def _needs_zero(recipe: Recipe, gpus: int) -> bool:
    """Return whether a policy trains under ZeRO: by name, or by `auto` on more than one GPU."""
    if not recipe.policies:
        return False
    if recipe.launch.strategy != "auto":
        return SHARDINGS[recipe.launch.strategy].stage is not None
    shared = recipe.launch.share_gpus
    if shared is None:
        shared = gpus < len(recipe.policies) + len(recipe.frozen_sources)
    return gpus > (1 if shared else len(recipe.policies))


def busy_ports(recipe: Recipe) -> list[str]:
    """Return one line per port of the recipe that is in use on this machine, with what to type."""
    lines = []
    for policy in recipe.policies:
        port = recipe.trainer_settings(policy.name).get("vllm_group_port")
        if port is not None and in_use(int(port)):
            lines.append(
                f"a free port for policy {policy.name!r}: port {port} (trainer.vllm_group_port) is in use; omit the "
                "key for a free one, or set another"
            )
    return lines
