"""Frozen dataclasses that are pytrees, registered with JAX directly.

They are compatible with `flax.struct.dataclass` in both directions: a user's rule may be either, and may derive from
ours. This avoids the import of Flax, which takes a quarter of the time that importing the step takes. Oracle:
`flax.struct` (tests/core/test_struct.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

import jax

T = TypeVar("T")


def field(*, pytree_node: bool = True, **options: Any) -> Any:
    """Declare a field; with `pytree_node=False` it is static: part of the structure, hashable, and not a leaf.

    Example:
      >>> @dataclass
      ... class Rule:
      ...     theta: jax.Array
      ...     margin: str = field(pytree_node=False, default="ratio")
      >>> jax.tree.leaves(Rule(theta=0.9))
      [0.9]
    """
    return dataclasses.field(metadata={"pytree_node": pytree_node}, **options)


@overload
def dataclass(cls: type[T], **options: Any) -> type[T]: ...
@overload
def dataclass(cls: None = None, **options: Any) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(field_specifiers=(field, dataclasses.field), frozen_default=True)
def dataclass(cls: type[T] | None = None, **options: Any) -> type[T] | Callable[[type[T]], type[T]]:
    """Create a frozen dataclass whose fields are children of a pytree, with a method `replace(**changes)`.

    Args:
      cls: the class to decorate.
      **options: for `dataclasses.dataclass`, such as `kw_only`.

    Returns:
      The class, registered with JAX; without `cls`, a decorator.
    """
    if cls is None:
        return lambda cls: dataclass(cls, **options)
    frozen: Any = dataclasses.dataclass(frozen=True, **options)(cls)
    frozen.replace = dataclasses.replace
    leaf = {f.name: f.metadata.get("pytree_node", True) for f in dataclasses.fields(frozen)}
    jax.tree_util.register_dataclass(
        frozen,
        data_fields=[name for name, is_leaf in leaf.items() if is_leaf],
        meta_fields=[name for name, is_leaf in leaf.items() if not is_leaf],
    )
    return frozen
