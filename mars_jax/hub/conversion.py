"""A Hugging Face checkpoint into one whose weights are an Orbax checkpoint, all or nothing.

Everything is written to a hidden directory beside the destination, read back, and renamed: whenever a conversion is
killed, the destination is either what it was before, or complete; or, where two directories cannot change places, not
there until the next conversion finds it.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import specs
from mars_jax.core.errors import MarsError
from mars_jax.core.home import expanded
from mars_jax.hub.config_json import read_json, to_json, write_json
from mars_jax.hub.converted import MANIFEST, WEIGHTS, is_converted, write_digests
from mars_jax.hub.durable import beside, check_place, move, staging, sync_tree, writing
from mars_jax.hub.files import resolve
from mars_jax.hub.gguf_file import is_gguf
from mars_jax.hub.load import find_tensors, read_leaf, read_path, resolve_dtype
from mars_jax.hub.tokenizer import read_tokenizer
from mars_jax.models.quantize import FORMS, bits_of
from mars_jax.models.weights import Weight, build_rows, leaves

Progress = Callable[[str, int, int], None]
"""Function told ("writing" or "verifying", bytes done since the last call, bytes in all)."""


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    overwrite: bool = False,
    progress: Progress = lambda stage, done, total: None,
) -> Path:
    """Write a checkpoint that `load` restores onto any mesh, each process reading the parts of its own devices.

    Config, generation config and tokenizer come along. One array of params is in memory at a time. What was written is
    read back and compared before it appears under its name.

    Args:
      source: directory, GGUF file, or `owner/name` on the Hugging Face hub.
      destination: directory, new or empty.
      dtype: as for `load`.
      overwrite: replace a destination that is itself a conversion.
      progress: see `Progress`.

    Returns:
      The destination.

    Raises:
      MarsError: a source that `load` does not take either, a destination in use, or a disk that does not give back
        what was written to it.

    >>> convert("Qwen/Qwen3-235B-A22B", "qwen3-235b", dtype="int8")  # doctest: +SKIP
    PosixPath('qwen3-235b')
    """
    from mars_jax.hub import orbax

    specs.check_dtype(dtype, known=specs.STORED_DTYPES)
    target = Path(os.path.abspath(expanded(destination)))
    with writing(target):
        _check_free(target, overwrite)
    check_place(target)
    directory = resolve(source)
    if is_converted(directory):
        raise MarsError(f"'{directory}' is a conversion already: convert the checkpoint that it was made of.")
    config, own = read_path(directory)
    floating, bits = resolve_dtype(dtype, own)
    found, table = find_tensors(directory, config), leaves(config)

    # An array in 8 bits is two, which are read together and written one after the other.
    @functools.lru_cache(maxsize=1)
    def read(leaf: Weight) -> list[np.ndarray]:
        arrays = read_leaf(directory, found, leaf, table[leaf], floating, bits=bits)
        return [next(iter(array.parts.values())) for array in arrays]

    def pending(leaf: Weight) -> Any:
        def array(index: int, shape: tuple[int, ...], kind: Any) -> Any:
            return orbax.Pending(shape, jnp.dtype(kind), lambda: read(leaf)[index])

        if (kept := bits_of(leaf, bits)) is None:
            return array(0, leaf.shape, floating)
        form = FORMS[kept]
        arrays = [array(i, one.shape, one.dtype) for i, one in enumerate(form.leaves(leaf.shape, None))]
        return form(*arrays, dtype=jnp.dtype(floating))

    tree = build_rows(table, pending)
    total = sum(x.nbytes for x in jax.tree.leaves(tree))
    with writing(target), staging(target) as place:
        written = orbax.save(place / WEIGHTS, tree, done=lambda n: progress("writing", n, total))
        read.cache_clear()
        again = orbax.digests(place / WEIGHTS, tree, done=lambda n: progress("verifying", n, total))
        wrong = sorted(name for name in written if name not in again or written[name] != again[name].whole)
        if wrong:
            raise MarsError(
                f"{len(wrong)} of {len(written)} arrays in '{place}' read back otherwise than they were written "
                f"({wrong[0]}): check the disk, and convert again."
            )
        if is_gguf(directory):
            write_json(place / "config.json", to_json(config, dtype=floating))
            read_tokenizer(directory).save_pretrained(place)
        else:
            _copy_files(directory, place, floating)
        manifest = {"source": os.fspath(source), "dtype": floating, "int8": bits == 8, "bytes": total}
        write_json(place / MANIFEST, manifest | write_digests(again))
        _check_free(target, overwrite)
        sync_tree(place)
        _move(place, target)
    return target


def _check_free(target: Path, overwrite: bool) -> None:
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not overwrite:
        raise MarsError(
            f"'{target}' exists and is not empty: choose another path, or add --overwrite if it is a conversion."
        )
    if not is_converted(target):
        raise MarsError(f"'{target}' exists and is not a conversion: choose another path.")


def _move(place: Path, target: Path) -> None:
    if not move(place, target):
        replaced = beside(target, "replaced")
        os.rename(target, replaced)
        move(place, target)
        shutil.rmtree(replaced, ignore_errors=True)


def _copy_files(source: Path, place: Path, dtype: str) -> None:
    """Copy all but the weights: config with the dtype it now has, generation config, tokenizer, chat template."""
    for file in sorted(source.iterdir()):
        wanted = file.suffix in (".json", ".model", ".jinja", ".txt") and file.name != "config.json"
        if wanted and file.is_file() and not file.name.endswith(".index.json"):
            shutil.copyfile(file, place / file.name)
    data = read_json(source / "config.json")
    write_json(
        place / "config.json", {k: v for k, v in data.items() if k != "dtype"} | {"torch_dtype": dtype}
    )
