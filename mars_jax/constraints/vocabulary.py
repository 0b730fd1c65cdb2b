"""The bytes of a tokenizer's tokens, for byte-level tokenizers and sentencepiece with or without byte fallback.

Dimensions: V vocabulary. Tested against the tokenizer's decoding (tests/constraints/test_token_table.py).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import JsonObject

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclasses.dataclass(frozen=True, eq=False)
class Vocabulary:
    """The tokens of a tokenizer as bytes. Special tokens have no bytes; `marks` contains their names."""

    tokens: tuple[bytes | None, ...]  # [V]; None for special tokens and for ids without a token
    marks: tuple[tuple[int, bytes], ...] = ()  # ids and names of special tokens
    # Function that tokenizes a text as a continuation and returns token ids. None to spell text greedily with the
    # longest tokens.
    encode: Callable[[str], list[int]] | None = None

    @functools.cached_property
    def bytes_and_lengths(self) -> tuple[np.ndarray, np.ndarray]:
        """The padded bytes of every token, u8[V, L], and its number of bytes, i32[V]; 0 for tokens without text."""
        pieces = [token or b"" for token in self.tokens]
        lengths = np.asarray(list(map(len, pieces)), np.int32)
        padded_bytes = np.zeros((len(pieces), max(1, int(lengths.max(initial=0)))), np.uint8)
        padded_bytes[np.arange(padded_bytes.shape[1])[None] < lengths[:, None]] = np.frombuffer(
            b"".join(pieces), np.uint8
        )
        return padded_bytes, lengths

    def with_marks(self) -> Vocabulary:
        """Return a vocabulary in which each special token has its name as text, because a span may begin with one."""
        marks = dict(self.marks)
        return Vocabulary(tokens=tuple(marks.get(i, token) for i, token in enumerate(self.tokens)))

    def spell(self, data: bytes) -> list[int]:
        """Return the token ids that the tokenizer would use to spell some bytes, for drafts of forced text."""
        if self.encode is not None:
            # Remove an incomplete character at the end, which the tokenizer cannot encode.
            text = data.decode("utf-8", errors="ignore")
            ids = self.encode(text)
            spelled_bytes = b"".join(self.tokens[i] or b"" for i in ids if i < len(self.tokens))
            if spelled_bytes == text.encode():
                return ids
        return self._longest(data)

    def _longest(self, data: bytes) -> list[int]:
        # Use the longest token at each position. Stop if no token fits, because a prefix is enough for a draft.
        ids, position = [], 0
        while position < len(data):
            ends = range(min(len(data), position + self._most), position, -1)
            end = next((end for end in ends if data[position:end] in self._by_bytes), None)
            if end is None:
                break
            ids.append(self._by_bytes[data[position:end]])
            position = end
        return ids

    @functools.cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        # Iterate in reverse: if several ids have the same bytes, the lowest id is written last and replaces the others.
        return {token: i for i, token in reversed(list(enumerate(self.tokens))) if token}

    @functools.cached_property
    def _most(self) -> int:
        return max(map(len, self._by_bytes), default=0)


@functools.cache
def _alphabet() -> dict[str, int]:
    """Return the map from characters to bytes that byte-level vocabularies use, as defined by GPT-2."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode  # slow to import

    return {character: byte for byte, character in bytes_to_unicode().items()}


def vocabulary(tokenizer: Any, size: int) -> Vocabulary:
    """Return the vocabulary of a transformers tokenizer.

    Args:
      tokenizer: a byte-level tokenizer, or a sentencepiece tokenizer with or without byte fallback.
      size: V of the model. Ids past the tokenizer's vocabulary have no text.

    Raises:
      MarsError: the tokenizer's tokens are not pieces of text.
    """
    # The added and special tokens are part of the cache key, because users may change them.
    added_tokens = str(tokenizer.added_tokens_decoder), str(getattr(tokenizer, "all_special_ids", ()))
    try:
        return _vocabulary(tokenizer, size, added_tokens)
    except TypeError:  # the tokenizer cannot be hashed
        return _vocabulary.__wrapped__(tokenizer, size, added_tokens)


@functools.lru_cache(maxsize=4)
def _vocabulary(tokenizer: Any, size: int, _: tuple[str, str]) -> Vocabulary:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoders = [] if backend is None else _decoders(json.loads(backend.to_str()).get("decoder"))
    if "WordPiece" in decoders:
        raise MarsError(
            "the tokenizer is a WordPiece, whose tokens are not pieces of text: constraints need another one."
        )
    as_bytes = _byte_level if "ByteLevel" in decoders else _piece
    added = {int(i): token for i, token in tokenizer.added_tokens_decoder.items()}
    special_ids = {i for i, token in added.items() if token.special}
    special_ids |= {int(i) for i in getattr(tokenizer, "all_special_ids", ())}
    tokens: list[bytes | None] = [None] * size
    marks = []
    for piece, i in tokenizer.get_vocab().items():
        # Added tokens are stored as plain text, and other tokens are stored in the alphabet of the tokenizer.
        data = str(added[i]).encode() if i in added else as_bytes(piece)
        if not data or not 0 <= i < size:
            continue
        if i in special_ids:
            marks.append((i, data))
        else:
            tokens[i] = data
    return Vocabulary(tokens=tuple(tokens), marks=tuple(sorted(marks)), encode=_inside(tokenizer))


def _decoders(decoder: JsonObject | None) -> list[str]:
    """Return the types of a tokenizer's decoder and of the decoder's parts."""
    if not decoder:
        return []
    return [decoder["type"], *(name for part in decoder.get("decoders", ()) for name in _decoders(part))]


def _byte_level(piece: str) -> bytes:
    alphabet = _alphabet()
    if all(c in alphabet for c in piece):
        return bytes(alphabet[c] for c in piece)
    return piece.encode()


def _piece(piece: str) -> bytes:
    if byte_match := _BYTE.fullmatch(piece):
        return bytes([int(byte_match[1], 16)])
    return piece.replace(_SPACE, " ").encode()


def _inside(tokenizer: Any) -> Callable[[str], list[int]]:
    """Return a function that tokenizes a text as a continuation, without adding a leading space or special tokens."""

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    # Put a line break before the text: no tokenizer of these families merges it with the text that follows.
    line_break_ids = ids("\n")

    def encode(text: str) -> list[int]:
        joined_ids = ids("\n" + text)
        if joined_ids[: len(line_break_ids)] == line_break_ids:
            return joined_ids[len(line_break_ids) :]
        return ids(text)

    return encode
