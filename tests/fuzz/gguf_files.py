"""GGUF files: the header, the metadata by its types, the tensors and the tokenizer.

Format: ggml-org/ggml, docs/gguf.md, version 3.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from hypothesis import strategies as st

from mars_jax.hub.gguf_config import read_config
from mars_jax.hub.gguf_file import read_gguf
from mars_jax.hub.gguf_tensors import gguf_tensors
from mars_jax.hub.tokenizer import read_tokenizer
from mars_jax.models.weights import weights
from tests.fuzz.damage import damaged_bytes
from tests.fuzz.harness import Surface

ALIGNMENT = 32
TYPES = {
    "u8": 0,
    "i8": 1,
    "u16": 2,
    "i16": 3,
    "u32": 4,
    "i32": 5,
    "f32": 6,
    "bool": 7,
    "text": 8,
    "list": 9,
    "u64": 10,
}
_CODES = {
    "u8": "<B",
    "i8": "<b",
    "u16": "<H",
    "i16": "<h",
    "u32": "<I",
    "i32": "<i",
    "f32": "<f",
    "u64": "<Q",
}
SIZES = (0, 1, 2, 3, 7, 64, 255, 2**16, 2**31, 2**32 - 1)


class Value(NamedTuple):
    """Of the metadata: its type, and for lists that of what is in it and how many it says that there are."""

    kind: str
    value: Any
    of: str = ""
    count: int | None = None


class Entry(NamedTuple):
    """Of the table of tensors."""

    shape: tuple[int, ...]  # the first dimension is the fastest
    kind: int = 0  # f32
    offset: int | None = None


def _text(value: str) -> bytes:
    data = value.encode(errors="surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _number(kind: str, value: Any) -> bytes:
    if kind == "f32":
        return struct.pack("<f", value)
    if kind == "bool":
        return bytes([value % 256])
    size = struct.calcsize(_CODES[kind])
    return (int(value) % (1 << 8 * size)).to_bytes(size, "little")


def _bytes(made: Value) -> bytes:
    if made.kind == "text":
        return _text(made.value)
    if made.kind != "list":
        return _number(made.kind, made.value)
    parts = [_text(one) if made.of == "text" else _number(made.of, one) for one in made.value]
    count = len(parts) if made.count is None else made.count
    return struct.pack("<IQ", TYPES[made.of], count) + b"".join(parts)


def file(
    metadata: dict[str, Value], tensors: dict[str, Entry], counts: tuple[int, int] | None = None
) -> bytes:
    """A file; `counts` says how many tensors and values there are, where that is a lie."""
    given = (len(tensors), len(metadata)) if counts is None else counts
    made = struct.pack("<4sIQQ", b"GGUF", 3, *given)
    for key, value in metadata.items():
        made += _text(key) + struct.pack("<I", TYPES[value.kind]) + _bytes(value)
    at, data = 0, b""
    for name, entry in tensors.items():
        size = 4
        for one in entry.shape:
            size *= one
        size = min(size, 4096)
        made += _text(name) + struct.pack("<I", len(entry.shape))
        made += b"".join(struct.pack("<Q", one % 2**64) for one in entry.shape)
        made += struct.pack("<IQ", entry.kind, at if entry.offset is None else entry.offset)
        data += b"\0" * (size + -size % ALIGNMENT)
        at = len(data)
    return made + b"\0" * (-len(made) % ALIGNMENT) + data


METADATA = {
    "general.architecture": Value("text", "llama"),
    "general.alignment": Value("u32", ALIGNMENT),
    "llama.embedding_length": Value("u32", 8),
    "llama.feed_forward_length": Value("u32", 8),
    "llama.block_count": Value("u32", 1),
    "llama.context_length": Value("u32", 32),
    "llama.attention.head_count": Value("u32", 2),
    "llama.attention.head_count_kv": Value("list", [1], "u32"),
    "llama.attention.key_length": Value("u32", 4),
    "llama.attention.layer_norm_rms_epsilon": Value("f32", 1e-5),
    "llama.rope.freq_base": Value("f32", 500.0),
    "llama.rope.scaling.type": Value("text", "linear"),
    "llama.rope.scaling.factor": Value("f32", 2.0),
    "tokenizer.ggml.eos_token_id": Value("u32", 1),
    "tokenizer.ggml.model": Value("text", "llama"),
    "tokenizer.ggml.tokens": Value("list", ["a", "b", "ab"], "text"),
    "tokenizer.ggml.scores": Value("list", [0.0, 0.0, -1.0], "f32"),
    "tokenizer.ggml.token_type": Value("list", [1, 1, 1], "i32"),
    "tokenizer.ggml.merges": Value("list", ["a b"], "text"),
}
TENSORS = {
    "token_embd.weight": Entry((8, 6)),
    "output_norm.weight": Entry((8,)),
    "blk.0.attn_q.weight": Entry((8, 8)),
    "blk.0.attn_k.weight": Entry((8, 4)),
    "blk.0.ffn_up.weight": Entry((8, 8)),
}
_VALUES = st.one_of(
    st.builds(Value, st.sampled_from(("u8", "i8", "u32", "i32", "u64", "bool")), st.sampled_from(SIZES)),
    st.builds(Value, st.just("f32"), st.sampled_from((0.0, -1.0, 1e38, float("inf"), float("nan")))),
    st.builds(
        Value,
        st.just("text"),
        st.sampled_from(("", "llama", "gpt2", "gemma3", "yarn", "none", "\ud800", "a" * 99)),
    ),
    st.builds(
        Value,
        st.just("list"),
        st.lists(st.sampled_from((0, 1, 2, 255)), max_size=3),
        st.sampled_from(("u8", "u32", "u64")),
        st.sampled_from((None, None, 0, 1, 3, 2**20, 2**31, 2**40, 2**63, 2**64 - 1)),
    ),
)
_ENTRIES = st.builds(
    Entry,
    st.lists(st.sampled_from((0, 1, 4, 6, 8, 32, 2**31, 2**63, 2**64 - 1)), max_size=5).map(tuple),
    st.sampled_from((0, 0, 1, 2, 8, 14, 30, 99, 2**31)),
    st.sampled_from((None, None, 0, 7, 32, 2**31, 2**63, 2**64 - 1)),
)


@st.composite
def _structured(draw: st.DrawFn) -> bytes:
    """A file whose parts are well formed and mean something else."""
    metadata, tensors = dict(METADATA), dict(TENSORS)
    for _ in range(draw(st.integers(0, 3))):
        key = draw(st.sampled_from(sorted(METADATA)))
        metadata.pop(key, None) if draw(st.booleans()) and draw(st.booleans()) else metadata.update(
            {key: draw(_VALUES)}
        )
    for _ in range(draw(st.integers(0, 2))):
        name = draw(st.sampled_from(("rope_freqs.weight", "../x", "", *TENSORS)))
        tensors[name] = draw(_ENTRIES)
    lied = st.tuples(st.sampled_from((5, 0, 2**31, 2**63)), st.sampled_from((15, 0, 2**31, 2**64 - 1)))
    return file(metadata, tensors, draw(st.one_of(st.none(), st.none(), st.none(), lied)))


def read(case: bytes, folder: Path) -> None:
    """A file from its first byte to its tensors."""
    path = folder / "in" / "model.gguf"
    path.write_bytes(case)
    made = read_gguf(path)
    config = read_config(made)[0]
    shapes = {row.name: row.shape for row in weights(config)}
    for found in gguf_tensors(path, config):
        for name, tensor in found.items():
            if tensor.shape == shapes.get(name):  # `find_tensors` refuses the others
                assert tensor.read().shape == tensor.shape
    read_tokenizer(path)("ab\n")


def _prepare(folder: Path) -> None:
    import transformers

    assert transformers.PreTrainedTokenizerFast  # the first case would wait for its import
    (folder / "in").mkdir()


_WHOLE = file(METADATA, TENSORS)
SURFACES = {
    "GGUF": Surface(
        st.one_of(_structured(), _structured(), damaged_bytes(_WHOLE), damaged_bytes(_WHOLE, last=700)),
        read,
        1500,
        _prepare,
    ),
}
