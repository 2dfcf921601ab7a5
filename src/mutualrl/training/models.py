"""Tokenizers of a pool."""

from __future__ import annotations

from typing import Any

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.recipes.schema import Recipe
from mutualrl.tiny import located


def load_tokenizers(recipe: Recipe) -> dict[str, Any]:
    """Return the tokenizer of every policy, by name. Raises ModelError naming a tokenizer that cannot be loaded."""
    return {
        p.name: load_tokenizer(located(p.model), revision=p.revision, trust_remote_code=p.trust_remote_code)
        for p in recipe.policies
    }
