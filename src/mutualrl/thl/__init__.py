"""Tokenizer Heterogeneity Layer (THL): pure functions on texts, ids, log-probs and tokenizers."""

from mutualrl.thl.align import ANCHORS, BOUND, DEFAULT_ANCHOR, Alignment, AlignmentGroup, Anchor, align_logprobs
from mutualrl.thl.batch import AlignedBatch, align_batch
from mutualrl.thl.bounds import clipped_bias_bound, ratio_envelope, residual_bound, second_moment_bound
from mutualrl.thl.offsets import token_offsets
from mutualrl.thl.text import (
    Decoder,
    Retokenized,
    decode_completion,
    end_token,
    ended,
    last_tokens,
    retokenize,
)
from mutualrl.thl.words import has_cjk, word_spans

__all__ = [
    "ANCHORS",
    "BOUND",
    "DEFAULT_ANCHOR",
    "AlignedBatch",
    "Alignment",
    "AlignmentGroup",
    "Anchor",
    "Decoder",
    "Retokenized",
    "align_batch",
    "align_logprobs",
    "clipped_bias_bound",
    "decode_completion",
    "end_token",
    "ended",
    "has_cjk",
    "last_tokens",
    "ratio_envelope",
    "residual_bound",
    "retokenize",
    "second_moment_bound",
    "token_offsets",
    "word_spans",
]
