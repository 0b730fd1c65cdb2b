"""Frozen dataclasses that are pytrees, with JAX's own registry.

They are what `struct.dataclass` makes, and mix with it in both directions: a rule of a user's may be either, and may
derive from ours. Importing Flax takes a quarter of the time that the step takes to import, and nothing here needs the
rest of it. Oracle: `flax.struct` (tests/core/test_struct.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform, overload

import jax

T = TypeVar("T")


def field(*, pytree_node: bool = True, **options: Any) -> Any:
    """A field; with `pytree_node=False` a part of the structure, which has to be hashable, and no leaf.

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
    """A frozen dataclass whose fields are children of a pytree, with `replace(**changes)`.

    Args:
      cls: the class to decorate.
      **options: for `dataclasses.dataclass`, such as `kw_only`.

    Returns:
      the class, registered with JAX; without `cls` a decorator.
    """
    if cls is None:
        return lambda cls: dataclass(cls, **options)
    made: Any = dataclasses.dataclass(frozen=True, **options)(cls)
    made.replace = dataclasses.replace
    leaf = {f.name: f.metadata.get("pytree_node", True) for f in dataclasses.fields(made)}
    jax.tree_util.register_dataclass(
        made,
        data_fields=[name for name, is_leaf in leaf.items() if is_leaf],
        meta_fields=[name for name, is_leaf in leaf.items() if not is_leaf],
    )
    return made
