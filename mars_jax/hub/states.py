"""Saving of a running `DecodeState` between two steps, and restoring in a different process or on a different mesh.

Oracle: the same rows decoded without interruption (tests/core/test_steps_by_the_piece.py).
"""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from mars_jax.core.types import KEY_IMPL, DecodeState, PyTree
from mars_jax.hub.durable import writing
from mars_jax.utils.errors import MarsError, first_line
from mars_jax.utils.paths import check_path


def save_state(path: str | os.PathLike[str], state: DecodeState) -> None:
    """Write a running state (tokens, caches, keys and rule state) atomically as an Orbax checkpoint.

    In a run of several processes, all of them must call it. The checkpoint contains neither weights nor structure: to
    restore it, a program needs a state with the same rule, drafter and shapes.

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
            # Orbax writes into a temporary directory next to `place`, and leaves it there if it fails.
            for partial in place.parent.glob(f"{glob.escape(place.name)}.orbax-checkpoint-tmp*"):
                shutil.rmtree(partial, ignore_errors=True)
            raise


def restore_state(path: str | os.PathLike[str], like: DecodeState) -> DecodeState:
    """Restore a saved state onto the devices of `like`.

    Args:
      path: the directory that `save_state` wrote.
      like: a state of the same decoder and shapes, whose values do not matter. The result of `jax.eval_shape` of
        `Decoder.init` is enough; the shardings of its `jax.ShapeDtypeStruct`s place the arrays.

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
            _check_shapes(path, _shapes(checkpointer.metadata(place).item_metadata), _shapes(expected))
            restored = checkpointer.restore(place, expected)
    except MarsError:
        raise
    except Exception as error:  # Orbax and TensorStore raise ValueError, KeyError and OSError, among others
        raise MarsError(
            f"'{path}' cannot be read ({first_line(error)}): expected a folder of save_state."
        ) from error
    arrays = [restored[name] for name in leaves]
    for i, leaf in enumerate(leaves.values()):
        if _is_key(leaf):
            arrays[i] = jax.random.wrap_key_data(arrays[i], impl=KEY_IMPL)
    return jax.tree.unflatten(structure, arrays)


def _shapes(arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(array.shape) for name, array in arrays.items()}


def _check_shapes(
    path: str | os.PathLike[str], stored: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]
) -> None:
    """Raise MarsError if the names or shapes of a checkpoint differ from those of a state."""
    for name in expected | stored:
        if stored.get(name) != expected.get(name):
            raise MarsError(
                f"'{path}' holds the state of another decoder or of other shapes ({name} is {stored.get(name)} there "
                f"and {expected.get(name)} here): restore it with the rule, drafter, rows and buffer it was saved with."
            )


def _named(state: PyTree) -> dict[str, jax.Array]:
    """Return the leaves by path, with random keys replaced by their raw words."""
    return {
        _name(path): jax.random.key_data(x) if _is_key(x) else x
        for path, x in jax.tree_util.tree_leaves_with_path(state)
    }


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="-")


def _is_key(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
