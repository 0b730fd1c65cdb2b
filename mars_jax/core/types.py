"""The vocabulary every module shares: containers, protocols and constants. Oracle: none, it holds no logic.

Dimensions: B batch, N tree nodes, D tree depth, T token buffer, S cache slots, V vocabulary, E hidden size,
M stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from jax import Array

from mars_jax.core import cache as kv_cache
from mars_jax.core import struct
from mars_jax.core.cache import KVCache as KVCache
from mars_jax.core.errors import MarsError
from mars_jax.core.visible import Visible as Visible

PyTree = Any

ROOT = 0
"""Index of the root node of every tree: the last committed token."""
NO_NODE = -1
"""Parent of the root."""
NO_TOKEN = -1
"""Token of a padding node, or of an unused entry of `Controls.stop_tokens`. Never accepted, never emitted."""

EXACT, RELAXED, CORRECTED, TRUSTED = 0, 1, 2, 3
"""Kinds of emitted tokens: a draft token that the strict rule accepts, one that only the relaxed rule accepts, the
target's own token that ends a step, be it a correction or a bonus, and a draft token that was taken without a test."""
NO_KIND = -1
"""Kind of what was not emitted."""


@struct.dataclass(kw_only=True)
class DraftTree:
    """Drafted tokens as a tree whose parents precede their children.

    Node 0 is the last committed token. A chain is `parents[:, i] == i - 1`; plain autoregression is one node.
    Padding nodes carry `NO_TOKEN` and are never accepted.

    A text ends in 4. Its children are 1 and 2, and 5 follows 1; node 4 is padding:

    >>> import jax.numpy as jnp
    >>> from mars_jax.core.tree import ancestors
    >>> tree = DraftTree(
    ...     tokens=jnp.asarray([[4, 1, 2, 5, NO_TOKEN]]),
    ...     parents=jnp.asarray([[NO_NODE, 0, 0, 1, 0]]),
    ...     depths=jnp.asarray([[0, 1, 1, 2, 1]]),
    ...     max_depth=2,
    ...     is_chain=False,
    ... )
    >>> ancestors(tree.parents, 2)[0, 3].tolist()  # node 3 sees the root, node 1 and itself
    [True, True, False, True, False]
    """

    tokens: Array  # i32[B, N]; NO_TOKEN is padding
    parents: Array  # i32[B, N]; parents[:, 0] == NO_NODE and 0 <= parents[:, i] < i
    depths: Array  # i32[B, N]; depths[:, 0] == 0
    # f32[B, N, V] or None: the processed logits (see `sampling.process`) from which the children of node i were
    # drawn, so that softmax(draft_logits[b, i]) is the true q that faces the target's p at node i. None says that
    # the draft is a deterministic function of the committed tokens.
    draft_logits: Array | None = None
    # bool[B, N] or None: of a chain, the nodes that something cheaper than the target vouches for, from the first one
    # on. They are taken without a test; see `core.trusted`.
    trusted: Array | None = None
    # [B, N, F] or None: what the drafter knew where it drew the children of a node, where a rule asks for it and the
    # drafter has it; anything at nodes without children.
    hidden: Array | None = None
    # f32[B] or None: the share of the tested tokens that the drafter expects to be accepted, where it can tell one
    # draft from another; see `drafters.sized`.
    expected: Array | None = None
    max_depth: int = struct.field(pytree_node=False)  # D
    is_chain: bool = struct.field(pytree_node=False)  # each node is the child of the one before


@struct.dataclass(kw_only=True)
class Edits:
    """Edits of the target's logits, row by row. A repetition penalty of 1 is off, and 0 for the others."""

    bias_tokens: Array  # i32[B, K]; padded with NO_TOKEN
    bias: Array  # f32[B, K]; added to the logits of these tokens; -inf bans one
    repetition: Array  # f32[B]; divides positive and multiplies negative logits of tokens in prompt and text
    presence: Array  # f32[B]; taken from the logit of every token in the text
    frequency: Array  # f32[B]; taken from it once for every time that it is there


@struct.dataclass(kw_only=True)
class Guides:
    """Automata of rows: `Controls.guides`. The same fields hold tables in `Params.guides`, and states in the state."""

    constraint: Any = None
    span: Any = None


@struct.dataclass(kw_only=True)
class Controls:
    """Everything that may differ between requests of one batch and one compilation. Build it with `make_controls`.

    >>> from mars_jax import make_controls
    >>> controls = make_controls(2, limit=64, temperature=[0.0, 0.7], top_k=10)  # a greedy row and a sampled one
    >>> controls.top_k.tolist(), controls.strict.tolist()
    ([10, 10], [False, False])
    """

    temperature: Array | None  # f32[B]; 0 is greedy; None: all rows are, and nothing of drawing is compiled
    top_k: Array  # i32[B]; 0 is off
    top_p: Array  # f32[B]; 1 is off
    min_p: Array  # f32[B]; 0 is off
    strict: Array  # bool[B]; True switches every lossy rule off for the row, which then gets the rule's lossless base
    # f32[B]; nothing is drafted after a draft entropy whose square root is above it; inf is off
    draft_stop: Array
    limit: Array  # i32[B]; prompt and new tokens together never exceed it
    stop_tokens: Array  # i32[B, M]; padded with NO_TOKEN
    edits: Edits | None = None  # of the target's logits, see `edits.make_edits`; None compiles none
    # Where the automata of constraints and spans begin in each row, see `guide.Guides`; None compiles none.
    guides: Guides | None = None


@struct.dataclass(kw_only=True)
class Verdict:
    """The accepted path down the tree, and the token that the target adds.

    A chain drafts 1, 5 and 9 after 4. The target takes 1 and says 2 in place of 5, so that 9 is never reached:

    >>> import jax.numpy as jnp
    >>> from mars_jax.core.tree import chain, walk
    >>> tree, exact = chain(jnp.asarray([[4, 1, 5, 9]])), jnp.asarray([[False, True, False, True]])
    >>> path, num_accepted, relaxed = walk(tree, exact, None)
    >>> verdict = Verdict(path=path, num_accepted=num_accepted, next_token=jnp.asarray([2]), relaxed=relaxed)
    >>> verdict.path.tolist(), verdict.num_accepted.tolist()
    ([[0, 1, 1, 1]], [1])
    """

    path: Array  # i32[B, D + 1]; node ids from the root; past num_accepted it repeats the last node
    num_accepted: Array  # i32[B]; edges walked
    next_token: Array  # i32[B]; correction or bonus token
    relaxed: Array  # bool[B, D]; edge accepted only thanks to relaxation


@struct.dataclass
class Prompts:
    """The beginnings of rows: b texts, and how each is to go on.

    >>> from mars_jax import make_controls, verify
    >>> tokens, length = jax.numpy.ones((2, 32), "int32"), jax.numpy.asarray([3, 5])
    >>> controls, keys = make_controls(2, limit=32, temperature=[0.0, 0.7]), keys_from_seeds(jax.numpy.arange(2))
    >>> Prompts(tokens, length, controls, verify.mars(theta=0.9), keys).length.tolist()
    [3, 5]
    """

    tokens: Array  # i32[b, t]; each left-aligned in a row of its own
    length: Array  # i32[b]; 1 to t
    controls: Controls  # of b rows
    rule: PyTree  # of the decoder's structure; each number one for all rows, or one for each
    keys: Array  # key[b], from `keys_from_seeds`


@struct.dataclass(kw_only=True)
class DecodeState:
    """State of the decoding loop: exactly what the next step needs. Every leaf begins with B.

    A prompt of three tokens in a buffer of six. Its last token is the root of the first draft, and in no cache yet:

    >>> import jax.numpy as jnp
    >>> from mars_jax import make_controls, verify
    >>> from mars_jax.core.given import begun
    >>> tokens, length, rule = jnp.asarray([[3, 1, 4, 0, 0, 0]]), jnp.asarray([3]), verify.for_rows(verify.exact(), 1)
    >>> prompts = Prompts(tokens, length, make_controls(1, limit=6), rule, keys_from_seeds(jnp.arange(1)))
    >>> state = begun(prompts, cache=(), draft=())
    >>> int(state.tokens[0, state.length[0] - 1]), state.done.tolist()
    (4, [False])
    """

    tokens: Array  # i32[B, T]; tokens[b, :length[b]] are committed
    length: Array  # i32[B]; committed tokens, the prompt included
    prompt_length: Array  # i32[B]; tokens of the prompt
    done: Array  # bool[B]; nothing is added to the row any more
    failed: Array  # bool[B]; the target's logits were not finite, and the row stopped there
    cache: PyTree  # the target's own: only its `LanguageModel` opens it
    draft: PyTree  # the drafter's own; leaves [B, ...]
    controls: Controls  # of the rows
    rule: PyTree  # the rule, whose every number is [B]
    keys: Array  # key[B]; constant: a row's randomness is a function of its key and of positions
    guides: Guides | None = None  # i32[B] each: the states of the automata of `Controls.guides`


@struct.dataclass(kw_only=True)
class StepInfo:
    """Facts about one step, not carried to the next. Finished rows have `num_emitted == 0` and count nothing.

    The row of `DecodeState` drafts 1 and 0. The target takes 1, says 2 in place of 0, and 2 is `CORRECTED`:

    >>> import jax.numpy as jnp
    >>> from mars_jax import make_controls, verify
    >>> from mars_jax.core.emit import emit
    >>> from mars_jax.core.given import begun
    >>> from mars_jax.core.tree import chain
    >>> tokens, length, rule = jnp.asarray([[3, 1, 4, 0, 0, 0]]), jnp.asarray([3]), verify.for_rows(verify.exact(), 1)
    >>> prompts = Prompts(tokens, length, make_controls(1, limit=6), rule, keys_from_seeds(jnp.arange(1)))
    >>> state, tree = begun(prompts, cache=(), draft=()), chain(jnp.asarray([[4, 1, 0]], jnp.int32))
    >>> logits = jnp.log(jnp.asarray([[[0.1, 0.8, 0.1], [0.2, 0.2, 0.6], [0.4, 0.3, 0.3]]]))
    >>> verdict, _ = rule(verify.evidence(tree, logits))
    >>> state, info = jax.jit(emit)(state, tree, verdict, logits, logits)
    >>> info.emitted.tolist(), info.kind.tolist(), info.num_emitted.tolist(), state.tokens.tolist()
    ([[1, 2, -1]], [[0, 2, -1]], [2], [[3, 1, 4, 1, 2, 0]])
    """

    verdict: Verdict  # of the rule
    emitted: Array  # i32[B, D + 1]; NO_TOKEN from num_emitted on
    num_emitted: Array  # i32[B]; new tokens
    num_proposed: Array  # i32[B]; drafted nodes that are not padding
    kind: Array  # i32[B, D + 1]; EXACT, RELAXED, CORRECTED or TRUSTED; NO_KIND from num_emitted on
    # The last four are of every emitted token and in nats; 0 from num_emitted on.
    regret: Array  # f32[B, D + 1]; z1 - z[token], of the raw target
    log_prob: Array  # f32[B, D + 1]; log softmax(z)[token], of the raw target
    # f32[B, D + 1]; log softmax(z / T)[token] over the whole vocabulary, which is what RL libraries mean; at T = 0,
    # log_prob
    temperature_log_prob: Array
    # f32[B, D + 1]; of the distribution that the token was drawn from, after the filters; NaN where the rule is not
    # lossless and the row not strict, since the law of its text is not p
    processed_log_prob: Array


class Params(NamedTuple):
    """Weights of both models and of a rule that has some, and tables; always an argument, never closed over."""

    target: PyTree  # weights of the target
    draft: PyTree = ()  # weights of the drafter, as it wants them
    verify: PyTree = ()  # weights of the rule, as `Evidence.params`
    guides: PyTree = None  # tables of automata, `guide.Guides` of `guide.Tables`; those of `Controls.guides`


class ForwardOutput(NamedTuple):
    hidden: Array  # [B, N, E]; after the final norm: what `unembed` takes
    # [B, N, E] each: outputs of the layers asked for, for target-coupled drafters
    features: tuple[Array, ...]
    cache: PyTree  # with the rows of these nodes


class Forward(Protocol):
    """Write the rows of N tokens at `visible.slot`, then attend to what `visible` says. tokens i32[B, N]."""

    def __call__(
        self, params: PyTree, tokens: Array, visible: Visible, cache: PyTree, /
    ) -> ForwardOutput: ...


class LanguageModel(NamedTuple):
    """A decoder-only model as pure functions over a params pytree.

    The cache is the model's own: only its functions open it. The defaults of `slots`, `commit` and `put` serve every
    cache whose leaves are [B, S, ...].
    """

    init_cache: Callable[[int, int], PyTree]  # (batch, slots) -> cache
    forward: Forward  # (params, tokens i32[B, N], visible, cache) -> ForwardOutput
    unembed: Callable[[PyTree, Array], Array]  # (params, hidden [B, N, E]) -> f32[B, N, V]
    vocab_size: int  # V
    # What drafters that are coupled to their target ask of it; a model without them drafts with other drafters.
    embed: Callable[[PyTree, Array], Array] | None = None  # (params, tokens i32[B, N]) -> [B, N, E]
    # layers -> the model that returns their outputs
    with_features: Callable[[tuple[int, ...]], LanguageModel] | None = None
    # (attention, mlp) of every layer -> the model without those that are False, with a cache of its own
    with_layers: Callable[[tuple[tuple[bool, bool], ...]], LanguageModel] | None = None
    slots: Callable[[PyTree], int] = kv_cache.slots  # cache -> S
    # (cache, start i32[B], path i32[B, D + 1]) -> cache: move the rows of an accepted path to consecutive slots
    commit: Callable[[PyTree, Array, Array], PyTree] = kv_cache.commit
    # (cache, rows i32[b], new) -> cache: the b rows of another cache put into these; a row of B or more is dropped.
    # Only targets need it: drafter states always have [B, ...] leaves.
    put: Callable[[PyTree, Array, PyTree], PyTree] = kv_cache.put
    prefill_chunk: int | None = None  # prompt tokens per forward; None: see `prefill.chunk_of`


KEY_IMPL = "threefry2x32"
"""The generator of row keys. Others, `rbg` among them, give a row other numbers in a batch than alone."""


def keys_from_seeds(seeds: Array) -> Array:
    """One PRNG key per row: seeds u32[B] or i32[B] -> key[B], of `threefry2x32` whatever JAX's default is.

    Returns:
      key[B]; `Prompts.keys`.

    Raises:
      MarsError: seeds that are no array of whole numbers of one dimension.

    >>> keys_from_seeds(jax.numpy.arange(3)).shape
    (3,)
    """
    whole = jax.numpy.issubdtype(getattr(seeds, "dtype", float), jax.numpy.integer)
    if getattr(seeds, "ndim", None) != 1 or not whole:
        raise MarsError("keys_from_seeds takes one seed for each row: give an array, such as jnp.arange(4).")
    return jax.vmap(lambda seed: jax.random.key(seed, impl=KEY_IMPL))(seeds)
