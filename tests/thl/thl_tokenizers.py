"""Tokenizers shared by the THL tests: built by hand, trained here, and real ones where their files exist."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from conftest import REAL_DATA
from mutualrl.engines.transformers_engine import load_tokenizer
from mutualrl.paper.embedded.build import build_tokenizer
from mutualrl.paper.embedded.spec import POLICIES

CORPUS = ["Once upon a time there was a number, 12 + 30 = 42.", "So \\boxed{42} it is; and 7 * 6 = 42 as well."] * 4
MIXED = [
    *CORPUS,
    "日本語の文と中文的句子。 한국어 문장",
    "نص عربي قصير ไทยไม่มีช่องว่าง हिन्दी में",
    "def f(x):\r\n    return x**2\n\n\tif x: pass\n",
    "👩‍👩‍👧 café cafe\u0301 … “quoted” — \\frac{a}{b}.\n",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]


def byte_bpe(*merges: str, add_prefix_space: bool = False) -> Any:
    """Return a byte-level BPE with these merges only, each written as two parts separated by a dot, in GPT-2's byte
    alphabet."""
    alphabet = sorted(bytes_to_unicode().values())
    pairs = [tuple(merge.split("·")) for merge in merges]
    vocabulary = {piece: i for i, piece in enumerate(["<eos>", *alphabet, *("".join(pair) for pair in pairs)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", pad_token="<eos>")


def byte_level_from_gguf() -> Any:
    """Return a byte-level BPE with the decoder that transformers builds for one read from a GGUF file."""
    tokenizer = build_tokenizer(POLICIES["bob"])
    steps = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " "), decoders.ByteLevel()]
    tokenizer.backend_tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def _wrapped(tokenizer: Tokenizer) -> Any:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


@cache
def sentencepiece_like(normalizer: str = "") -> Any:
    """Return a metaspace BPE with byte fallback, like a converted SentencePiece model."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    if normalizer == "Doubled":
        tokenizer.normalizer = normalizers.Replace("t", "tt")
    elif normalizer:
        tokenizer.normalizer = getattr(normalizers, normalizer)()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _wrapped(_with_bytes(tokenizer))


def _with_bytes(tokenizer: Tokenizer) -> Tokenizer:
    raw = json.loads(tokenizer.to_str())
    vocabulary = raw["model"]["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary |= {token: len(vocabulary) + i for i, token in enumerate(BYTES)}
    else:
        vocabulary += [[token, -20.0] for token in BYTES]
        raw["model"]["byte_fallback"] = True
    return Tokenizer.from_str(json.dumps(raw))


@cache
def unigram(byte_fallback: bool = True) -> Any:
    """Return a Unigram model with metaspaces, with byte fallback or <unk> for unknown characters."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    corpus = MIXED if byte_fallback else CORPUS
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(corpus, trainer)
    if byte_fallback:
        tokenizer = _with_bytes(tokenizer)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    return _wrapped(tokenizer)


@cache
def synthetic(name: str) -> Any:
    """Return a tokenizer that needs no file: one of the embedded pool, or one built here."""
    if name in POLICIES:
        return build_tokenizer(POLICIES[name])
    kinds = {
        "gguf": byte_level_from_gguf,
        "sentencepiece": sentencepiece_like,
        "unigram": unigram,
        "unigram-unk": lambda: unigram(byte_fallback=False),
        "lowercase": lambda: sentencepiece_like("Lowercase"),
        "nfc": lambda: sentencepiece_like("NFC"),
    }
    return kinds[name]()


SYNTHETIC = ("ada", "bob", "gguf", "sentencepiece", "unigram")
LOSSY = ("unigram-unk", "lowercase", "nfc")
REAL = ("qwen2.5", "qwen3", "llama3", "mistral-tekken-240911", "phi4-mini-style", "gpt2")
REAL_MODELS = ("stories260K", "babyllama-tok361")


@cache
def real(name: str, root: Path = REAL_DATA) -> Any:
    """Return a real tokenizer from the data directory beside the repository."""
    return load_tokenizer(str(root / ("models" if name in REAL_MODELS else "tokenizers") / name))


def any_tokenizer(name: str) -> Any:
    """Return one of this module's tokenizers by name."""
    return real(name) if name in REAL + REAL_MODELS else synthetic(name)


#: every available tokenizer: the synthetic ones, and the real ones where the data exists
ALL = (*SYNTHETIC, *LOSSY, *((*REAL, *REAL_MODELS) if REAL_DATA.is_dir() else ()))

_TO_BYTE = {character: byte for byte, character in bytes_to_unicode().items()}


@cache
def vocabulary_of(tokenizer: Any) -> tuple[dict[str, int], dict[int, str], frozenset[int]]:
    """Return ids by piece, pieces by id, and the ids of control tokens."""
    by_piece: dict[str, int] = tokenizer.get_vocab()
    controls = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return by_piece, {i: piece for piece, i in by_piece.items()}, frozenset(controls)


@cache
def _kind(tokenizer: Any) -> str:
    return repr(tokenizer.backend_tokenizer.decoder)


def independent_bytes(token: int, tokenizer: Any) -> bytes:
    """Return the bytes of a token, computed without the package: GPT-2's alphabet, metaspaces, byte tokens."""
    _, pieces, controls = vocabulary_of(tokenizer)
    piece = pieces[token]
    if token in controls:
        return b""
    if "ByteLevel" in _kind(tokenizer):
        return bytes(_TO_BYTE[character] for character in piece)
    if piece in BYTES and "ByteFallback" in _kind(tokenizer):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()


def resplit(ids: Sequence[int], tokenizer: Any, rng: random.Random, chance: float = 0.3) -> list[int]:
    """Return other ids of the same text: some tokens are split, where the vocabulary allows, down to single bytes."""
    known, pieces, _ = vocabulary_of(tokenizer)
    result: list[int] = []
    for token in ids:
        piece = pieces[token]
        halves = [(piece[:k], piece[k:]) for k in range(1, len(piece)) if piece[:k] in known and piece[k:] in known]
        byte_tokens = [f"<0x{byte:02X}>" for byte in independent_bytes(token, tokenizer)]
        if rng.random() > chance:
            result.append(token)
        elif halves:
            result += [i for half in rng.choice(halves) for i in resplit([known[half]], tokenizer, rng, chance)]
        elif len(byte_tokens) > 1 and all(b in known for b in byte_tokens):
            result += [known[b] for b in byte_tokens]
        else:
            result.append(token)
    return result
