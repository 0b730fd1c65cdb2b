"""Frozen dataclasses that are registered with JAX as pytrees.

They are compatible with `flax.struct.dataclass`: a user's rule may use either decorator, and may derive from a class in
this package. Flax is not imported, because importing it would take a quarter of the time needed to import the decoding
step. Tested against `flax.struct` (tests/core/test_struct.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, dataclass_transform, overload

import jax

from mars_jax.utils.settings import setting as setting
from mars_jax.utils.settings import settings_of as settings_of

T = TypeVar("T")


def field(*, pytree_node: bool = True, **options: Any) -> Any:
    """Declare a dataclass field; with `pytree_node=False` it is static, not a leaf, and must be hashable.

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
@dataclass_transform(field_specifiers=(field, setting, dataclasses.field), frozen_default=True)
def dataclass(cls: type[T] | None = None, **options: Any) -> type[T] | Callable[[type[T]], type[T]]:
    """Create a frozen dataclass that is a pytree, with a method `replace(**changes)`.

    JAX rebuilds instances without calling `__post_init__`, because the leaves may be placeholders.

    Args:
      cls: the class to decorate.
      **options: options of `dataclasses.dataclass`, such as `kw_only`.

    Returns:
      The class, registered with JAX, or a decorator if `cls` is None.
    """
    if cls is None:
        return lambda cls: dataclass(cls, **options)
    frozen: Any = dataclasses.dataclass(frozen=True, **options)(cls)
    frozen.replace = dataclasses.replace
    is_leaf = {f.name: f.metadata.get("pytree_node", True) for f in dataclasses.fields(frozen)}
    data_names = [name for name, leaf in is_leaf.items() if leaf]
    static = [name for name, leaf in is_leaf.items() if not leaf]
    if not hasattr(frozen, "__post_init__"):
        jax.tree_util.register_dataclass(frozen, data_fields=data_names, meta_fields=static)
        return frozen

    def flatten(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, name) for name in data_names], tuple(getattr(value, name) for name in static)

    def flatten_with_keys(value: Any) -> tuple[list[Any], tuple[Any, ...]]:
        leaves, aux = flatten(value)
        return list(zip(map(jax.tree_util.GetAttrKey, data_names), leaves, strict=True)), aux

    # A class from `register_dataclass` would be rebuilt with its constructor, which calls `__post_init__`.
    def unflatten(aux: tuple[Any, ...], leaves: Iterable[Any]) -> Any:
        value = object.__new__(frozen)
        for name, part in zip((*static, *data_names), (*aux, *leaves), strict=True):
            object.__setattr__(value, name, part)
        return value

    jax.tree_util.register_pytree_with_keys(frozen, flatten_with_keys, unflatten, flatten)
    return frozen
