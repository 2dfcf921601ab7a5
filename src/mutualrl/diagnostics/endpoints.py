"""Endpoints of a pair: a tokenizer and, if available, its model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mutualrl.console.user_path import user_path
from mutualrl.engines.base import ScoringEngine
from mutualrl.engines.choice import load_scoring_engine
from mutualrl.engines.model_files import known_model
from mutualrl.errors import UsageError
from mutualrl.process.loading import fast_imports
from mutualrl.recipes.schema import Policy
from mutualrl.references import HUB_ID, TINY
from mutualrl.tiny import resolve_path

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Model or tokenizer: its name, its path, and whether it has weights."""

    name: str
    path: str
    has_model: bool
    revision: str | None = None
    trust_remote_code: bool = False

    @classmethod
    def of(cls, flag: str, value: str, *, trust_remote_code: bool = False) -> Endpoint:
        """Parse the value of `--source` or `--target`: an embedded model, a directory, or a hub id.

        Raises UsageError for a directory without a tokenizer, and for any other value.
        """
        if value.startswith(TINY):
            try:
                return cls(value, known_model(value), True)
            except ValueError as error:
                raise UsageError(f"{flag} {value}: {error}") from None
        path = user_path(value)
        if path.is_dir():
            if not any((path / name).is_file() for name in _TOKENIZER_FILES):
                raise UsageError(f"{flag} {value}: no tokenizer found; expected one of {', '.join(_TOKENIZER_FILES)}")
            return cls(path.name, str(path.resolve()), _has_weights(path), None, trust_remote_code)
        if path.exists() or HUB_ID.fullmatch(value) is None:
            raise UsageError(
                f"{flag} {value}: neither a directory with a tokenizer, nor a hub id (owner/name), nor tiny:NAME"
            )
        return cls(value, value, True, None, trust_remote_code)

    @classmethod
    def of_policy(cls, policy: Policy, *, trust_remote_code: bool = False) -> Endpoint:
        """Return the model of a recipe's policy."""
        trusted = policy.trust_remote_code or trust_remote_code
        return cls(policy.name, policy.model, True, policy.revision, trusted)

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """Load the tokenizer. Raises ModelError when that fails."""
        with fast_imports():
            from mutualrl.engines.transformers_engine import load_tokenizer

        return load_tokenizer(resolve_path(self.path), revision=self.revision, trust_remote_code=self.trust_remote_code)

    def eos_token_ids(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        """Return the tokens that end its completions: the tokenizer's, and those that a model's settings declare."""
        from mutualrl.engines.generation_defaults import eos_token_ids, union_of

        if not self.has_model:
            return union_of(tokenizer.eos_token_id, None)
        path = resolve_path(self.path)
        return eos_token_ids(path, tokenizer, revision=self.revision, trust_remote_code=self.trust_remote_code)

    def engine(self) -> ScoringEngine:
        """Load model and tokenizer. Raises ModelError when that fails."""
        return load_scoring_engine(
            resolve_path(self.path), revision=self.revision, trust_remote_code=self.trust_remote_code
        )


def _has_weights(path: Path) -> bool:
    return (path / "config.json").is_file() and any(any(path.glob(pattern)) for pattern in _WEIGHTS)
