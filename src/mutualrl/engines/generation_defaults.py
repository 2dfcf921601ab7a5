"""A model's own generation settings: kept out of rollouts, and saved with the trained model if they can be.

transformers fills every unset field of a generation configuration from the model's own, so that a repetition penalty,
suppressed tokens or a limit there would change how rollouts are drawn. `KEPT` lists what may stay.
"""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING

from transformers import AutoConfig, GenerationConfig

from mutualrl.console.lines import notify
from mutualrl.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache")


def neutralize(model: PreTrainedModel) -> GenerationConfig:
    """Reduce a model's generation settings to `KEPT`, in place; return those to save with the trained model: its own,
    or the reduced ones, with a warning, if transformers refuses to save its own."""
    base = model.get_base_model() if hasattr(model, "peft_config") else model
    declared: GenerationConfig = base.generation_config
    base.generation_config = GenerationConfig(**{key: getattr(declared, key, None) for key in KEPT})
    try:
        with tempfile.TemporaryDirectory(prefix="mutualrl-") as directory:
            declared.save_pretrained(directory)
    except ValueError as error:
        notify(f"generation_config.json cannot be saved again; only its token ids are kept ({error})")
        return base.generation_config
    return declared


def eos_token_ids(
    path: str, tokenizer: PreTrainedTokenizerBase, *, revision: str | None = None, trust_remote_code: bool = False
) -> list[int]:
    """Return the tokens that end a model's completions: its tokenizer's, and those of its generation_config.json (of
    its config.json without one). Raises ModelError if neither can be read."""
    try:
        try:
            declared = GenerationConfig.from_pretrained(path, revision=revision).eos_token_id
        except OSError:  # a model without a generation_config.json
            config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
            declared = getattr(config, "eos_token_id", None)
    except Exception as error:
        raise ModelError(f"the configuration of {path!r} cannot be loaded: {error}") from error
    return union_of(tokenizer.eos_token_id, declared)


def union_of(own: int | None, declared: int | list[int] | None) -> list[int]:
    """Return the distinct token ids of a tokenizer's end token and a configuration's, sorted."""
    extra = [declared] if isinstance(declared, int) else list(declared or [])
    return sorted({token for token in (own, *extra) if token is not None})
