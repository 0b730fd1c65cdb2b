"""Loading of a checkpoint's tokenizer, with the tokenizers library if that suffices and with transformers otherwise."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mars_jax.hub.config_json import read_json
from mars_jax.hub.gguf_file import gguf_parts, is_gguf, read_gguf
from mars_jax.hub.gguf_tokenizer import gguf_tokenizer, plain_tokenizer
from mars_jax.hub.versions import cached_by_version
from mars_jax.utils.errors import MarsError, first_line
from mars_jax.utils.limits import TOKENIZER_BYTES
from mars_jax.utils.paths import open_file
from mars_jax.utils.types import JsonObject

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
"""Every directory with a tokenizer contains at least one of these files."""
_READ = (
    *("tokenizer*", "tekken.json", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt"),
    *("*.model", "*.tiktoken", "*chat_template*", "additional_chat_templates/*", "config.json"),
)
"""Patterns of all files that transformers reads for a tokenizer."""

# Tokenizer classes of transformers 4 and 5 that tokenizer.json describes completely.
_PLAIN = ("PreTrainedTokenizerFast", "TokenizersBackend")
# Keys of tokenizer_config.json that do not affect encoding or decoding. A key in `_NAMED` matters only if
# tokenizer.json does not mark its token as special.
_HARMLESS = {
    "backend",
    "clean_up_tokenization_spaces",
    "model_max_length",
    "tokenizer_class",
    "chat_template",
}
_NAMED = {"bos_token", "eos_token", "pad_token", "unk_token"}
_PARALLEL = "TOKENIZERS_PARALLELISM"
_ON_ALL_CORES = os.environ.get(_PARALLEL, "true")


def _tokenizer_files(path: Path) -> list[Path]:
    """Return the files that determine the tokenizer of a checkpoint directory or GGUF file."""
    if is_gguf(path):
        return gguf_parts(path)
    return sorted(file for pattern in _READ for file in path.glob(pattern))


# Cached, so that `outline` and a later `load` of the same checkpoint read its tokenizer once.
@cached_by_version(_tokenizer_files)
def read_tokenizer(path: Path) -> Any:
    """Read the transformers tokenizer of a checkpoint directory or GGUF file, without running the checkpoint's code.

    Raises:
      MarsError: the tokenizer is absent or cannot be read.
    """
    _check_files(path)
    os.environ.setdefault(_PARALLEL, "false")
    # transformers warns on import if PyTorch is missing, although tokenizers do not need PyTorch.
    with _environment("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"):
        from transformers.utils import logging

    logging.set_verbosity_error()  # hide warnings of transformers
    data = _tokenizer_config(path)
    try:
        with catch_panics(path):
            if is_gguf(path):
                return gguf_tokenizer(read_gguf(path))
            import transformers

            is_plain = data.get("tokenizer_class") in _PLAIN and "auto_map" not in data
            if is_plain and (path / "tokenizer.json").exists():
                # AutoTokenizer would choose the same class, but importing AutoTokenizer takes 2 s.
                tokenizer_class = transformers.PreTrainedTokenizerFast
            else:
                tokenizer_class = transformers.AutoTokenizer
            # Without trust_remote_code=False, transformers would ask on stdin whether to run the checkpoint's code.
            return tokenizer_class.from_pretrained(str(path), trust_remote_code=False)
    except MarsError:
        raise
    except Exception as error:  # transformers raises anything from OSError to tokenizers' bare Exception
        cure = "put the checkpoint's tokenizer files next to its weights, or give prompts as token ids"
        if is_gguf(path):
            cure = "download it again, or give prompts as token ids"
        if "auto_map" in data:
            cure = (
                "its tokenizer_config.json refers to custom code (auto_map), which is never run; give prompts as token "
                "ids, or use a checkpoint whose tokenizer transformers supports"
            )
        raise MarsError(f"no tokenizer could be read from '{path}' ({first_line(error)}): {cure}.") from error


@cached_by_version(_tokenizer_files)
def read_plain(path: Path) -> Tokenizer | None:
    """Read a checkpoint's `tokenizers.Tokenizer`; None if its files have settings that only transformers applies.

    The tokenizer encodes and decodes exactly like the one from `read_tokenizer`, without the slow import of
    transformers.
    """
    _check_files(path)
    os.environ.setdefault(_PARALLEL, "false")
    try:
        with catch_panics(path):
            if is_gguf(path):
                return plain_tokenizer(read_gguf(path))
            return _read_tokenizer_json(path)
    except Exception:  # tokenizers raises plain Exception; `read_tokenizer` will report the error
        return None


def _read_tokenizer_json(path: Path) -> Tokenizer | None:
    import tokenizers

    data = _tokenizer_config(path)
    has_other_files = any((path / name).exists() for name in ("special_tokens_map.json", "added_tokens.json"))
    if data.get("tokenizer_class") not in _PLAIN or has_other_files or data.keys() - _HARMLESS - _NAMED:
        return None
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    if any(data[name] not in (None, *special) for name in _NAMED & data.keys()):
        return None  # transformers would add this token
    # tokenizer.json may enable padding and truncation, which transformers applies only on request.
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


@contextlib.contextmanager
def catch_panics(name: str | Path) -> Iterator[None]:
    """Convert a panic of the tokenizers library, which is written in Rust, into a MarsError.

    In Python, such a panic is a `BaseException` but not an `Exception`.

    Args:
      name: name of the checkpoint, for the message.

    Raises:
      MarsError: the library panicked.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # no module exports this class
            raise
        raise MarsError(
            f"the tokenizer of '{name}' fails ({first_line(error)}): its files contradict each other, so download them "
            "again, or give prompts as token ids."
        ) from None


def on_all_cores() -> contextlib.AbstractContextManager[None]:
    """Let tokenizers split a batch over threads, unless the user has set TOKENIZERS_PARALLELISM.

    The variable is reset afterwards, because tokenizers prints a warning if a process forks while it is true.
    """
    return _environment(_PARALLEL, _ON_ALL_CORES)


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for the duration of the context."""
    previous = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if previous is not None:
            os.environ[name] = previous


def _check_files(directory: Path) -> None:
    """Raise MarsError if a tokenizer file would block its reader, as a pipe would, or exceeds `TOKENIZER_BYTES`."""
    for file in (file for pattern in _READ for file in directory.glob(pattern) if not file.is_dir()):
        try:
            open_file(file, TOKENIZER_BYTES).close()
        except OSError as error:
            raise MarsError(f"'{file}' cannot be read ({error.strerror}): download it again.") from None


def _tokenizer_config(path: Path) -> JsonObject:
    """Return the object in tokenizer_config.json; {} if the file is absent or is not a JSON object."""
    try:
        return read_json(path / "tokenizer_config.json")
    except MarsError:  # AutoTokenizer will report the error
        return {}
