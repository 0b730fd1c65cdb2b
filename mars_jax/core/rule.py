"""The interface of rules, their input `Evidence`, and rules as pytrees: static structure and per-row parameters.

B batch, N nodes, V vocabulary, E hidden size. Oracle: tests/verify/test_rules.py.
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
    """The input of a rule in one step. New fields can be added without changing any rule's signature.

    Row i of the logits is p(. | the tokens up to node i), so a node's token is judged by the logits of its parent. In
    the example, the target's top token after the root is 1, which node 1 holds; after node 1 it is 3, but node 2 holds
    2.

    >>> from mars_jax.core.tree import at_parent, chain
    >>> tree = chain(jnp.asarray([[0, 1, 2]], jnp.int32))
    >>> inputs = evidence(tree, jnp.asarray([[[0.0, 9.0, 0.0, 0.0], [0.0, 0.0, 1.0, 8.0], [0.0] * 4]]))
    >>> (tree.tokens == at_parent(tree, inputs.stats.id1)).tolist()  # the root has no parent and is not judged
    [[False, True, False]]
    """

    keys: Array  # key[B]; constant over a row's life: fold in the position, as `sampling.node_uniforms` does
    start: Array  # i32[B]; position of the root
    prompt_length: Array  # i32[B]; tokens of the prompt
    tree: DraftTree  # the draft, [B, N]
    # f32[B, N, V]; target logits before temperature, with the edits and the constraint of the row applied
    logits: Array
    hidden: Array  # [B, N, E]; hidden states of the target after its final norm
    controls: Controls  # controls of the rows, [B]
    params: PyTree = ()  # Params.verify
    # bool[B, N] or None; a span makes the edges below these nodes strict, see `guide`
    strict_nodes: Array | None = None

    @property
    def positions(self) -> Array:
        """i32[B, N]: the absolute position of every node."""
        return self.start[:, None] + self.tree.depths

    @property
    def generated(self) -> Array:
        """i32[B]: the number of tokens generated before this step, not counting the prompt."""
        return self.start + 1 - self.prompt_length

    @property
    def stats(self) -> MarginStats:
        """The two largest raw logits of every node and their ids, [B, N] each. XLA merges repeated computations."""
        return node_stats(self.logits)


def node_stats(logits: Array, *, logsumexp: bool = False) -> MarginStats:
    """Compute margin statistics per node, [B, N] each, of logits f32[B, N, V], possibly sharded over the vocabulary."""
    axes = vocabulary_axes(logits.shape[-1])
    if axes:
        return sharded_margin_stats(logits, axis=axes, logsumexp=logsumexp)
    return margin_stats(logits, logsumexp=logsumexp)


def impossible(evidence: Evidence) -> Array:
    """Return bool[B, N]: nodes whose token has a logit of -inf at their parent; never the root or padding.

    >>> from mars_jax.core.tree import chain
    >>> z = jnp.asarray([[[0.0, -jnp.inf], [0.0, 0.0]]])
    >>> impossible(evidence(chain(jnp.asarray([[0, 1]], jnp.int32)), z)).tolist()
    [[False, True]]
    """
    tree = evidence.tree
    return (at_drafted(tree, evidence.logits) == -jnp.inf) & (tree.tokens >= 0) & (tree.depths > 0)


def evidence(tree: DraftTree, logits: Array, *, seeds: ArrayLike | None = None, **fields: Any) -> Evidence:
    """Build `Evidence` by hand, to call a rule outside of a step.

    Args:
      tree, logits: fields of the evidence.
      seeds: u32[B]; default: 0, 1, 2, ...
      **fields: other fields of `Evidence`, or arguments of `make_controls`; default: greedy rows that start at 0.

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
"""A depth that no edge exceeds: `strict_edges` of a row whose edges are all strict."""
_VALUES = (bool, int, float, str, list, tuple, np.ndarray, np.generic, Array)


class Rule:
    """A verification rule: a frozen pytree (`struct.dataclass`) that maps `Evidence` to a `Verdict` and the next rule.

    Its structure (which rule, which margin, which base) is static and determines the compiled program. Its parameters
    are leaves, one value or one per row; in a step they are [B]. A rule keeps state per row by returning a changed copy
    of itself. The attributes below are defaults; subclasses override them with class attributes or properties.

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
    exact_prefix: Any = 0  # number of generated tokens at the start that are verified strictly

    def __post_init__(self) -> None:
        """Check the settings and convert numbers to strongly typed leaves, [] or [B].

        Raises:
          MarsError: a value is out of range.
        """
        settings = settings_of(type(self))
        chosen_structure = {name: getattr(self, name) for name, s in settings.items() if s.choices}
        # Choices first, because they determine the ranges of numbers.
        for name, setting in sorted(settings.items(), key=lambda item: not item[1].choices):
            value = getattr(self, name)
            # The class that declares a base checks it. Other libraries may rebuild pytrees with placeholders as leaves.
            is_checkable = setting.choices or value is None or isinstance(value, _VALUES)
            if isinstance(value, Rule) or not is_checkable:
                continue
            setting.check(value, **chosen_structure)
            if setting.per_row:
                dtype = {int: np.int32, float: np.float32}[setting.kind]
                # A JAX array may be traced or on a device, so NumPy must not read it.
                typed_value = value.astype(dtype) if isinstance(value, Array) else np.asarray(value, dtype)
                object.__setattr__(self, name, typed_value)

    @property
    def name(self) -> str:
        """Name in reports."""
        return type(self).__name__.lower()

    def check_drafter(self, drafter: Drafter) -> None:
        """Raise MarsError if the rule cannot verify this drafter's drafts."""

    def strict_edges(self, evidence: Evidence) -> Array:
        """Return i32[B]: the depth down to which edges are strict; in strict rows, all edges are."""
        return jnp.where(evidence.controls.strict, np.int32(ALL_EDGES), np.int32(0))

    def __call__(self, evidence: Evidence) -> tuple[Verdict, Self]:
        """Return the verdict on a draft, and the rule with its updated state."""
        raise MarsError(f"the rule {self.name} has no method __call__: define one.")


class LoadedRule(NamedTuple):
    """A rule and its weights, which go into `Params.verify`."""

    rule: Rule  # without its weights
    params: PyTree = ()  # its weights, which it reads as `Evidence.params`


class Structure(NamedTuple):
    """The structure of a pytree with the classes of its nodes.

    jaxlib compares dataclasses only by their fields. Without the classes, rules of different classes could share a
    compiled program.
    """

    treedef: Any
    kinds: tuple[Any, ...]  # (class of the node or None, kinds of each child)

    @classmethod
    def of(cls, tree: PyTree) -> Structure:
        def kinds(treedef: Any) -> tuple[Any, ...]:
            # None for a leaf, else (class of the node, its static fields).
            data = treedef.node_data()
            return (data and data[0], *map(kinds, treedef.children()))

        treedef = jax.tree.structure(tree)
        return cls(treedef, kinds(treedef))


def structure(rule: object) -> Structure:
    """Return the static part of a rule, which determines the compiled program: its pytree structure, hashable.

    Raises:
      MarsError: `rule` is not a rule, or not a pytree of numbers.

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
"""Expected results of the methods and properties of a rule."""


@contextlib.contextmanager
def user_errors(rule: Rule) -> Iterator[None]:
    """Chain a MarsError to any exception that a user's rule raises in the block.

    Exceptions of this package's rules pass unchanged.
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
    """Return `rule(evidence)`, checked.

    Raises:
      MarsError: the rule did not return a verdict and the next rule, or raised an exception; see `user_errors`.
    """
    with user_errors(rule):
        # A user's rule may return anything.
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
      rule, method: the rule and the method that returned the value.
      value: the result, or a part of it.
      dtype: "floating" for any floating dtype.
      shape: expected shape.
      place: description of the array's place in the result, for the message.
    """
    is_array = isinstance(value, Array | np.ndarray | np.generic) and value.shape == shape
    if dtype == "floating":
        is_expected, dtype = is_array and jnp.issubdtype(value.dtype, jnp.floating), "float32"
    else:
        is_expected = is_array and value.dtype == np.dtype(dtype)
    if not is_expected:
        raise wrong_result(rule, method, f"{place}{described(value)}", f"{place}{dtype}{list(shape)}")


def check_same_rule(rule: Rule, method: str, next_rule: object) -> None:
    """Raise MarsError unless a method returned the rule with parameters of the same shapes and dtypes."""
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
    """Return the error for a rule method that returned a value of the wrong kind."""
    function = getattr(type(rule), method)
    return MarsError(
        f"the rule {type(rule).__name__} fails in {location_of(function)}: {method} returned {returned}; expected "
        f"{expected or EXPECTED[method]}."
    )


def for_rows(rule: PyTree, batch: int) -> PyTree:
    """Broadcast every parameter of a rule to an array [batch, ...]; floats become f32 and whole numbers i32.

    Args:
      rule: parameters are scalars, the same for all rows, or arrays [batch, ...].
      batch: B.

    Raises:
      MarsError: a parameter has any other shape.

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
        # Host values are broadcast in NumPy, which compiles nothing.
        return value if isinstance(value, Array) else jax.device_put(value, may_alias=False)

    return jax.tree_util.tree_map_with_path(broadcast, rule)


def take_rows(rule: PyTree, rows: Sequence[int] | Array | np.ndarray, count: int) -> PyTree:
    """Select some `rows` of a rule for `count` prompts, in every parameter that has one value per prompt.

    Raises:
      MarsError: a parameter has neither one value nor `count` values.

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
