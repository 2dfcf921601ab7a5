"""Check, before a model is built, that rollouts are sampled text, as regimes that share texts require."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig, ProcessorMixin
from trl.trainer.utils import get_callable_name

from mutualrl.errors import UsageError

#: why texts cannot be shared, and the remedy
MISSING = {
    "rollout_func": "the exchange does not record which tokens it sampled; leave it out",
    "model": "the exchange does not record images; leave it out",
}


def require_sampled_text(arguments: Mapping[str, Any], publisher: str) -> None:
    """Raise UsageError for arguments of GRPOTrainer with which rollouts are not only sampled text: a peer would train
    on text that no policy sampled. `publisher`: the regime or setting that shares the texts."""
    features = {
        "rollout_func": _name(arguments.get("rollout_func")),
        "model": _vision_model(arguments),
    }
    problems = [
        f"{key}: found {value}, which {publisher} does not support, because it shares texts: {MISSING[key]}"
        for key, value in features.items()
        if value
    ]
    if problems:
        raise UsageError("; ".join(problems))


def _name(function: Any) -> str:
    return "" if function is None else get_callable_name(function)


def _vision_model(arguments: Mapping[str, Any]) -> str:
    """Describe a vision-language model, which TRL recognises by its processor; empty for a language model."""
    model, processor = arguments.get("model"), arguments.get("processing_class")
    if processor is not None:
        vision = isinstance(processor, ProcessorMixin)
    else:
        vision = hasattr(_config(model, arguments.get("args")), "vision_config")
    name = model if isinstance(model, str) else type(model).__name__
    return f"the vision-language model {name}" if vision else ""


def _config(model: Any, args: Any) -> Any:
    """Return the configuration of a model, or of the model that TRL would load by this name."""
    if not isinstance(model, str):
        return getattr(model, "config", None)
    loading = getattr(args, "model_init_kwargs", None) or {}
    options = {key: loading[key] for key in ("revision", "cache_dir", "token") if key in loading}
    trusted = bool(loading.get("trust_remote_code", getattr(args, "trust_remote_code", False)))
    return AutoConfig.from_pretrained(model, trust_remote_code=trusted, **options)
