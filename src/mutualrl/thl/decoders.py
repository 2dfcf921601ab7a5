"""Bytes that a tokenizer's decoder produces for one token in the middle of a text.

Supports the decoders of byte-level BPE and of SentencePiece models (metaspace, byte fallback), which causal language
models use. Any other decoder is refused by name rather than guessed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mutualrl.errors import TokenizerError
from mutualrl.storage.files import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: `TokenBytes.strips` of a decoder that strips all leading spaces of the first token
FIRST_TOKEN = -1

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SUPPORTED = (
    "byte-level BPE (ByteLevel, alone or after steps that change none of its tokens) "
    "and SentencePiece (Metaspace, or Replace with ByteFallback)"
)


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each printable character of a byte-level vocabulary (GPT-2's table)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(moved)}


ALPHABET = _byte_alphabet()


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """Token bytes of one decoder: `bytes_of` a token, whether it `is_byte` of a byte fallback, the number of leading
    spaces that decoding `strips`."""

    bytes_of: Callable[[str], bytes]
    is_byte: Callable[[str], bool]
    strips: int


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(map(ALPHABET.__getitem__, piece))
    except KeyError:  # an added token, stored as plain text
        return piece.encode()


def _never(piece: str) -> bool:
    return False


def _is_byte(piece: str) -> bool:
    return _BYTE.fullmatch(piece) is not None


def token_bytes(tokenizer: PreTrainedTokenizerBase) -> TokenBytes:
    """Return the token bytes of a fast tokenizer's decoder.

    Raises TokenizerError for a slow tokenizer or an unknown decoder.
    """
    name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
    if not getattr(tokenizer, "is_fast", False):
        raise TokenizerError(
            f"tokenizer {name!r} is slow ({type(tokenizer).__name__}), expected a fast one; if transformers can "
            "convert it, save it with AutoTokenizer.from_pretrained(...).save_pretrained(DIR) and pass DIR"
        )
    decoder = tokenizer.backend_tokenizer.decoder
    steps = [] if decoder is None else _steps(json.loads(decoder.__getstate__()))
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"] or (kinds[-1:] == ["ByteLevel"] and _only_byte_level(steps[:-1], tokenizer)):
        return TokenBytes(_byte_level, _never, 0)
    sentencepiece = _sentencepiece(steps) if kinds else None
    if sentencepiece is None:
        raise TokenizerError(f"tokenizer {name!r} has the decoder {kinds or None}, expected {_SUPPORTED}")
    return sentencepiece


def _only_byte_level(before: list[JsonObject], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the steps before a ByteLevel step change nothing. transformers adds SentencePiece's steps to a
    byte-level BPE read from GGUF, and no piece of a byte-level vocabulary has a character that they replace."""
    for step in before:
        match step:
            case {"type": "ByteFallback"} | {"type": "Fuse"}:
                pass
            case {"type": "Replace", "pattern": {"String": str(old)}} if not set(old) <= ALPHABET.keys():
                pass
            case _:
                return False
    return all(ALPHABET.keys() >= set(piece) and not _is_byte(piece) for piece in tokenizer.get_vocab())


def _steps(state: JsonObject) -> list[JsonObject]:
    nested = state["decoders"] if state["type"] == "Sequence" else [state]
    steps: list[JsonObject] = []
    for step in nested:
        steps += _steps(step) if step["type"] == "Sequence" else [step]
    return steps


def _sentencepiece(steps: list[JsonObject]) -> TokenBytes | None:
    """Return the token bytes of a decoder of replacements, with or without byte fallback and stripping; None for any
    other."""
    replaced: list[tuple[str, str]] = []
    fallback, strips = False, 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replaced.append((old, new))
            case {"type": "Metaspace", "replacement": str(old)}:
                replaced.append((old, " "))
                strips = 0 if step.get("prepend_scheme") == "never" else FIRST_TOKEN
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "start": int(start), "stop": 0}:
                strips = start
            case _:
                return None

    def bytes_of(piece: str) -> bytes:
        for old, new in replaced:
            piece = piece.replace(old, new)
        byte = _BYTE.fullmatch(piece) if fallback else None
        return bytes([int(byte[1], 16)]) if byte else piece.encode()

    return TokenBytes(bytes_of, _is_byte if fallback else _never, strips)
