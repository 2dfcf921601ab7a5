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
