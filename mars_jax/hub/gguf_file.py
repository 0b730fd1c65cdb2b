"""Reader for the metadata and tensors of GGUF files, the format of llama.cpp. It runs no code from the file.

Format: ggml-org/ggml, docs/gguf.md, versions 2 and 3. The file is read, not memory-mapped. The reader in the package
gguf memory-maps the file, so that its pages count as this process's memory, and creates two arrays per token. Tested
against the package's writer and its `dequantize` (tests/hub/test_gguf.py).
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
import re
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from mars_jax.hub.versions import Version, cached_by_version, check_version, version_of
from mars_jax.utils.errors import MarsError, first_line
from mars_jax.utils.limits import GGUF_HEADER_BYTES

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""`struct` codes of the number types in the metadata."""
_TEXT, _LIST = 8, 9
_PART = re.compile(r"(.+)-([0-9]{5})-of-([0-9]{5})\.gguf")
"""Pattern for the file names of the parts of a split file (llama.cpp, `llama_split_path`)."""


class GGUFTensor(NamedTuple):
    """A tensor in a GGUF file."""

    shape: tuple[int, ...]  # rows first, as in numpy
    kind: GGMLQuantizationType
    begin: int  # byte offset of the data in the file
    path: Path  # file that stores the tensor, one of several if the model is split
    version: Version  # version of that file when its header was read

    def part(self, first: int, *shape: int) -> GGUFTensor:
        """Return a tensor of the given shape whose data begins at row `first` of this one."""
        begin = self.begin + first * _size(math.prod(self.shape[1:]), self.kind)
        return self._replace(shape=shape, begin=begin)


class GGUFFile:
    """The metadata and tensors of a model in one file or several parts. `rows` and `stored` read a tensor's data."""

    def __init__(self, path: Path, values: dict[str, Any], tensors: dict[str, GGUFTensor]):
        self.path, self._values, self.tensors = path, values, tensors

    def with_tensors(self, tensors: dict[str, GGUFTensor]) -> GGUFFile:
        """Return a file with the same metadata and the given tensors."""
        return GGUFFile(self.path, self._values, tensors)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a metadata value: a number, a string, or a list of them.

        Raises:
          MarsError: a string is not valid UTF-8.
        """
        try:
            return _decoded(self._values.get(key, default))
        except UnicodeDecodeError:
            raise MarsError(f"{key} of '{self.path}' is not valid UTF-8: download it again.") from None

    def digest(self, prefix: str) -> str:
        """Return a digest of all metadata values whose keys begin with `prefix`."""
        values = {key: value for key, value in self._values.items() if key.startswith(prefix)}
        return hashlib.sha256(pickle.dumps(values)).hexdigest()

    @property
    def architecture(self) -> str:
        """Name of the architecture, such as "llama". It is also the prefix of the keys that describe the model."""
        return str(self.get("general.architecture", ""))

    def of_model(self, key: str, default: Any = None) -> Any:
        """Return the value of a metadata key under the architecture's prefix, such as "block_count"."""
        return self.get(f"{self.architecture}.{key}", default)

    def rows(self, name: str, first: int, last: int) -> np.ndarray:
        """Return rows `first .. last - 1` of a tensor, f32[last - first, ...].

        Raises:
          MarsError: the rows cannot be read, or have a type that the package gguf cannot dequantise.
        """
        import gguf

        shape, kind, *_ = self.tensors[name]
        is_vector = len(shape) < 2
        # A quantisation block spans several elements of a vector, so read the whole vector, which is one stored row.
        stored_rows = (0, 1) if is_vector else (first, last)
        data = self.stored(name, *stored_rows)
        try:
            values = gguf.dequantize(data, kind)
        except NotImplementedError:
            raise MarsError(
                f"tensor {name} of '{self.path}' is of type {kind.name}, which the package gguf does not support: "
                "use a file with a different quantisation."
            ) from None
        if is_vector:
            return values.reshape(-1)[first:last]
        return values.reshape(len(data), *shape[1:])

    def stored(self, name: str, first: int, last: int) -> np.ndarray:
        """Return the stored bytes of rows of a tensor, u8[last - first, bytes]; a vector counts as one row.

        Raises:
          MarsError: the rows cannot be read, or the file changed after its header was read.
        """
        shape, kind, begin, path, version = self.tensors[name]
        width = _size(math.prod(shape[1:] or shape), kind)
        try:
            with open(path, "rb", buffering=0) as file:
                file.seek(begin + first * width)
                data = np.fromfile(file, np.uint8, (last - first) * width)
            check_version(path, version)
            # If the file is truncated, `data` is too short, and `reshape` raises ValueError.
            return data.reshape(last - first, width)
        except (OSError, ValueError) as error:
            raise MarsError(f"tensor {name} of '{path}' cannot be read ({error}).") from None


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if isinstance(value, bytes):
        return value.decode()
    return value


def _size(count: int, kind: GGMLQuantizationType) -> int:
    """Return the size in bytes of `count` numbers of a type."""
    import gguf

    block, size = gguf.GGML_QUANT_SIZES[kind]
    if count % block:
        raise ValueError(f"a row of {count} numbers does not consist of whole blocks of {block}")
    return count // block * size


def is_gguf(path: Path) -> bool:
    """Return whether a path is a file with the suffix of GGUF files."""
    return path.suffix == ".gguf" and path.is_file()


def gguf_parts(path: Path) -> list[Path]:
    """Return all files of a model, given its path or the path of any part of a split model.

    >>> [part.name for part in gguf_parts(Path("m-00002-of-00002.gguf"))]
    ['m-00001-of-00002.gguf', 'm-00002-of-00002.gguf']
    """
    match = _PART.fullmatch(path.name)
    if match is None or int(match[3]) < 2:
        return [path]
    return [path.with_name(f"{match[1]}-{i + 1:05}-of-{match[3]}.gguf") for i in range(int(match[3]))]


@cached_by_version(gguf_parts)
def read_gguf(path: Path) -> GGUFFile:
    """Open a file, or all parts of a split file: the first part contains the metadata, and each part contains some of
    the tensors.

    Raises:
      MarsError: the `gguf` package is not installed; a file is truncated, corrupt or not GGUF; or parts of a split file
        are missing or have names that contradict their headers.
    """
    parts = gguf_parts(path)
    missing = [part.name for part in parts if not part.is_file()]
    if missing and len(parts) > 1:
        raise MarsError(
            f"'{path}' is one of {len(parts)} parts of a split file, and {missing[0]} is missing: put all parts into "
            "one folder."
        )
    headers = [_read_header(part) for part in parts]
    # A file that was never split lacks these keys. llama-gguf-split sets split.count to 0 when it merges parts.
    numbers = [(values.get("split.no", 0), values.get("split.count") or 1) for values, _ in headers]
    values = headers[0][0]
    tensors = {name: tensor for _, part_tensors in headers for name, tensor in part_tensors.items()}
    # Also count the tensors of each part. If two parts contain a tensor of the same name, `tensors` has fewer entries.
    total = sum(len(part_tensors) for _, part_tensors in headers)
    expected = total
    if len(parts) > 1:
        expected = values.get("split.tensors.count", total)
    if numbers != [(i, len(parts)) for i in range(len(parts))] or not len(tensors) == total == expected:
        raise MarsError(
            f"'{path}' is split, and its parts do not fit each other or their names (split.no and split.count are "
            f"{numbers}, {total} of {expected} tensors): put all parts of one source into one folder, under the names "
            "that llama-gguf-split gave them."
        )
    return GGUFFile(path, values, tensors)


def _read_header(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """Return the metadata of one file, in which strings are bytes, and the file's tensors.

    Raises:
      MarsError: the `gguf` package is not installed, or the file is truncated, corrupt or not GGUF.
    """
    try:
        version = version_of(path)
        with open(path, "rb") as file:
            return _Header(file, path, version).read()
    except ImportError:
        raise MarsError(f"'{path}' needs the package gguf: pip install gguf.") from None
    except OSError as error:
        raise MarsError(f"'{path}' cannot be read ({error}).") from None
    except Exception as error:  # a damaged byte may cause anything from ValueError to RecursionError
        raise MarsError(
            f"'{path}' is truncated, corrupt or no GGUF file ({first_line(error)}): download it again."
        ) from None


class _Header:
    """A sequential reader of a file's header. A damaged count cannot make it read past the end of the file."""

    def __init__(self, file: BinaryIO, path: Path, version: Version):
        self._file, self._size, self._at = file, os.fstat(file.fileno()).st_size, 0
        self._path, self._version = path, version

    def read(self) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
        """Return the metadata, in which strings are bytes, and the tensors."""
        import gguf

        # A file contains a magic number, a version, counts, key-value pairs, tensor entries, padding and the data.
        if self._take(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if (version := self._number("I")) not in (2, 3):
            raise ValueError(f"it has version {version}, and only 2 and 3 are supported")
        num_tensors, num_values = self._number(), self._number()
        # A dict comprehension evaluates the key before the value, which is the order in the file: key, type, value.
        values = {self._text().decode(): self._value(self._number("I")) for _ in range(num_values)}
        entries = [self._entry() for _ in range(num_tensors)]
        alignment = values.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment < 1:
            raise ValueError(f"its general.alignment is {alignment!r} instead of a positive integer")
        # The data begins at the next multiple of the alignment.
        data = -(-self._at // alignment) * alignment
        tensors = {}
        for name, shape, kind, offset in entries:
            kind = gguf.GGMLQuantizationType(kind)
            tensor = tensors[name] = GGUFTensor(shape, kind, data + offset, self._path, self._version)
            # This call raises if a row does not consist of whole blocks. `GGUFFile.stored` relies on this check.
            _size(math.prod(shape[-1:]), tensor.kind)
            self._check(tensor.begin + _size(math.prod(shape), tensor.kind))
        if len(values) != num_values or len(tensors) != num_tensors:
            raise ValueError("it has two values for one key, or two tensors with one name")
        return values, tensors

    def _check(self, end: int) -> None:
        if end > self._size:
            raise ValueError("it ends before the data that its header lists")

    def _take(self, size: int) -> bytes:
        self._check(self._at + size)
        self._at += size
        if self._at > GGUF_HEADER_BYTES:
            raise ValueError(f"its header has more than {GGUF_HEADER_BYTES:,} bytes")
        return self._file.read(size)

    def _number(self, code: str = "Q") -> Any:
        return struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]

    def _text(self) -> bytes:
        return self._take(self._number())

    def _texts(self, count: int) -> list[bytes]:
        """Read several strings, for example the tokens of a vocabulary, faster than repeated calls of `_text` would."""
        read, unpack, texts = self._file.read, struct.Struct("<Q").unpack, []
        limit = min(self._size, GGUF_HEADER_BYTES)
        for _ in range(count):
            [size] = unpack(read(8))
            self._at += 8
            if self._at + size > limit:
                self._take(size)  # raises
            texts.append(read(size))
            self._at += size
        return texts

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind == _LIST:
            inner, count = self._number("I"), self._number()
            if inner == _LIST:
                raise ValueError("it holds a list of lists, which no GGUF reader supports")
            if inner in _NUMBERS:
                code = f"<{count}{_NUMBERS[inner]}"
                return list(struct.unpack(code, self._take(count * struct.calcsize(_NUMBERS[inner]))))
            if inner == _TEXT:
                return self._texts(count)
            return [self._value(inner) for _ in range(count)]
        if kind not in _NUMBERS:
            raise ValueError(f"it holds a value of type {kind}")
        return self._number(_NUMBERS[kind])

    def _entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Read the entry of one tensor: its name, shape, type and offset."""
        name = self._text().decode()
        # GGUF lists the contiguous dimension first.
        shape = tuple(self._number() for _ in range(self._number("I")))
        return name, shape[::-1], self._number("I"), self._number()
