"""Rules as values: their structure, and their numbers row by row. B batch. Oracle: tests/verify/test_rules.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.errors import MarsError
from mars_jax.core.types import LoadedRule, PyTree


def structure(rule: Any) -> Any:
    """What of a rule decides the compilation: its pytree structure, hashable.

    Raises:
      MarsError: not a rule, or one that is no pytree of numbers.

    >>> from mars_jax import verify
    >>> structure(verify.mars(theta=0.5)) == structure(verify.mars(theta=0.9))
    True
    """
    if isinstance(rule, LoadedRule):
        raise MarsError("verify is a LoadedRule here: give its .rule, and its .params as Params.verify.")
    leaves, treedef = jax.tree.flatten(rule)
    if not callable(rule) or any(leaf is rule or callable(leaf) for leaf in leaves):
        raise MarsError(
            f"verify is {rule!r}: expected a rule, such as mars_jax.verify.mars(); a rule of your own is a "
            "struct.dataclass whose fields are numbers."
        )
    return treedef


def for_rows(rule: PyTree, batch: int) -> PyTree:
    """The rule with every number as an array [batch, ...]; floats become f32 and whole numbers i32.

    Args:
      rule: numbers are scalars, the same for all rows, or arrays that begin with `batch`.
      batch: B.

    Raises:
      MarsError: a number of another shape.

    >>> from mars_jax import verify
    >>> for_rows(verify.mars(theta=0.5), 3).theta.tolist()
    [0.5, 0.5, 0.5]
    """

    def own(path: Any, leaf: Any) -> Array:
        value = _typed(leaf)
        if value.ndim == 0:
            spread = jnp.broadcast_to if isinstance(value, Array) else np.broadcast_to
            value = spread(value, (batch,))
        if value.shape[0] != batch:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"{name} of the rule has shape {value.shape}: expected one number, or one for each of the {batch} rows."
            )
        # Numbers of the host are spread there, for which nothing is compiled.
        return value if isinstance(value, Array) else jax.device_put(value, may_alias=False)

    return jax.tree_util.tree_map_with_path(own, rule)


def _typed(leaf: Any) -> Array | np.ndarray:
    value = leaf if isinstance(leaf, Array) else np.asarray(leaf)
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    return value.astype(jnp.int32) if jnp.issubdtype(value.dtype, jnp.integer) else value


def take_rows(rule: PyTree, rows: Any, count: int) -> PyTree:
    """The rule for some of `count` prompts: numbers that are given per prompt are indexed by `rows`.

    Raises:
      MarsError: a number that is neither one value nor one for each of `count`.

    >>> from mars_jax import verify
    >>> take_rows(verify.mars(theta=[0.5, 0.9]), [1], 2).theta.tolist()
    [0.8999999761581421]
    """

    def pick(path: Any, leaf: Any) -> Any:
        value = np.asarray(leaf)
        if value.ndim == 0:
            return leaf
        if value.shape[0] != count:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"{name} of the rule has {value.shape[0]} values for {count} prompts: give one, or one per prompt."
            )
        return value[np.asarray(rows)]

    return jax.tree_util.tree_map_with_path(pick, rule)


def lossless(rule: Any) -> bool:
    """Whether the output has the target's own law; a rule that does not say so is taken to be lossy."""
    return bool(getattr(rule, "lossless", False))


def name_of(rule: Any) -> str:
    """For reports: the rule's `name`, or its class."""
    return str(getattr(rule, "name", type(rule).__name__))
