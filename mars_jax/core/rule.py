"""The interface of rules, and rules as pytrees: their static structure and their per-row parameters.

B batch, N nodes. Oracle: tests/verify/test_rules.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core.drafter import Drafter
from mars_jax.core.errors import MarsError, short_repr
from mars_jax.core.evidence import Evidence
from mars_jax.core.struct import settings_of
from mars_jax.core.types import PyTree, Verdict
from mars_jax.core.user_code import (
    MODULES,
    definition,
    described,
    failure,
    frames_in,
    is_user_module,
)

ALL_EDGES = np.iinfo(np.int32).max
_VALUES = (bool, int, float, str, list, tuple, np.ndarray, np.generic, Array)


class Rule:
    """A verification rule: a frozen pytree (`struct.dataclass`) that maps `Evidence` to a `Verdict` and its new self.

    Its structure (which rule, which margin, which base) is static and determines the compiled program. Its parameters
    are leaves, one value or one per row; in a step they are [B]. A rule that returns a changed copy of itself keeps
    state per row. The attributes below are defaults; subclasses override them by class attributes or properties.

    >>> import dataclasses
    >>> from mars_jax import verify
    >>> from mars_jax.core import struct
    >>> @struct.dataclass
    ... class OneToken(Rule):
    ...     "Accept at most one drafted token per step, even if the target agrees with more."
    ...     def __call__(self, evidence):
    ...         verdict, _ = verify.exact()(evidence)
    ...         accepted = jnp.minimum(verdict.num_accepted, 1)
    ...         token = jnp.where(verdict.num_accepted > 1, evidence.tree.tokens[:, 2], verdict.next_token)
    ...         path = jnp.minimum(verdict.path, accepted[:, None])
    ...         return dataclasses.replace(verdict, num_accepted=accepted, path=path, next_token=token), self
    >>> OneToken().name, OneToken().lossless
    ('onetoken', False)
    """

    lossless: ClassVar[bool] = False  # whether the output follows the target's distribution
    needs: ClassVar[tuple[str, ...]] = ()  # required inputs, keys of `verify.NEEDS`
    base: Any = None  # the strict rule that this rule relaxes, if any
    exact_prefix: Any = 0  # generated tokens at the start that are strict

    def __post_init__(self) -> None:
        """Check the settings and convert numbers to strongly typed leaves, [] or [B].

        Raises:
          MarsError: a value is out of range.
        """
        settings = settings_of(type(self))
        chosen = {name: getattr(self, name) for name, s in settings.items() if s.choices}
        # Choices first, because they determine the ranges of numbers.
        for name, setting in sorted(settings.items(), key=lambda item: not item[1].choices):
            value = getattr(self, name)
            # A base is checked by its owner. Other libraries may rebuild a pytree with placeholders as leaves.
            if isinstance(value, Rule) or not (
                setting.choices or value is None or isinstance(value, _VALUES)
            ):
                continue
            setting.check(value, **chosen)
            if setting.per_row:
                dtype = np.int32 if setting.kind is int else np.float32
                typed = value.astype(dtype) if isinstance(value, Array) else np.asarray(value, dtype)
                object.__setattr__(self, name, typed)

    @property
    def name(self) -> str:
        """Name in reports."""
        return type(self).__name__.lower()

    def check_drafter(self, drafter: Drafter) -> None:
        """Raise MarsError if the rule cannot verify this drafter's drafts."""

    def strict_edges(self, evidence: Evidence) -> Array:
        """Return i32[B]: edges to nodes of at most this depth are strict; all edges in strict rows."""
        return jnp.where(evidence.controls.strict, np.int32(ALL_EDGES), np.int32(0))

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        """Return the verdict on a draft, and the rule with its updated state."""
        raise MarsError(f"the rule {self.name} decides nothing: give it a method __call__.")


class LoadedRule(NamedTuple):
    """A rule and its weights, which go into `Params.verify`."""

    rule: Rule  # without its weights
    params: PyTree = ()  # its weights, which it reads as `Evidence.params`


class Structure(NamedTuple):
    """The structure of a pytree with the classes of its nodes.

    jaxlib compares two dataclasses by their fields only: rules of different classes could share a compiled program.
    """

    treedef: Any
    kinds: tuple[Any, ...]  # (class of the node or None, kinds of each child)

    @classmethod
    def of(cls, tree: PyTree) -> Structure:
        def kinds(treedef: Any) -> tuple[Any, ...]:
            data = treedef.node_data()
            return (data and data[0], *map(kinds, treedef.children()))

        treedef = jax.tree.structure(tree)
        return cls(treedef, kinds(treedef))


def structure(rule: Any) -> Structure:
    """Return the static part of a rule, which determines the compiled program: its pytree structure, hashable.

    Raises:
      MarsError: `rule` is not a rule, or not a pytree of numbers.

    >>> from mars_jax import verify
    >>> structure(verify.mars(theta=0.5)) == structure(verify.mars(theta=0.9))
    True
    """
    if isinstance(rule, LoadedRule):
        raise MarsError("verify is a LoadedRule here: give its .rule, and its .params as Params.verify.")
    leaves = jax.tree.leaves(rule)
    if not isinstance(rule, Rule) or not all(
        hasattr(x, "dtype") or isinstance(x, bool | int | float) for x in leaves
    ):
        raise MarsError(
            f"verify is {short_repr(rule)}: expected a rule, such as mars_jax.verify.mars(); a rule of your own is a "
            "struct.dataclass that derives from verify.Rule and whose fields are numbers."
        )
    return Structure.of(rule)


EXPECTED = {
    "__call__": "(Verdict, rule)",
    "name": "a string",
    "needs": "a tuple of strings",
    "check_drafter": "None",
    "strict_edges": "i32[B]",
    "guarded": "bool[B, N]",
    "low": "bool[B, N]",
    "relaxable": "bool[B, N]",
    "target": "f32[B, N, V]",
    "cost": "(f32[B, N], f32[B]) or None",
    "spend": "the rule with its new budget",
}
"""Expected results of the methods and properties of a rule."""


@contextlib.contextmanager
def user_errors(rule: Any) -> Iterator[None]:
    """Chain a MarsError to any exception that a user's rule raises in the block.

    Exceptions of this package's rules pass unchanged.
    """
    try:
        yield
    except MarsError:
        raise
    except (Exception, SystemExit) as error:
        kind = type(rule)
        if not is_user_module(kind.__module__):
            raise
        frames = frames_in({kind.__module__, *MODULES}, error)
        method = next((code.co_name for code, _ in frames if code.co_name in EXPECTED), "__call__")
        raise MarsError(
            f"the rule {kind.__name__} fails in {failure(error, frames, kind)}; expected "
            f"{method} to return {EXPECTED[method]}."
        ) from error


def decide(rule: Any, evidence: Evidence) -> tuple[Verdict, Any]:
    """Return `rule(evidence)`, checked.

    Raises:
      MarsError: the rule did not return a verdict and itself, or raised an exception; see `user_errors`.
    """
    with user_errors(rule):
        result = rule(evidence)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], Verdict)):
        raise wrong_result(rule, "__call__", described(result))
    verdict, next_rule = result
    batch, depth = evidence.tree.tokens.shape[0], evidence.tree.max_depth
    shapes = {
        "path": ("int32", (batch, depth + 1)),
        "num_accepted": ("int32", (batch,)),
        "next_token": ("int32", (batch,)),
        "relaxed": ("bool", (batch, depth)),
    }
    for name, (dtype, shape) in shapes.items():
        check_array(rule, "__call__", getattr(verdict, name), dtype, shape, of=f"a verdict whose {name} is ")
    check_same_rule(rule, "__call__", next_rule)
    return verdict, next_rule


def check_array(
    rule: Any, method: str, value: Any, dtype: str, shape: tuple[int, ...], *, of: str = ""
) -> None:
    """Raise MarsError unless a method of a rule returned an array of this shape and dtype.

    Args:
      rule, method: the rule and the method that returned the value.
      value: the result, or a part of it.
      dtype: "floating" for any floating dtype.
      shape: of the array.
      of: the place of the array in the result, for the message.
    """
    value_dtype = getattr(value, "dtype", None)
    fits = value_dtype is not None and (
        jnp.issubdtype(value_dtype, jnp.floating) if dtype == "floating" else value_dtype == np.dtype(dtype)
    )
    if not fits or value.shape != shape:
        dtype = "float32" if dtype == "floating" else dtype
        raise wrong_result(rule, method, f"{of}{described(value)}", f"{of}{dtype}{list(shape)}")


def check_same_rule(rule: Any, method: str, after: Any) -> None:
    """Raise MarsError unless a method returned the rule with parameters of the same shapes and dtypes."""
    if Structure.of(after) != Structure.of(rule):
        raise wrong_result(
            rule, method, described(after), f"an object of type {type(rule).__name__} with the same structure"
        )
    for (path, leaf), new_leaf in zip(
        jax.tree_util.tree_leaves_with_path(rule), jax.tree.leaves(after), strict=True
    ):
        if jnp.shape(new_leaf) != jnp.shape(leaf) or jnp.result_type(new_leaf) != jnp.result_type(leaf):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            rule_with = f"a rule whose {name} is "
            raise wrong_result(
                rule, method, f"{rule_with}{described(new_leaf)}", f"{rule_with}{described(leaf)}"
            )


def wrong_result(rule: Any, method: str, returned: str, expected: str | None = None) -> MarsError:
    """Return the error that a method of a rule returned a value of the wrong kind."""
    function = getattr(type(rule), method)
    return MarsError(
        f"the rule {type(rule).__name__} fails in {definition(function)}: {method} returned {returned}; expected "
        f"{expected or EXPECTED[method]}."
    )


def for_rows(rule: PyTree, batch: int) -> PyTree:
    """Broadcast every parameter of a rule to an array [batch, ...]; floats become f32 and whole numbers i32.

    Args:
      rule: parameters are scalars, the same for all rows, or arrays [batch, ...].
      batch: B.

    Raises:
      MarsError: a parameter has another shape.

    >>> from mars_jax import verify
    >>> for_rows(verify.mars(theta=0.5), 3).theta.tolist()
    [0.5, 0.5, 0.5]
    """

    def broadcast(path: Any, leaf: Any) -> Array:
        value = _typed(leaf)
        if value.ndim == 0:
            broadcast_to = jnp.broadcast_to if isinstance(value, Array) else np.broadcast_to
            value = broadcast_to(value, (batch,))
        if value.shape[0] != batch:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise MarsError(
                f"{name} of the rule has shape {value.shape}: expected one number, or one for each of the {batch} rows."
            )
        # Host values are broadcast in NumPy, which compiles nothing.
        return value if isinstance(value, Array) else jax.device_put(value, may_alias=False)

    return jax.tree_util.tree_map_with_path(broadcast, rule)


def _typed(leaf: Any) -> Array | np.ndarray:
    value = leaf if isinstance(leaf, Array) else np.asarray(leaf)
    if jnp.issubdtype(value.dtype, jnp.floating):
        return value.astype(jnp.float32)
    return value.astype(jnp.int32) if jnp.issubdtype(value.dtype, jnp.integer) else value


def take_rows(rule: PyTree, rows: Any, count: int) -> PyTree:
    """Select `rows` of a rule for `count` prompts: index the parameters that have one value per prompt.

    Raises:
      MarsError: a parameter has neither one value nor `count` values.

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
