"""Sizes of a model, from its configuration only: no weight is loaded or allocated."""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mutualrl.mwra.memory import ModelShape
from mutualrl.process.loading import fast_imports
from mutualrl.recipes.schema import LoraSection, Policy
from mutualrl.storage.hub import hub_problem
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def model_shape(policy: Policy) -> ModelShape | None:
    """Return the sizes of a policy's model; None if its configuration is not available (a hub model without network or
    cache), or if it is not a decoder of dense layers."""
    model = _empty_model(policy)
    return None if model is None else shape_of(model)


def shape_of(model: PreTrainedModel) -> ModelShape | None:
    """Return the sizes of a model; None if it is not a decoder of dense layers."""
    config = model.config.get_text_config()
    layers, width = getattr(model.base_model, "layers", None), getattr(config, "intermediate_size", None)
    heads = getattr(config, "num_attention_heads", None)
    if not layers or not isinstance(width, int) or not isinstance(heads, int) or not _are_dense(layers, width):
        return None
    head = getattr(config, "head_dim", None) or config.hidden_size // heads
    names = {name.rpartition(".")[2] for name, _ in layers[0].named_modules()}
    return ModelShape(
        parameters=sum(p.numel() for p in model.parameters()),
        layer=sum(p.numel() for p in layers[0].parameters()),
        layers=len(layers),
        hidden=config.hidden_size,
        intermediate=width,
        query=heads * head,
        key=(getattr(config, "num_key_value_heads", None) or heads) * head,
        vocabulary=config.vocab_size,
        tied=bool(getattr(model.config, "tie_word_embeddings", False)),
        head_norms="q_norm" in names,
    )


def _are_dense(layers: Iterable[Any], width: int) -> bool:
    """Return whether all layers have attention and a plain feed-forward part of the width, and the same size."""
    each = list(layers)
    sizes = {sum(p.numel() for p in layer.parameters()) for layer in each}
    parts = [(getattr(layer, "self_attn", None), getattr(layer, "mlp", None)) for layer in each]
    whole = all(attention is not None and mlp is not None for attention, mlp in parts)
    whole = whole and not any("expert" in name for name, _ in each[0].named_modules())
    dimensions = [{size for p in mlp.parameters() for size in p.shape} for _, mlp in parts if mlp is not None]
    return whole and len(sizes) == 1 and all({width, 2 * width} & sizes for sizes in dimensions)


def parameter_count(policy: Policy) -> int | None:
    """Return the number of weights of a policy's model; None if its configuration is not available."""
    model = _empty_model(policy)
    return None if model is None else sum(p.numel() for p in model.parameters())


def adapter_problem(policy: Policy, lora: LoraSection) -> str | None:
    """Return why a policy's model cannot have an adapter, as `peft` finds it on a model without weights; None if it
    can, or if the model's configuration is not available."""
    model = _empty_model(policy)
    if model is None:
        return None
    if not isinstance(lora.target_modules, str):
        targets, names = lora.target_modules, [name for name, _ in model.named_modules()]
        if not any(name == each or name.endswith(f".{each}") for name in names for each in targets):
            known = sorted(
                {name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdecimal()} - {""}
            )
            layers = " or ".join(map(repr, targets))
            return f"no layer {layers} in {policy.model}; expected some of: {', '.join(known)[:300]}; or all-linear"
    with fast_imports():
        import torch
        from peft import get_peft_model
    try:
        with torch.device("meta"), warnings.catch_warnings(action="ignore"):
            adapted = get_peft_model(copy.deepcopy(model), lora.for_peft()).get_base_model()
    except (ValueError, TypeError) as error:
        return f"{' '.join(str(error).split())[:400]}; expected linear layers or embeddings, or all-linear"
    ends = (adapted.get_input_embeddings(), adapted.get_output_embeddings())
    if getattr(model.config, "tie_word_embeddings", False) and any(hasattr(end, "base_layer") for end in ends):
        return (
            f"an adapter on the embeddings of {policy.model}, which are its output layer, too (tie_word_embeddings): "
            "merged, it would change both; expected other layers, or all-linear"
        )
    return None


def adapter_weights(policy: Policy, lora: LoraSection) -> int:
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
    model = _built(resolve_path(policy.model), policy.revision, policy.trust_remote_code)
    if model is None and policy.config is not None:
        model = _built(policy.config, None, policy.trust_remote_code)
    return model


@functools.lru_cache(maxsize=8)
def _built(source: str, revision: str | None, trusted: bool) -> PreTrainedModel | None:
    """Return a model without weights, built once: a start asks for its sizes, its adapters and its layers."""
    import torch
    import transformers

    local = Path(source).exists() or hub_problem() is not None
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        config = transformers.AutoConfig.from_pretrained(
            source, revision=revision or "main", trust_remote_code=trusted, local_files_only=local
        )
        with torch.device("meta"):
            model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    except Exception:  # noqa: BLE001  (not available, not supported by transformers, or code of the model's own)
        return None
    finally:
        logger.setLevel(level)
    return model
