"""Save a model as a directory that transformers loads."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mars_jax.core.errors import MarsError
from mars_jax.core.home import check_path
from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import from_json, to_json, write_json
from mars_jax.hub.durable import check_place, move, staging, sync, sync_tree, writing
from mars_jax.models.config import ModelConfig
from mars_jax.models.quantize import Quantized
from mars_jax.models.weights import Weight, get, weights


def named_arrays(rows: Iterable[Weight], params: PyTree) -> dict[str, np.ndarray]:
    """Return checkpoint name -> array, checked against a table of weights.

    Raises:
      MarsError: params lack a row of the table, or have it in another shape.
    """
    arrays: dict[str, np.ndarray] = {}
    for row in rows:
        try:
            value = get(params, row.path)
            if isinstance(value, Quantized):
                raise MarsError(
                    "quantised weights are not saved in this layout: save those they were made of."
                )
            value = np.asarray(jax.device_get(value))
        except (KeyError, IndexError, TypeError):
            raise MarsError(
                f"params lack {'.'.join(map(str, row.path))}: they belong to another config."
            ) from None
        if value.shape != row.shape:
            raise MarsError(
                f"params {'.'.join(map(str, row.path))} is {list(value.shape)} and the config says "
                f"{list(row.shape)}: they belong to another config."
            )
        arrays[row.name] = np.ascontiguousarray(value)
    return arrays


def free_directory(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Return the path of a directory to write.

    Raises:
      MarsError: it is in use, and `overwrite` does not allow that; or nothing can be written there.
    """
    check_path(path)
    target = Path(path)
    with writing(target):
        used = target.exists() and (not target.is_dir() or (any(target.iterdir()) and not overwrite))
    if used:
        raise MarsError(
            f"'{target}' exists and is not an empty directory: choose another path, or pass overwrite=True."
        )
    check_place(target)
    return target


def save(
    path: str | os.PathLike[str], config: ModelConfig, params: PyTree, *, overwrite: bool = False
) -> Path:
    """Write config.json and model.safetensors to a new directory, all or nothing; see `write_directory`.

    Args:
      path: the directory. Its parents are made.
      config: the model's config.
      params: its params, in the dtype to save.
      overwrite: replace the two files in a directory that already holds something; other files stay.

    Returns:
      The directory.

    Raises:
      MarsError: the directory is not empty, params do not fit config, or the family cannot express config.

    >>> save("distilled", config, params)  # doctest: +SKIP
    PosixPath('distilled')
    """
    target = free_directory(path, overwrite=overwrite)
    arrays = named_arrays(weights(config), params)
    data = to_json(config, dtype=arrays["model.embed_tokens.weight"].dtype.name)
    if from_json(data) != config:
        raise MarsError(
            f"config.json of the family '{config.family}' cannot express this config: choose another family."
        )
    return write_directory(target, arrays, data)


def write_directory(
    target: Path, arrays: dict[str, np.ndarray], data: dict[str, Any], *, file: str = "model.safetensors"
) -> Path:
    """Write the weights into `file`, and config.json; everything is on disk before it appears under its name.

    A new directory appears whole or not at all. In one that holds something, other files stay; whenever the process or
    the machine stops, the two files are the old ones or the new ones. Where two directories cannot change places (not
    on Linux, on a network file system, or in the working directory) there may be no config.json instead: never do old
    weights and a new config pass for a checkpoint.

    Raises:
      MarsError: the disk does not take them.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    with writing(target):
        place = Path(os.path.realpath(target))
        with staging(place) as made:
            write_json(made / "config.json", data)
            if arrays:  # a config may be all there is
                try:
                    save_file(arrays, made / file, metadata={"format": "pt"})
                except SafetensorError as error:  # a full disk, among others
                    raise OSError(str(error)) from error
                # safetensors makes the file private, and a checkpoint need not be.
                (made / file).chmod((made / "config.json").stat().st_mode)
            sync_tree(made)
            if not _swap(made, place):
                _replace(made, place, file)
    return target


def _swap(made: Path, target: Path) -> bool:
    """Let two directories change places, which replaces both files in one step; False where that cannot be.

    The other files of the target are in both by then, as hard links.
    """
    if target in (Path.cwd(), *Path.cwd().parents):
        return False  # this process would be left in the directory that goes
    new = set(os.listdir(made))
    if target.exists():
        # It fails on a file system without hard links, say; what is linked goes with the directory.
        try:
            for name in set(os.listdir(target)) - new:
                _link(target / name, made / name)
            _like(made, target)
            for folder, _, _ in os.walk(made):
                sync(Path(folder))
        except (OSError, shutil.Error):
            return False
    if not move(made, target):
        return False
    # Another process may have written there in the meantime.
    for name in set(os.listdir(made)) - set(os.listdir(target)) if made.exists() else ():
        os.replace(made / name, target / name)
    return True


def _link(source: Path, target: Path) -> None:
    """Link a file or a directory under a second name."""
    link = functools.partial(os.link, follow_symlinks=False)
    if source.is_dir() and not source.is_symlink():
        shutil.copytree(source, target, symlinks=True, copy_function=link)
    else:
        link(source, target)


def _like(directory: Path, other: Path) -> None:
    """Give a directory the mode and the owner of another."""
    found = other.stat()
    with contextlib.suppress(PermissionError):  # only root gives files away
        os.chown(directory, found.st_uid, found.st_gid)
    directory.chmod(stat.S_IMODE(found.st_mode))


def _replace(made: Path, target: Path, file: str) -> None:
    """Put the weights and config.json of one directory in the place of another's; see `write_directory`."""
    new, old = made / "config.json", target / "config.json"
    if not old.exists() or old.read_bytes() != new.read_bytes():
        old.unlink(missing_ok=True)
        sync(target)
    os.replace(made / file, target / file)
    sync(target)
    os.replace(new, old)
    sync(target)
