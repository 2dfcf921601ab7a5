"""Tokenizers of a pool."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.recipes.schema import Recipe
from mutualrl.tiny import resolve_path


def load_tokenizers(recipe: Recipe) -> dict[str, PreTrainedTokenizerBase]:
    """Return the tokenizer of every policy, by name. Raises ModelError naming a tokenizer that cannot be loaded."""
    return {
        p.name: load_tokenizer(resolve_path(p.model), revision=p.revision, trust_remote_code=p.trust_remote_code)
        for p in recipe.policies
    }


def load_source_tokenizers(recipe: Recipe) -> dict[str, PreTrainedTokenizerBase]:
    """Return the tokenizer of every frozen source that publishes traces, by name. Raises ModelError."""
    if "logprobs" not in recipe.published.fields:
        return {}
    return {
        source.name: load_tokenizer(
            resolve_path(source.frozen or ""), revision=source.revision, trust_remote_code=source.trust_remote_code
        )
        for source in recipe.asked_sources
        if source.kind == "frozen"
    }
