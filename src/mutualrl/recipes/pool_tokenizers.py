"""Tokenizers of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mutualrl.process.loading import fast_imports
from mutualrl.recipes.schema import Recipe
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizers(recipe: Recipe) -> dict[str, PreTrainedTokenizerBase]:
    """Return the tokenizer of every policy, by name. Raises ModelError naming a tokenizer that cannot be loaded."""
    return {p.name: _load(p.model, p.revision, p.trust_remote_code) for p in recipe.policies}


def load_source_tokenizers(recipe: Recipe) -> dict[str, PreTrainedTokenizerBase]:
    """Return the tokenizer of every frozen source that publishes traces, by name. Raises ModelError."""
    if "logprobs" not in recipe.published.fields:
        return {}
    return {
        source.name: _load(source.frozen, source.revision, source.trust_remote_code) for source in recipe.frozen_sources
    }


def _load(model: str, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    with fast_imports():  # transformers takes seconds
        from mutualrl.engines.transformers_engine import load_tokenizer

    return load_tokenizer(resolve_path(model), revision=revision, trust_remote_code=trust_remote_code)
