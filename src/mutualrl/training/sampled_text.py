"""Whether rollouts are sampled text, as a regime that shares texts needs them; asked before a model is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import AutoConfig, ProcessorMixin
from trl.trainer.utils import get_callable_name

from mutualrl.errors import UsageError
from mutualrl.tasks.turns import NOT_SHARED

#: what sharing texts would need
MISSING = {
    "tools": NOT_SHARED,
    "environment_factory": NOT_SHARED,
    "rollout_func": "the exchange does not record which tokens it sampled; leave it out",
    "model": "the exchange does not record images; leave it out",
}


def require_sampled_text(given: Mapping[str, Any], publisher: str) -> None:
    """Raise UsageError for arguments of GRPOTrainer that make rollouts something else than sampled text: a peer would
    train on what nobody sampled. `publisher` is what shares the texts."""
    environments = given.get("environment_factory")
    features = {
        "tools": _names(given.get("tools") or ()),
        "environment_factory": _names(environments.values() if isinstance(environments, dict) else [environments]),
        "rollout_func": _names([given.get("rollout_func")]),
        "model": _vision_model(given),
    }
    problems = [
        f"{key}: found {value}, which {publisher} does not support, because it shares texts: {MISSING[key]}"
        for key, value in features.items()
        if value
    ]
    if problems:
        raise UsageError("; ".join(problems))


def _names(functions: Iterable[Any]) -> str:
    return ", ".join(get_callable_name(function) for function in functions if function is not None)


def _vision_model(given: Mapping[str, Any]) -> str:
    """Return words for a vision-language model, which TRL knows by its processor; empty for a language model."""
    model, processor = given.get("model"), given.get("processing_class")
    if processor is not None:
        vision = isinstance(processor, ProcessorMixin)
    else:
        vision = hasattr(_config(model, given.get("args")), "vision_config")
    name = model if isinstance(model, str) else type(model).__name__
    return f"the vision-language model {name}" if vision else ""


def _config(model: Any, args: Any) -> Any:
    """Return the configuration of a model, or of the one that TRL would load by this name."""
    if not isinstance(model, str):
        return getattr(model, "config", None)
    loading = getattr(args, "model_init_kwargs", None) or {}
    options = {key: loading[key] for key in ("revision", "cache_dir", "token") if key in loading}
    trusted = bool(loading.get("trust_remote_code", getattr(args, "trust_remote_code", False)))
    return AutoConfig.from_pretrained(model, trust_remote_code=trusted, **options)
