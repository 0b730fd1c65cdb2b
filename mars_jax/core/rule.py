"""The interface of verification rules, their input `Evidence`, and functions that handle rules as pytrees.

Dimensions: B batch, N nodes, V vocabulary, E hidden size. Tests: tests/verify/test_rules.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from kernels_pallas import MarginStats, margin_stats, sharded_margin_stats
from mars_jax.core import struct
from mars_jax.core.axes import vocabulary_axes
from mars_jax.core.controls import make_controls
from mars_jax.core.drafter import Drafter
from mars_jax.core.sampling import at_drafted
from mars_jax.core.struct import settings_of
from mars_jax.core.types import Controls, DraftTree, PyTree, Verdict, keys_from_seeds
from mars_jax.utils.errors import MarsError, short_repr
from mars_jax.utils.user_code import MODULES, described, failure, frames_in, is_user_module, location_of


@struct.dataclass(kw_only=True)
class Evidence:
    """The input of a rule in one step: one struct, so that new fields do not change the signature of any rule.

    Row i of the logits is p(. | tokens up to node i), so a node's token is judged by the logits of its parent. In the
    example, the target's most probable token after the root is 1, which is also the token of node 1. Its most probable
    token after node 1 is 3, but the token of node 2 is 2.

    >>> from mars_jax.core.tree import at_parent, chain
    >>> tree = chain(jnp.asarray([[0, 1, 2]], jnp.int32))
    >>> inputs = evidence(tree, jnp.asarray([[[0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 1.0, 8.0], [0.0] * 4]]))
    >>> (tree.tokens == at_parent(tree, inputs.stats.id1)).tolist()  # the root is not judged
    [[False, True, False]]
    """

    keys: Array  # key[B]; the same in every step: fold in the position, as `sampling.node_uniforms` does
    start: Array  # i32[B]; position of the root
    prompt_length: Array  # i32[B]; number of tokens in the prompt
    tree: DraftTree  # the draft, [B, N]
    # f32[B, N, V]; target logits before temperature, after the row's edits and constraint
    logits: Array
    hidden: Array  # [B, N, E]; hidden states of the target after its final norm
    controls: Controls  # per-request settings, [B] each
    params: PyTree = ()  # Params.verify
    # bool[B, N] or None; True if a span requires strict verification of the node's children; see `guide`
    strict_nodes: Array | None = None

    @property
    def positions(self) -> Array:
        """i32[B, N], the position of every node in the token sequence."""
        return self.start[:, None] + self.tree.depths

    @property
    def generated(self) -> Array:
        """i32[B], the number of tokens generated before this step, excluding the prompt."""
        return self.start + 1 - self.prompt_length

    @property
    def stats(self) -> MarginStats:
        """The two largest logits at every node and their token ids, [B, N] each. XLA merges repeated calls."""
        return node_stats(self.logits)


def node_stats(logits: Array, *, logsumexp: bool = False) -> MarginStats:
    """Compute the margin statistics at each node, [B, N] each, from logits f32[B, N, V] that may be sharded over V."""
    axes = vocabulary_axes(logits.shape[-1])
    if axes:
        return sharded_margin_stats(logits, axis=axes, logsumexp=logsumexp)
    return margin_stats(logits, logsumexp=logsumexp)


def impossible(evidence: Evidence) -> Array:
    """Return bool[B, N], True if a node's token has a logit of -inf at the node's parent; False for root and padding.

    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, -jnp.inf], [0.0, 0.0]]])
    >>> impossible(evidence(chain(jnp.asarray([[0, 1]], jnp.int32)), z)).tolist()
    [[False, True]]
    """
    tree = evidence.tree
    return (at_drafted(tree, evidence.logits) == -jnp.inf) & (tree.tokens >= 0) & (tree.depths > 0)


def evidence(tree: DraftTree, logits: Array, *, seeds: ArrayLike | None = None, **fields: Any) -> Evidence:
    """Build an `Evidence` to call a rule outside of a decoding step.

    Args:
      tree, logits: the draft, and the target's logits at its nodes.
      seeds: u32[B]; one seed per row. Default: 0, 1, 2, ...
      **fields: other fields of `Evidence`, or arguments of `make_controls`. By default, rows are greedy and the root is
        at position 0.

    >>> from mars_jax.core.tree import chain
    >>> inputs = evidence(chain(jnp.asarray([[0, 1]], jnp.int32)), jnp.zeros((1, 2, 4)), temperature=0.7)
    >>> inputs.positions.tolist(), inputs.controls.temperature.tolist()
    ([[0, 1]], [0.699999988079071])
    """
    batch, n = tree.tokens.shape
    if seeds is None:
        seeds = jnp.arange(batch)
    zeros = jnp.zeros((batch,), jnp.int32)
    defaults: dict[str, Any] = {
        "keys": keys_from_seeds(jnp.asarray(seeds)),
        "start": zeros,
        "prompt_length": zeros + 1,
        "hidden": jnp.zeros((batch, n, 1)),
    }
    settings = {name: fields.pop(name) for name in fields.keys() - Evidence.__dataclass_fields__.keys()}
    if "controls" not in fields:
        fields["controls"] = make_controls(batch, **{"limit": 1 << 20, **settings})
    return Evidence(tree=tree, logits=logits, **defaults | fields)


ALL_EDGES = np.iinfo(np.int32).max
"""Value of `strict_edges` for a row in which all edges are strict: larger than any depth."""
_VALUES = (bool, int, float, str, list, tuple, np.ndarray, np.generic, Array)


class Rule:
    """The base class of verification rules, which map `Evidence` to a `Verdict` and an updated rule.

    A rule is a frozen pytree, declared with `struct.dataclass`. Its structure, which includes the class, the margin and
    the base, is static and determines the compiled program. Its parameters are leaves with one value or one value per
    row; during a step they are [B]. A rule stores its per-row state in leaves and returns an updated copy of itself.
    The attributes below are defaults, which subclasses may override with class attributes or properties.

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

    lossless: ClassVar[bool] = False  # True if the output follows the target's distribution
    needs: ClassVar[tuple[str, ...]] = ()  # requirements, as keys of `verify.NEEDS`
    base: Any = None  # the strict rule that this rule relaxes, if any
    exact_prefix: Any = 0  # number of tokens at the start of the output that are verified strictly

    def __post_init__(self) -> None:
        """Check the settings, and convert numbers to arrays of shape [] or [B] with a fixed dtype.

        Raises:
          MarsError: a value is out of range.
        """
        settings = settings_of(type(self))
        chosen_structure = {name: getattr(self, name) for name, s in settings.items() if s.choices}
        # Check choices first, because they determine the ranges of numbers.
        for name, setting in sorted(settings.items(), key=lambda item: not item[1].choices):
            value = getattr(self, name)
            # Skip a base rule: the subclass that has one checks it. Skip unknown types, because other libraries may
            # rebuild a pytree with placeholders as leaves.
            is_checkable = setting.choices or value is None or isinstance(value, _VALUES)
            if isinstance(value, Rule) or not is_checkable:
                continue
            setting.check(value, **chosen_structure)
            if setting.per_row:
                dtype = {int: np.int32, float: np.float32}[setting.kind]
                # NumPy must not read a JAX array, which may be traced or on a device.
                with np.errstate(over="ignore"):  # a number beyond float32 becomes inf
                    typed_value = (
                        value.astype(dtype) if isinstance(value, Array) else np.asarray(value, dtype)
                    )
                object.__setattr__(self, name, typed_value)

    @property
    def name(self) -> str:
        """Name of the rule in reports."""
        return type(self).__name__.lower()

    def check_drafter(self, drafter: Drafter) -> None:
        """Raise MarsError if the rule cannot verify the drafts of this drafter."""

    def strict_edges(self, evidence: Evidence) -> Array:
        """Return the depth down to which a row's edges are verified strictly, i32[B]; `ALL_EDGES` in strict rows."""
        return jnp.where(evidence.controls.strict, np.int32(ALL_EDGES), np.int32(0))

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        """Return the verdict on a draft, and a copy of the rule with updated state."""
        raise MarsError(f"the rule {self.name} has no method __call__: define one.")


class LoadedRule(NamedTuple):
    """A rule and its weights, which are passed in `Params.verify`."""

    rule: Rule  # without its weights
    params: PyTree = ()  # the weights, which the rule reads from `Evidence.params`


class Structure(NamedTuple):
    """The structure of a pytree, including the classes of its nodes.

    jaxlib compares dataclasses only by their fields. Without the classes, different rules could share a compiled
    program.
    """

    treedef: Any
    kinds: tuple[Any, ...]  # the class of the root or None, then the `kinds` of each child

    @classmethod
    def of(cls, tree: PyTree) -> Structure:
        def kinds(treedef: Any) -> tuple[Any, ...]:
            # `data` is None for a leaf, otherwise (class of the node, its static fields).
            data = treedef.node_data()
            return (data and data[0], *map(kinds, treedef.children()))

        treedef = jax.tree.structure(tree)
        return cls(treedef, kinds(treedef))


def structure(rule: object) -> Structure:
    """Return the pytree structure of a rule, which is hashable and determines the compiled program.

    Raises:
      MarsError: `rule` is not a rule, or has leaves that are not numbers.

    >>> from mars_jax import verify
    >>> structure(verify.mars(theta=0.5)) == structure(verify.mars(theta=0.9))
    True
    """
    if isinstance(rule, LoadedRule):
        raise MarsError("verify is a LoadedRule here: give its .rule, and its .params as Params.verify.")
    has_number_leaves = all(hasattr(x, "dtype") or isinstance(x, int | float) for x in jax.tree.leaves(rule))
    if not isinstance(rule, Rule) or not has_number_leaves:
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
"""Descriptions, used in messages, of the values that the methods and properties of a rule must return."""


@contextlib.contextmanager
def user_errors(rule: Rule) -> Iterator[None]:
    """Convert any exception that a user's rule raises in the `with` block into a MarsError.

    Exceptions raised by the rules of this package are not changed.
    """
    try:
        yield
    except MarsError:
        raise
    except (Exception, SystemExit) as error:
        rule_class = type(rule)
        if not is_user_module(rule_class.__module__):
            raise
        # The innermost frame in the user's file identifies the rule method that failed.
        frames = frames_in({rule_class.__module__, *MODULES}, error)
        method = next((code.co_name for code, _ in frames if code.co_name in EXPECTED), "__call__")
        raise MarsError(
            f"the rule {rule_class.__name__} fails in {failure(error, frames, rule_class)}; expected "
            f"{method} to return {EXPECTED[method]}."
        ) from error


def decide(rule: Rule, evidence: Evidence) -> tuple[Verdict, Rule]:
    """Call a rule and check its results.

    Raises:
      MarsError: the rule did not return a valid verdict and an updated rule, or a user's rule raised an exception.
    """
    with user_errors(rule):
        # A user's rule may return a value of any type.
        rule_result: object = rule(evidence)
    if not (isinstance(rule_result, tuple) and len(rule_result) == 2 and isinstance(rule_result[0], Verdict)):
        raise wrong_result(rule, "__call__", described(rule_result))
    verdict, next_rule = rule_result
    batch, max_depth = evidence.tree.tokens.shape[0], evidence.tree.max_depth
    # Shapes are static, so these checks cost nothing in the compiled program.
    expected_fields = {
        "path": ("int32", (batch, max_depth + 1)),
        "num_accepted": ("int32", (batch,)),
        "next_token": ("int32", (batch,)),
        "relaxed": ("bool", (batch, max_depth)),
    }
    for name, (dtype, shape) in expected_fields.items():
        check_array(
            rule, "__call__", getattr(verdict, name), dtype, shape, place=f"a verdict whose {name} is "
        )
    check_same_rule(rule, "__call__", next_rule)
    return verdict, next_rule


def check_array(
    rule: Rule, method: str, value: Any, dtype: str, shape: tuple[int, ...], *, place: str = ""
) -> None:
    """Raise MarsError unless a method of a rule returned an array of this shape and dtype.

    Args:
      rule, method: the rule, and the name of the method that returned the value.
      value: the returned value, or a part of it.
      dtype: the expected dtype; "floating" allows any floating-point dtype.
      shape: the expected shape.
      place: prefix for the error message that names the part being checked; "" for the whole returned value.
    """
    is_array = isinstance(value, Array | np.ndarray | np.generic) and value.shape == shape
    if dtype == "floating":
        is_expected, dtype = is_array and jnp.issubdtype(value.dtype, jnp.floating), "float32"
    else:
        is_expected = is_array and value.dtype == np.dtype(dtype)
    if not is_expected:
        raise wrong_result(rule, method, f"{place}{described(value)}", f"{place}{dtype}{list(shape)}")


def check_same_rule(rule: Rule, method: str, next_rule: object) -> None:
    """Raise MarsError unless a method returned a rule with the structure, shapes and dtypes of `rule`."""
    if Structure.of(next_rule) != Structure.of(rule):
        expected = f"an object of type {type(rule).__name__} with the same structure"
        raise wrong_result(rule, method, described(next_rule), expected)
    leaves = jax.tree_util.tree_leaves_with_path(rule)
    for (path, leaf), new_leaf in zip(leaves, jax.tree.leaves(next_rule), strict=True):
        if jnp.shape(new_leaf) != jnp.shape(leaf) or jnp.result_type(new_leaf) != jnp.result_type(leaf):
            rule_with = f"a rule whose {_path_name(path)} is "
            raise wrong_result(
                rule, method, f"{rule_with}{described(new_leaf)}", f"{rule_with}{described(leaf)}"
            )


def _path_name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def wrong_result(rule: Rule, method: str, returned: str, expected: str | None = None) -> MarsError:
    """Return the error for a rule whose method returned a value of the wrong type, shape or dtype."""
    function = getattr(type(rule), method)
    return MarsError(
        f"the rule {type(rule).__name__} fails in {location_of(function)}: {method} returned {returned}; expected "
        f"{expected or EXPECTED[method]}."
    )


def for_rows(rule: PyTree, batch: int) -> PyTree:
    """Broadcast every parameter of a rule to an array [batch, ...], as float32 or int32.

    Args:
      rule: the rule. Each parameter is a scalar, which applies to all rows, or an array [batch, ...].
      batch: B, the number of rows.

    Raises:
      MarsError: a parameter is neither a scalar nor an array [batch, ...].

    >>> from mars_jax import verify
    >>> for_rows(verify.mars(theta=0.5), 3).theta.tolist()
    [0.5, 0.5, 0.5]
    """

    def broadcast(path: jax.tree_util.KeyPath, value: ArrayLike) -> Array:
        if not isinstance(value, Array):
            value = np.asarray(value)
        if jnp.issubdtype(value.dtype, jnp.floating):
            value = value.astype(jnp.float32)
        elif jnp.issubdtype(value.dtype, jnp.integer):
            value = value.astype(jnp.int32)
        if value.ndim == 0:
            broadcast_to = jnp.broadcast_to if isinstance(value, Array) else np.broadcast_to
            value = broadcast_to(value, (batch,))
        if value.shape[0] != batch:
            raise MarsError(
                f"{_path_name(path)} of the rule has shape {value.shape}: expected one number, or one for each of "
                f"the {batch} rows."
            )
        # Host values are broadcast with NumPy, so that nothing is compiled.
        return value if isinstance(value, Array) else jax.device_put(value, may_alias=False)

    return jax.tree_util.tree_map_with_path(broadcast, rule)


def take_rows(rule: PyTree, rows: Sequence[int] | Array | np.ndarray, count: int) -> PyTree:
    """Select the entries `rows` from every parameter of a rule that has one value for each of `count` prompts.

    Raises:
      MarsError: a parameter has neither one value nor one value per prompt.

    >>> from mars_jax import verify
    >>> take_rows(verify.mars(theta=[0.5, 0.9]), [1], 2).theta.tolist()
    [0.8999999761581421]
    """

    def pick(path: jax.tree_util.KeyPath, leaf: ArrayLike) -> ArrayLike:
        value = np.asarray(leaf)
        if value.ndim == 0:
            return leaf
        if value.shape[0] != count:
            raise MarsError(
                f"{_path_name(path)} of the rule has {value.shape[0]} values for {count} prompts: give one, or one "
                "per prompt."
            )
        return value[np.asarray(rows)]

    return jax.tree_util.tree_map_with_path(pick, rule)
