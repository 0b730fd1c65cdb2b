"""The tokenizer in the metadata of a GGUF file, built with the tokenizers library.

Keys: ggml-org/ggml, docs/gguf.md. Pre-tokenizers and defaults: ggml-org/llama.cpp, src/llama-vocab.cpp, or the original
tokenizer.json if llama.cpp only approximates it, for example Qwen's NFC or the letter case in Tekken. Tested against
the original tokenizer of each file, including sentencepiece models, and against transformers' GGUF reader
(tests/hub/test_gguf_tokenizer.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from mars_jax.hub.gguf_file import GGUFFile
from mars_jax.utils.compilations import keep_bytes, kept_bytes
from mars_jax.utils.errors import MarsError
from mars_jax.utils.limits import TOKEN_BYTES

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

Value = TypeVar("Value")
Build = Callable[[GGUFFile, dict[str, tuple[int, int]]], "tuple[Tokenizer, bool]"]
"""Function that builds a tokenizer from the (id, type) of each token; see `_byte_level`."""

# Types of tokens in the metadata.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = range(1, 6)
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # sentencepiece's symbol for a space
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
"""Names of the special tokens in the metadata, keyed by their names in transformers."""


class _Split(NamedTuple):
    """A byte-level pre-tokenizer, which splits text into words. `tokenizer.ggml.pre` selects it."""

    patterns: tuple[str, ...]  # applied in order; each splits the pieces left by the previous ones
    nfc: bool = False  # normalise to NFC
    ignore_merges: bool = False  # keep a word that is a token, without applying merges
    bos: bool = False  # default of `tokenizer.ggml.add_bos_token`


# The alternatives are, in order: contractions, words, numbers, punctuation, and white space.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
# Llama 3 and Qwen 2 share `_WORDS` and `_MARKS`, and differ in the pattern for digits that is inserted between the two.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_MARKS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
# Tekken and GPT-4o split a word between a lower-case and an upper-case letter. Marks and letters without case count
# as both.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES
)
_LLAMA3 = _Split((_WORDS + r"\p{N}{1,3}" + _MARKS,), ignore_merges=True, bos=True)
_QWEN = (_WORDS + r"\p{N}" + _MARKS,)
# Qwen3.5 keeps combining marks (\p{M}) inside words.
_QWEN_3_5 = (
    _CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _SPACES,
)
_SPLITS = {
    "default": _Split((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": _Split((_GPT2,)),
    "smollm": _Split((r"\p{N}", _GPT2)),
    "refact": _Split((r"\p{N}", _GPT2)),  # Granite
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "smaug-bpe": _Split(_LLAMA3.patterns, ignore_merges=True),  # SmolLM3
    "dbrx": _Split(_LLAMA3.patterns),  # OLMo 2, Phi-4
    "glm4": _Split(_LLAMA3.patterns),
    "chatglm-bpe": _Split(_LLAMA3.patterns),
    "gpt-4o": _Split((_O200K,)),  # Phi-4-mini, gpt-oss
    "qwen2": _Split(_QWEN, nfc=True),
    "qwen35": _Split(_QWEN_3_5, nfc=True),
    "deepseek-r1-qwen": _Split(_QWEN),
    "deepseek-coder": _Split((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "tekken": _Split((_TEKKEN,), ignore_merges=True, bos=True),
}


def plain_tokenizer(file: GGUFFile) -> Tokenizer:
    """Return the `tokenizers.Tokenizer` that a file describes. Later processes read it from the cache on disk.

    Raises:
      MarsError: the tokenizer's model or pre-tokenizer is not supported, or a token is too long.
    """
    import tokenizers

    code = Path(__file__).read_bytes()
    key = (code, tokenizers.__version__, file.digest("tokenizer."))
    if (kept := kept_bytes("tokenizers", *key)) is not None:
        with contextlib.suppress(Exception):  # tokenizers raises plain Exception for a damaged file
            return tokenizers.Tokenizer.from_buffer(kept)
    tokenizer = _build(file)
    keep_bytes(lambda: tokenizer.to_str().encode(), "tokenizers", *key)
    return tokenizer


def gguf_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """Return the result of `plain_tokenizer` as a transformers tokenizer with a chat template, without using PyTorch.

    Raises:
      MarsError: see `plain_tokenizer`.
    """
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain_tokenizer(file),
        chat_template=file.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **_special_tokens(file),
    )


def _special_tokens(file: GGUFFile) -> dict[str, str]:
    """Return the special tokens of a file, keyed by the names that transformers uses."""
    tokens = file.get("tokenizer.ggml.tokens")
    ids = {name: file.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None}


def _build(file: GGUFFile) -> Tokenizer:
    from tokenizers import AddedToken, processors

    tokens = file.get("tokenizer.ggml.tokens")
    if longest := max((t for t in tokens if len(t.encode()) > TOKEN_BYTES), key=len, default=""):
        raise MarsError(
            f"'{file.path}' has a token of {len(longest.encode()):,} bytes: expected at most {TOKEN_BYTES:,}; download "
            "it again, or give prompts as token ids."
        )
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    # Leave out unused tokens, which only pad the embeddings.
    kinds = {token: (i, types[i]) for i, token in enumerate(tokens) if types[i] != _UNUSED}
    builders: dict[str, Build] = {"gpt2": _byte_level, "llama": _sentencepiece}
    tokenizer, bos = _look_up(file, "tokenizer.ggml.model", builders)(file, kinds)
    # Added tokens are matched before the text is split into words. Decoded text omits those that are special.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, (_, kind) in kinds.items()
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    named = _special_tokens(file)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in named.values()])
    # The default for BOS depends on the model and the pre-tokenizer. EOS is off by default.
    added_tokens = [
        named.get(f"{end}_token") if file.get(f"tokenizer.ggml.add_{end}_token", default) else None
        for end, default in (("bos", bos), ("eos", False))
    ]
    bos_part, eos_part = ([token] if token else [] for token in added_tokens)
    single = [*bos_part, "$A", *eos_part]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *(f"{part}:1" for part in (*bos_part, "$B", *eos_part))],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (*bos_part, *eos_part)],
    )
    return tokenizer


def _look_up(file: GGUFFile, key: str, table: Mapping[str, Value]) -> Value:
    """Look up the value of a metadata key in a table, and return the entry.

    Raises:
      MarsError: the table has no such entry.
    """
    name = file.get(key)
    if name not in table:
        raise MarsError(
            f"'{file.path}' has {name!r} as its {key}, and the supported ones are {', '.join(table)}: use the "
            "checkpoint in the Hugging Face layout, or give prompts as token ids."
        )
    return table[name]


def _byte_level(file: GGUFFile, kinds: dict[str, tuple[int, int]]) -> tuple[Tokenizer, bool]:
    """Build a byte-level BPE tokenizer. Return the tokenizer, and whether it adds a BOS token by default."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    split = _look_up(file, "tokenizer.ggml.pre", _SPLITS)
    # The byte-level alphabet has no space, so the file can use one to separate the two tokens of a merge.
    merges = [tuple(pair.split(" ")) for pair in file.get("tokenizer.ggml.merges")]
    vocab = {token: i for token, (i, _) in kinds.items()}
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=split.ignore_merges))
    if split.nfc:
        tokenizer.normalizer = normalizers.NFC()
    # The patterns do all the splitting. `ByteLevel` then only maps bytes to characters.
    words = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in split.patterns]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*words, as_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, split.bos


def _sentencepiece(file: GGUFFile, kinds: dict[str, tuple[int, int]]) -> tuple[Tokenizer, bool]:
    """Build a sentencepiece BPE tokenizer, which merges the highest-scoring pair. See `_byte_level` for the result."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    scores = file.get("tokenizer.ggml.scores")
    pieces = {token: i for token, (i, kind) in kinds.items() if kind == _NORMAL}
    # Every split of a piece into two pieces is a merge. Merges are sorted by the merged piece: by score, highest first,
    # and then by id.
    merges = sorted(
        (-scores[i], i, piece[:cut], piece[cut:])
        for piece, i in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    )
    unknown = next((token for token, (_, kind) in kinds.items() if kind == _UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(
            {token: i for token, (i, _) in kinds.items()},
            [(first, second) for *_, first, second in merges],
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    normalizer: list[Any] = [normalizers.Replace(" ", _SPACE)]
    decoder: list[Any] = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.get("tokenizer.ggml.add_space_prefix", True):
        normalizer.insert(0, normalizers.Prepend(_SPACE))
        # `Strip` applies to each piece, so it must follow `Fuse`, which joins all pieces into one.
        decoder.append(decoders.Strip(" ", 1, 0))
    tokenizer.normalizer = normalizers.Sequence(normalizer)
    tokenizer.decoder = decoders.Sequence(decoder)
    return tokenizer, True
