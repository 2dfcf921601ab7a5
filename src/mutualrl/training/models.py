"""Where a policy's model lies, and the tokenizers of a pool."""

from __future__ import annotations

from typing import Any

from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.recipes.schema import Policy, Recipe
from mutualrl.tiny.cache import ensure


def model_path(policy: Policy) -> str:
    """Path or hub id of a policy's model; an embedded one is made when the cache does not have it."""
    return str(ensure(policy.model[5:])) if policy.model.startswith("tiny:") else policy.model


def load_tokenizers(recipe: Recipe) -> dict[str, Any]:
    """The tokenizer of every policy by name. Raises ModelError naming the one that cannot be loaded."""
    return {
        p.name: load_tokenizer(model_path(p), revision=p.revision, trust_remote_code=p.trust_remote_code)
        for p in recipe.policies
    }
