"""The Tokenizer Heterogeneity Layer (THL): pure functions on texts, ids and tokenizers."""

from mutualrl.thl.text import Retokenized, decode_completion, ended, retokenize

__all__ = ["Retokenized", "decode_completion", "ended", "retokenize"]
