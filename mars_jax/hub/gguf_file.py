"""A GGUF file, the format of llama.cpp, opened by the `gguf` package. Reading runs nothing of the file's."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np

from mars_jax.core.errors import MarsError, first_line


class GGUFFile:
    """The metadata and the tensors of a file. Tensors are mapped, not read; metadata is read when it is asked for."""

    def __init__(self, path: Path, reader: Any):
        self.path, self._reader = path, reader
        self.tensors: dict[str, Any] = {tensor.name: tensor for tensor in reader.tensors}
        """`gguf.ReaderTensor` by the file's own names."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata: a number, a text, or a list of them.

        Raises:
          MarsError: its bytes are none of these.
        """
        field = self._reader.fields.get(key)
        try:
            return default if field is None else field.contents()
        except (ValueError, LookupError, TypeError) as error:  # such as a text that is not UTF-8
            raise MarsError(
                f"'{self.path}' holds a {key} that cannot be read ({error}): download it again."
            ) from None

    @property
    def architecture(self) -> str:
        """Name of the architecture, such as "llama": the prefix of the metadata that describes the model."""
        return str(self.get("general.architecture", ""))

    def of_model(self, key: str, default: Any = None) -> Any:
        """Return a value of the metadata below the architecture, such as "block_count"."""
        return self.get(f"{self.architecture}.{key}", default)


def is_gguf(path: Path) -> bool:
    """Tell whether a path is to be read as GGUF."""
    return path.suffix == ".gguf" and path.is_file()


@functools.lru_cache(maxsize=4)
def read_gguf(path: Path) -> GGUFFile:
    """Open a file.

    Raises:
      MarsError: the `gguf` package is not installed, or the file is truncated, corrupt or no GGUF.
    """
    try:
        reader = _bounded_reader()
    except ImportError:
        raise MarsError(
            f"'{path}' is a GGUF file, and the package gguf is not installed: pip install 'mars-jax[gguf]'."
        ) from None
    try:
        return GGUFFile(path, reader(path))
    except OSError as error:
        raise MarsError(f"'{path}' cannot be read ({error}).") from None
    # The reader trusts the counts in the file, and raises anything from ValueError to IndexError.
    except Exception as error:
        raise MarsError(
            f"'{path}' is truncated, corrupt or no GGUF file ({first_line(error)}): download it again."
        ) from None


@functools.cache
def _bounded_reader() -> Any:
    """Return the reader of the `gguf` package, but one that stops where the file does.

    Past the end the package's own reads nothing without a word, so that a damaged count, of 2^40 values say, keeps it
    going until memory is out.
    """
    import gguf

    class BoundedReader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *more: Any, **named: Any) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("it ends before what its header announces")
            return super()._get(offset, dtype, count, *more, **named)

    return BoundedReader
