"""Containers, protocols and constants shared by all modules. Oracle: none, the module has no logic.

Dimensions: B batch, N tree nodes, D tree depth, T token buffer, S cache slots, V vocabulary, E hidden size,
M stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array

from mars_jax.core import cache as kv_cache
from mars_jax.core import struct
from mars_jax.core.cache import KVCache as KVCache
from mars_jax.core.visible import Visible as Visible
from mars_jax.utils.errors import MarsError
from mars_jax.utils.types import PyTree as PyTree

ROOT = 0
"""Index of the root node of every tree: the last committed token."""
NO_NODE = -1
"""Parent of the root."""
NO_TOKEN = -1
"""Token of a padding node, or of an unused entry of `Controls.stop_tokens`. Never accepted, never emitted."""

EXACT, RELAXED, CORRECTED, TRUSTED = 0, 1, 2, 3
"""Kinds of emitted tokens: a draft token that the strict rule accepts, one that only the relaxed rule accepts, the
target's token that ends a step (correction or bonus), and a draft token that was accepted without a test."""
NO_KIND = -1
"""Kind of an entry that was not emitted."""


@struct.dataclass(kw_only=True)
class DraftTree:
    """Drafted tokens as a tree whose parents precede their children.

    Node 0 is the last committed token. A chain is `parents[:, i] == i - 1`; plain autoregression is one node.
    Padding nodes carry `NO_TOKEN` and are never accepted.

    In the example, the root token 4 has children 1 and 2, and 1 has the child 5; node 4 is padding.

    >>> import jax.numpy as jnp
    >>> from mars_jax.core.tree import ancestors
    >>> tree = DraftTree(
    ...     tokens=jnp.asarray([[4, 1, 2, 5, NO_TOKEN]]),
    ...     parents=jnp.asarray([[NO_NODE, 0, 0, 1, 0]]),
    ...     depths=jnp.asarray([[0, 1, 1, 2, 1]]),
    ...     max_depth=2,
    ...     is_chain=False,
    ... )
    >>> ancestors(tree.parents, 2)[0, 3].tolist()  # node 3 attends to the root, node 1 and itself
    [True, True, False, True, False]
    """

    tokens: Array  # i32[B, N]; NO_TOKEN is padding
    parents: Array  # i32[B, N]; parents[:, 0] == NO_NODE and 0 <= parents[:, i] < i
    depths: Array  # i32[B, N]; depths[:, 0] == 0
    # f32[B, N, V] or None: the processed logits (see `sampling.process`) that the children of node i were drawn from:
    # softmax(draft_logits[b, i]) is the true q to compare with the target's p at node i. None: the draft is a
    # deterministic function of the committed tokens.
    draft_logits: Array | None = None
    # bool[B, N] or None: a prefix of the nodes of a chain that are accepted without a test, because a model cheaper
    # than the target confirmed them; see `core.trusted`.
    trusted: Array | None = None
    # [B, N, F] or None: the drafter's hidden state at each node, for drawing its children. Set only if the rule needs
    # it and the drafter has it; arbitrary at nodes without children.
    hidden: Array | None = None
    # f32[B] or None: the fraction of tested tokens that the drafter expects to be accepted, if it can estimate that per
    # draft; see `drafters.sized`.
    expected: Array | None = None
    max_depth: int = struct.field(pytree_node=False)  # D
    is_chain: bool = struct.field(pytree_node=False)  # each node is the child of the one before


@struct.dataclass(kw_only=True)
class Edits:
    """Per-row edits of the target's logits. A repetition penalty of 1 is off; the others are off at 0."""

    bias_tokens: Array  # i32[B, K]; padded with NO_TOKEN
    bias: Array  # f32[B, K]; added to the logits of these tokens; -inf bans a token
    repetition: (
        Array  # f32[B]; divides positive and multiplies negative logits of tokens in prompt and output
    )
    presence: Array  # f32[B]; subtracted from the logit of every token in the output
    frequency: Array  # f32[B]; subtracted once for each occurrence in the output
    min_new_tokens: Array  # i32[B]; stop tokens are banned before this many new tokens


@struct.dataclass(kw_only=True)
class Narrow:
    """Bit masks over a drafter's reduced vocabulary of U tokens."""

    ids: Array  # i32[U]; the target's id of each draft token
    bits: Array  # u32[R, ceil(U / 32)]; like `Tables.bits`


@struct.dataclass(kw_only=True)
class Tables:
    """Automata over tokens, built by `constraints.compiled`. Tables of equal shapes share compiled programs.

    S states, C token classes, G groups, R bit rows, W words per row.
    """

    next: Array  # u16[S, C]; the next state
    classes: Array  # u16[G, V]; class of each token; class 0 has no transitions
    bits: Array  # u32[R, W]; bit masks of the tokens that may follow
    rows: Array  # i32[S]; each state's row of `bits`
    forced: Array  # i32[S]; the token to write if the continuation is forced, else NO_TOKEN
    accepting: Array  # bool[S]; the output may end here
    closed: Array  # bool[S]; the output may end here, and no token may follow
    strict: Array  # bool[S]; for spans: rules must not relax here
    narrow: Narrow | None = None  # masks over the drafter's own vocabulary, if any; see `guide.narrowed`


@struct.dataclass(kw_only=True)
class Tracked:
    """The initial state of each row of a batch, and its group of token classes."""

    start: Array  # i32[B]; initial state; FREE for an unconstrained row
    group: Array  # i32[B]


@struct.dataclass(kw_only=True)
class GuideTables:
    """The constraint and span tables of a batch, stored as `Params.guides`. A field is None if no row uses it."""

    constraint: Tables | None = None
    span: Tables | None = None


@struct.dataclass(kw_only=True)
class GuideRows:
    """Each row's start state in the tables, stored as `Controls.guides`. A field that is None is not compiled."""

    constraint: Tracked | None = None
    span: Tracked | None = None


@struct.dataclass(kw_only=True)
class GuideStates:
    """The states that the rows have reached, stored as `DecodeState.guides`."""

    constraint: Array | None = None  # i32[B]
    span: Array | None = None  # i32[B]


@struct.dataclass(kw_only=True)
class Controls:
    """The settings that may differ between requests of one batch without recompiling. Build them with `make_controls`.

    >>> from mars_jax import make_controls
    >>> controls = make_controls(2, limit=64, temperature=[0.0, 0.7], top_k=10)  # a greedy row and a sampled one
    >>> controls.top_k.tolist(), controls.strict.tolist()
    ([10, 10], [False, False])
    """

    temperature: Array | None  # f32[B]; 0 is greedy; None: all rows are greedy, and sampling is not compiled
    top_k: Array  # i32[B]; 0 is off
    top_p: Array  # f32[B]; 1 is off
    min_p: Array  # f32[B]; 0 is off
    strict: Array  # bool[B]; True replaces a lossy rule by its lossless base in this row
    # f32[B]; drafting stops after a node where the square root of the draft's entropy is above it; inf is off
    draft_stop: Array
    limit: Array  # i32[B]; maximum tokens of prompt and output together
    stop_tokens: Array  # i32[B, M]; padded with NO_TOKEN
    edits: Edits | None = None  # edits of the target's logits, see `edits.make_edits`; None compiles none
    guides: GuideRows | None = None  # constraints and spans; None compiles none


@struct.dataclass(kw_only=True)
class Verdict:
    """The accepted path down the tree, and the token that the target adds.

    In the example, a chain drafts 1, 5 and 9 after 4. The target accepts 1 and replaces 5 by 2, so 9 is discarded.

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
    relaxed: Array  # bool[B, D]; edges that only the relaxed rule accepts


@struct.dataclass
class Prompts:
    """The prompts of b rows, with the settings, rule and key for decoding each.

    >>> from mars_jax import make_controls, verify
    >>> tokens, length = jax.numpy.ones((2, 32), "int32"), jax.numpy.asarray([3, 5])
    >>> controls, keys = make_controls(2, limit=32, temperature=[0.0, 0.7]), keys_from_seeds(jax.numpy.arange(2))
    >>> Prompts(tokens, length, controls, verify.mars(theta=0.9), keys).length.tolist()
    [3, 5]
    """

    tokens: Array  # i32[b, t]; left-aligned
    length: Array  # i32[b]; 1 to t
    controls: Controls  # controls of b rows
    rule: PyTree  # a rule of the decoder's structure; each parameter is one value or one per row
    keys: Array  # key[b], from `keys_from_seeds`


@struct.dataclass(kw_only=True)
class DecodeState:
    """State of the decoding loop: exactly the inputs of the next step. The first dimension of every leaf is B.

    The example has a prompt of three tokens in a buffer of six. Its last token is the root of the first draft, and not
    yet cached.

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
    length: Array  # i32[B]; committed tokens, including the prompt
    prompt_length: Array  # i32[B]; tokens of the prompt
    done: Array  # bool[B]; the row is finished
    failed: Array  # bool[B]; the row stopped because the target's logits were not finite
    cache: PyTree  # opaque to all but the target's `LanguageModel`
    draft: PyTree  # the drafter's state; leaves [B, ...]
    controls: Controls  # controls of the rows
    rule: PyTree  # the rule; its parameters and state are [B, ...]
    keys: Array  # key[B]; constant: a row's randomness is a function of its key and of positions
    guides: GuideStates | None = None  # states of the automata in `Controls.guides`


@struct.dataclass(kw_only=True)
class StepInfo:
    """Information about one step that the next step does not need. Finished rows have `num_emitted == 0`.

    In the example, 1 and 0 are drafted for the row in `DecodeState`'s example. The target accepts 1 and replaces 0 by
    2, which is `CORRECTED`.

    >>> import jax.numpy as jnp
    >>> from mars_jax import make_controls, verify
    >>> from mars_jax.core.step import emit
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

    verdict: Verdict  # the rule's verdict
    emitted: Array  # i32[B, D + 1]; NO_TOKEN from num_emitted on
    num_emitted: Array  # i32[B]; new tokens
    num_proposed: Array  # i32[B]; drafted nodes that are not padding
    kind: Array  # i32[B, D + 1]; EXACT, RELAXED, CORRECTED or TRUSTED; NO_KIND from num_emitted on
    # The next four fields are in nats, one value per emitted token; 0 from num_emitted on.
    regret: Array  # f32[B, D + 1]; z1 - z[token], of the raw target
    log_prob: Array  # f32[B, D + 1]; log softmax(z)[token], of the raw target
    # f32[B, D + 1]; log softmax(z / T)[token] over the whole vocabulary, the log-probability used by RL libraries; at
    # T = 0, log_prob
    temperature_log_prob: Array
    # f32[B, D + 1]; log-probability under the distribution that the token was drawn from, after the filters; NaN in
    # non-strict rows of a lossy rule, whose output does not follow p
    processed_log_prob: Array
    top: TopLogProbs | None = None  # only if `Decoder.top_log_probs` is positive


class TopLogProbs(NamedTuple):
    """The target's n most probable tokens at each emitted token's position; NO_TOKEN and 0 from num_emitted on."""

    tokens: Array  # i32[B, D + 1, n]; of the raw target, most probable first
    log_prob: Array  # f32[B, D + 1, n]; log softmax(z) of these tokens
    processed_tokens: Array  # i32[B, D + 1, n]; of the distribution that the token was drawn from
    # f32[B, D + 1, n]; -inf for tokens that the filters exclude; NaN where `StepInfo.processed_log_prob` is
    processed_log_prob: Array


class Params(NamedTuple):
    """Weights of both models and of the rule, and automaton tables; always an argument, never closed over."""

    target: PyTree  # weights of the target
    draft: PyTree = ()  # weights of the drafter, in its own format
    verify: PyTree = ()  # weights of the rule, which it reads as `Evidence.params`
    guides: GuideTables | None = None  # tables of the automata in `Controls.guides`


class ForwardOutput(NamedTuple):
    hidden: Array  # [B, N, E]; after the final norm; the input of `unembed`
    # [B, N, E] each: outputs of the requested layers, for target-coupled drafters
    features: tuple[Array, ...]
    cache: PyTree  # including the rows of these nodes


class LanguageModel(NamedTuple):
    """A decoder-only model as pure functions over a params pytree.

    The cache is opaque to all other code. The defaults of `slots`, `commit` and `put` work for every cache whose leaves
    are [B, S, ...].
    """

    init_cache: Callable[[int, int], PyTree]  # (batch, slots) -> cache
    # (params, tokens i32[B, N], visible, cache) -> ForwardOutput: write the rows of the tokens at `visible.slot`, then
    # attend to the slots that `visible` allows
    forward: Callable[[PyTree, Array, Visible, PyTree], ForwardOutput]
    unembed: Callable[[PyTree, Array], Array]  # (params, hidden [B, N, E]) -> f32[B, N, V]
    vocab_size: int  # V
    # Only drafters that are coupled to their target use the next two.
    embed: Callable[[PyTree, Array], Array] | None = None  # (params, tokens i32[B, N]) -> [B, N, E]
    # layers -> the model that returns their outputs
    with_features: Callable[[tuple[int, ...]], LanguageModel] | None = None
    # flags (attention, mlp) per layer -> the model without the parts whose flag is False, with its own cache
    with_layers: Callable[[tuple[tuple[bool, bool], ...]], LanguageModel] | None = None
    slots: Callable[[PyTree], int] = kv_cache.slots  # cache -> S
    # (cache, start i32[B], path i32[B, D + 1]) -> cache: move the rows of an accepted path to consecutive slots
    commit: Callable[[PyTree, Array, Array], PyTree] = kv_cache.commit_path
    # (cache, rows i32[b], new) -> cache: put the b rows of `new` into these rows; row numbers of B or more are dropped.
    # Only targets need it: drafter states always have [B, ...] leaves.
    put: Callable[[PyTree, Array, PyTree], PyTree] = kv_cache.put_rows
    prefill_chunk: int | None = None  # prompt tokens per forward; None: see `prefill.chunk_of`
    # Only recurrent models set the next two fields, because their cache cannot drop arbitrary tokens.
    # (nodes, prefill_chunk or None) -> this model with a cache that can drop the tokens of the last forward, if it had
    # up to `nodes` nodes, and that has room for a prompt's last window to end past the buffer
    for_chains: Callable[[int, int | None], LanguageModel] | None = None
    # (cache, count i32[B]) -> number of tokens that the cache can keep, i32[B], if only the first `count` stay valid
    keep: Callable[[PyTree, Array], Array] | None = None


KEY_IMPL = "threefry2x32"
"""The generator of row keys. With other generators, such as `rbg`, a row's random numbers depend on its batch."""


def keys_from_seeds(seeds: Array) -> Array:
    """Make one PRNG key per row: seeds u32[B] or i32[B] -> key[B], of `threefry2x32` regardless of JAX's default.

    Returns:
      key[B]; `Prompts.keys`.

    Raises:
      MarsError: seeds are not a one-dimensional array of whole numbers.

    >>> keys_from_seeds(jax.numpy.arange(3)).shape
    (3,)
    """
    is_integer = jax.numpy.issubdtype(getattr(seeds, "dtype", float), jax.numpy.integer)
    if getattr(seeds, "ndim", None) != 1 or not is_integer:
        raise MarsError("keys_from_seeds takes one seed for each row: give an array, such as jnp.arange(4).")
    return jax.vmap(lambda seed: jax.random.key(seed, impl=KEY_IMPL))(seeds)
