"""Functions that save a model as a directory that transformers can load, and a running `DecodeState` between two steps.

Saved states are tested against the same rows decoded without interruption (tests/core/test_steps_by_the_piece.py).
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from mars_jax.core.types import KEY_IMPL, DecodeState, PyTree
from mars_jax.hub.config_json import from_json, to_json, write_json
from mars_jax.hub.durable import check_place, refuse_url, staging, sync, sync_directory, writing
from mars_jax.hub.stacked_experts import fuse_experts
from mars_jax.models.config import ModelConfig
from mars_jax.models.quantize import Quantized
from mars_jax.models.weights import Weight, get, stored_tensors, weights
from mars_jax.utils.errors import MarsError, first_line
from mars_jax.utils.paths import check_path


def named_arrays(rows: Iterable[Weight], params: PyTree) -> dict[str, np.ndarray]:
    """Return params as a dict from checkpoint name to array, checked against a table of weights.

    Raises:
      MarsError: params lack a weight that is in the table, or an array has a different shape or is quantised.
    """
    arrays: dict[str, np.ndarray] = {}
    for row in rows:
        name = ".".join(map(str, row.path))
        try:
            value = get(params, row.path)
            if isinstance(value, Quantized):
                raise MarsError("quantised weights cannot be saved in this layout: save the original ones.")
            value = np.asarray(jax.device_get(value))
        except (KeyError, IndexError, TypeError):
            raise MarsError(f"params lack {name}: they belong to another config.") from None
        if value.shape != row.shape:
            raise MarsError(
                f"params {name} has shape {list(value.shape)}, but the config needs {list(row.shape)}: use the config "
                "of these params."
            )
        arrays[row.name] = np.ascontiguousarray(value)
    return arrays


def free_directory(path: str | os.PathLike[str], *, overwrite: bool) -> Path:
    """Check that a directory can be written to, and return its path.

    Raises:
      MarsError: the directory is not empty and `overwrite` is False, or it is not writable.
    """
    check_path(path)
    refuse_url(path)
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
    """Write config.json and model.safetensors to a new directory atomically; see `write_directory`.

    Args:
      path: the directory. Missing parents are created.
      config: the model's config.
      params: the model's params, in the dtype to save.
      overwrite: whether to replace these two files in a directory that is not empty; other files are kept.

    Returns:
      The directory.

    Raises:
      MarsError: the directory is not empty, params do not fit config, or the family cannot express config.

    >>> save("distilled", config, params)  # doctest: +SKIP
    PosixPath('distilled')
    """
    target = free_directory(path, overwrite=overwrite)
    named_weights = named_arrays(weights(config), params)
    arrays = {
        tensor.name: np.concatenate([named_weights[part.name] for part in parts])
        for tensor, parts in stored_tensors(config).items()
    }
    data = to_json(config, dtype=arrays["model.embed_tokens.weight"].dtype.name)
    # A family may lack a key for some field, so read the config back and compare.
    if from_json(data) != config:
        raise MarsError(f"the family '{config.family}' cannot express this config: choose another family.")
    return write_directory(target, fuse_experts(arrays), data)


def write_directory(
    target: Path, arrays: dict[str, np.ndarray], data: dict[str, Any], *, file: str = "model.safetensors"
) -> Path:
    """Write config.json, and the weights into `file`. Both are on disk before they get their final names.

    A new directory appears complete or not at all. In an existing directory, other files are kept. If config.json
    changes, it is absent while the weights are replaced, so that old weights never load with a new config.

    Raises:
      MarsError: the files cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    # If the target is a symbolic link, replace the directory that it points to, not the link.
    place = Path(os.path.realpath(target))
    with writing(target), staging(place) as staged:
        new_directory = staged / "new"
        new_directory.mkdir()
        write_json(new_directory / "config.json", data)
        if arrays:  # some callers write only a config
            try:
                save_file(arrays, new_directory / file, metadata={"format": "pt"})
            except SafetensorError as error:  # for example, because the disk is full
                raise OSError(str(error)) from error
            # safetensors creates the file with private permissions; give it the permissions of config.json.
            (new_directory / file).chmod((new_directory / "config.json").stat().st_mode)
        sync_directory(new_directory)
        if not place.exists():
            os.replace(new_directory, place)
            sync(place.parent)
        else:
            config = place / "config.json"
            if config.exists() and config.read_bytes() != (new_directory / "config.json").read_bytes():
                config.unlink()
                sync(place)
            # Move config.json last.
            for path in sorted(new_directory.iterdir(), key=lambda path: path.name == "config.json"):
                os.replace(path, place / path.name)
                sync(place)
    return target


def save_state(path: str | os.PathLike[str], state: DecodeState) -> None:
    """Write a running state (tokens, caches, keys and rule state) atomically as an Orbax checkpoint.

    In a run of several processes, all of them must call this function. The checkpoint contains neither weights nor
    structure: to restore it, a program needs a state with the same rule, drafter and shapes.

    Args:
      path: a directory that does not exist yet.
      state: the state between two steps.

    Raises:
      MarsError: `path` exists or cannot be written.
    """
    import orbax.checkpoint as ocp

    check_path(path)
    if Path(path).exists():
        raise MarsError(f"'{path}' exists: choose the name of a new folder.")
    place = Path(path).absolute()
    with writing(path):
        try:
            with ocp.StandardCheckpointer() as checkpointer:
                checkpointer.save(place, _named(state))
        except BaseException:
            # Orbax writes into a temporary directory next to `place`, and does not delete it if the save fails.
            for partial in place.parent.glob(f"{glob.escape(place.name)}.orbax-checkpoint-tmp*"):
                shutil.rmtree(partial, ignore_errors=True)
            raise


def restore_state(path: str | os.PathLike[str], like: DecodeState) -> DecodeState:
    """Restore a saved state onto the devices of `like`.

    Args:
      path: the directory that `save_state` wrote.
      like: a state of the same decoder and shapes, whose values do not matter. The result of `jax.eval_shape` for
        `Decoder.init` is enough; its `jax.ShapeDtypeStruct`s set the shardings of the arrays.

    Raises:
      MarsError: the checkpoint cannot be read, or has a different structure or different shapes.
    """
    import orbax.checkpoint as ocp

    check_path(path)
    # The current default device, which `jax.default_device` may have changed.
    default = SingleDeviceSharding(jnp.zeros(()).devices().pop())
    paths, structure = jax.tree.flatten_with_path(like)
    leaves = {_name(path): leaf for path, leaf in paths}
    shapes = jax.eval_shape(_named, like)  # sorted by name, unlike `leaves`
    expected: dict[str, jax.ShapeDtypeStruct] = {}
    for name, leaf in leaves.items():
        sharding = getattr(leaf, "sharding", None) or default
        expected[name] = jax.ShapeDtypeStruct(shapes[name].shape, shapes[name].dtype, sharding=sharding)
    place = Path(path).absolute()
    try:
        with ocp.StandardCheckpointer() as checkpointer:
            _check_shapes(path, checkpointer.metadata(place).item_metadata, expected)
            restored = checkpointer.restore(place, expected)
    except MarsError:
        raise
    except Exception as error:  # Orbax and TensorStore raise ValueError, KeyError and OSError, among others
        raise MarsError(
            f"'{path}' cannot be read ({first_line(error)}): expected a folder that save_state wrote."
        ) from error
    arrays = [restored[name] for name in leaves]
    for i, leaf in enumerate(leaves.values()):
        if _is_key(leaf):
            arrays[i] = jax.random.wrap_key_data(arrays[i], impl=KEY_IMPL)
    return jax.tree.unflatten(structure, arrays)


def _check_shapes(
    path: str | os.PathLike[str], stored: Mapping[str, Any], expected: Mapping[str, jax.ShapeDtypeStruct]
) -> None:
    """Raise MarsError if the names or shapes of a checkpoint differ from those of a state."""
    for name in {**expected, **stored}:
        shapes = [tuple(arrays[name].shape) if name in arrays else None for arrays in (stored, expected)]
        if shapes[0] != shapes[1]:
            raise MarsError(
                f"'{path}' holds the state of a different decoder or with other shapes ({name} is {shapes[0]} there "
                f"and {shapes[1]} here): restore it with the rule, drafter, rows and buffer it was saved with."
            )


def _named(state: PyTree) -> dict[str, jax.Array]:
    """Return the leaves, keyed by path, with random keys replaced by their key data."""
    return {
        _name(path): jax.random.key_data(x) if _is_key(x) else x
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="-")


def _is_key(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
