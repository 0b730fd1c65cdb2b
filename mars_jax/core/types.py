"""Containers, protocols and constants that are shared by all modules. The module contains no logic to test.

Dimensions: B batch, N tree nodes, D tree depth, T token buffer, S cache slots, V vocabulary, E hidden size, M stop
tokens.
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
"""Index of the root of every draft tree, which is the last committed token."""
NO_NODE = -1
"""Parent index of the root, which has no parent."""
NO_TOKEN = -1
"""Token id of padding in a draft tree or in `Controls.stop_tokens`. It is never accepted or emitted."""

EXACT, RELAXED, CORRECTED, TRUSTED = 0, 1, 2, 3
"""Kinds of emitted tokens: a draft token that the strict rule accepts, a draft token that only the relaxed rule
accepts, the target's token at the end of a step (correction or bonus), and a draft token that was accepted without
verification."""
NO_KIND = -1
"""Kind of an entry without an emitted token."""


@struct.dataclass(kw_only=True)
class DraftTree:
    """Drafted tokens as a tree, in which parents precede their children.

    Node 0 is the last committed token. In a chain, `parents[:, i] == i - 1`. Plain autoregression uses a tree with one
    node. The token of a padding node is `NO_TOKEN`, which is never accepted.

    In the example, the root has the token 4, its children have the tokens 1 and 2, and node 1 has a child with the
    token 5. Node 4 is padding.

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

    tokens: Array  # i32[B, N]; NO_TOKEN at padding nodes
    parents: Array  # i32[B, N]; parents[:, 0] == NO_NODE and 0 <= parents[:, i] < i
    depths: Array  # i32[B, N]; depths[:, 0] == 0
    # f32[B, N, V] or None: the processed logits (see `sampling.process`) from which the children of node i were
    # sampled. softmax(draft_logits[b, i]) is the true q, which rules compare with the target's p at node i. None if the
    # draft is a deterministic function of the committed tokens.
    draft_logits: Array | None = None
    # bool[B, N] or None: True for the leading nodes of a chain, which need no verification by the target because a
    # cheaper model has verified them; see `core.trusted`.
    trusted: Array | None = None
    # [B, N, F] or None: the drafter's hidden states from which the children of each node were predicted. Set only if
    # the rule reads them and the drafter has them. Arbitrary at nodes without children.
    hidden: Array | None = None
    # f32[B] or None: the drafter's estimate of the fraction of verified tokens that will be accepted, if it can
    # estimate this for each draft; see `drafters.sized`.
    expected: Array | None = None
    max_depth: int = struct.field(pytree_node=False)  # D
    is_chain: bool = struct.field(pytree_node=False)  # True if each node is the child of the previous node


@struct.dataclass(kw_only=True)
class Edits:
    """Per-row edits of the target's logits. A repetition penalty of 1, or 0 in any other field, has no effect."""

    bias_tokens: Array  # i32[B, K]; padded with NO_TOKEN
    bias: Array  # f32[B, K]; added to the logits of these tokens; -inf bans a token
    repetition: (
        Array  # f32[B]; divides positive and multiplies negative logits of tokens in the prompt or output
    )
    presence: Array  # f32[B]; subtracted from the logit of every token in the output
    frequency: Array  # f32[B]; subtracted from a token's logit once for each occurrence in the output
    min_new_tokens: Array  # i32[B]; stop tokens are banned until the output has this many tokens


@struct.dataclass(kw_only=True)
class Narrow:
    """Bit masks over a drafter's reduced vocabulary of U tokens."""

    ids: Array  # i32[U]; the target's token id of each draft token
    bits: Array  # u32[R, ceil(U / 32)]; in the format of `Tables.bits`


@struct.dataclass(kw_only=True)
class Tables:
    """Automata over tokens, built by `constraints.compiled`. Tables with the same shapes share compiled programs.

    Dimensions: S states, C token classes, G groups, R bit rows, W words per bit row.
    """

    next: Array  # u16[S, C]; next state for each class of tokens
    classes: Array  # u16[G, V]; class of each token; 0 if the token has no text or is never allowed
    bits: Array  # u32[R, W]; bit masks of allowed tokens
    rows: Array  # i32[S]; row of `bits` for each state
    forced: Array  # i32[S]; first token of the text that must follow, or NO_TOKEN if no text is forced
    accepting: Array  # bool[S]; True if the output may end in this state
    closed: Array  # bool[S]; True if the output may end in this state and no token is allowed
    strict: Array  # bool[S]; for spans: True if rules must not relax in this state
    narrow: Narrow | None = None  # masks for a drafter with a reduced vocabulary; see `guide.narrowed`


@struct.dataclass(kw_only=True)
class Tracked:
    """The initial automaton state of each row, and the group that selects its token classes."""

    start: Array  # i32[B]; initial state; FREE for an unconstrained row
    group: Array  # i32[B]; row of `Tables.classes`


@struct.dataclass(kw_only=True)
class GuideTables:
    """The tables of a batch's constraints and spans, stored in `Params.guides`. A field is None if no row uses it."""

    constraint: Tables | None = None
    span: Tables | None = None


@struct.dataclass(kw_only=True)
class GuideRows:
    """The initial automaton states of the rows, stored in `Controls.guides`. A field is None if no row uses it."""

    constraint: Tracked | None = None
    span: Tracked | None = None


@struct.dataclass(kw_only=True)
class GuideStates:
    """The current automaton states of the rows, stored in `DecodeState.guides`."""

    constraint: Array | None = None  # i32[B]
    span: Array | None = None  # i32[B]


@struct.dataclass(kw_only=True)
class Controls:
    """Settings that may differ between the requests of a batch without recompilation, built by `make_controls`.

    >>> from mars_jax import make_controls
    >>> controls = make_controls(2, limit=64, temperature=[0.0, 0.7], top_k=10)  # one greedy row and one sampled row
    >>> controls.top_k.tolist(), controls.strict.tolist()
    ([10, 10], [False, False])
    """

    temperature: Array | None  # f32[B]; 0 is greedy; None if all rows are greedy and sampling is not compiled
    top_k: Array  # i32[B]; 0 disables the filter
    top_p: Array  # f32[B]; 1 disables the filter
    min_p: Array  # f32[B]; 0 disables the filter
    strict: Array  # bool[B]; True makes the row use the lossless base of a lossy rule
    # f32[B]; drafting stops after a node at which the square root of the draft's entropy exceeds this; inf disables it
    draft_stop: Array
    limit: Array  # i32[B]; maximum total number of tokens in prompt and output
    stop_tokens: Array  # i32[B, M]; padded with NO_TOKEN
    edits: Edits | None = None  # edits from `edits.make_edits`; None adds no code to the step
    guides: GuideRows | None = None  # constraints and spans; None adds no code to the step


@struct.dataclass(kw_only=True)
class Verdict:
    """The accepted path through a draft tree, and the token that the target adds at its end.

    In the example, the tokens 1, 5 and 9 are drafted after 4. The target accepts 1 and replaces 5 with 2, so 9 is
    discarded.

    >>> import jax.numpy as jnp
    >>> from mars_jax.core.tree import chain, walk
    >>> tree, exact = chain(jnp.asarray([[4, 1, 5, 9]])), jnp.asarray([[False, True, False, True]])
    >>> path, num_accepted, relaxed = walk(tree, exact, None)
    >>> verdict = Verdict(path=path, num_accepted=num_accepted, next_token=jnp.asarray([2]), relaxed=relaxed)
    >>> verdict.path.tolist(), verdict.num_accepted.tolist()
    ([[0, 1, 1, 1]], [1])
    """

    path: Array  # i32[B, D + 1]; node ids from the root on; repeats the last accepted node after num_accepted
    num_accepted: Array  # i32[B]; number of accepted tokens
    next_token: Array  # i32[B]; the target's correction or bonus token
    relaxed: Array  # bool[B, D]; True for edges of the path that only the relaxed rule accepts


@struct.dataclass
class Prompts:
    """The prompts of b rows, each with its settings, rule parameters and PRNG key.

    >>> from mars_jax import make_controls, verify
    >>> tokens, length = jax.numpy.ones((2, 32), "int32"), jax.numpy.asarray([3, 5])
    >>> controls, keys = make_controls(2, limit=32, temperature=[0.0, 0.7]), keys_from_seeds(jax.numpy.arange(2))
    >>> Prompts(tokens, length, controls, verify.mars(theta=0.9), keys).length.tolist()
    [3, 5]
    """

    tokens: Array  # i32[b, t]; token ids, left-aligned
    length: Array  # i32[b]; number of tokens in each prompt, 1 to t
    controls: Controls  # per-request settings, [b] each
    rule: PyTree  # a rule with the decoder's rule structure; each parameter is one value or one value per row
    keys: Array  # key[b], from `keys_from_seeds`


@struct.dataclass(kw_only=True)
class DecodeState:
    """State of the decoding loop: everything that the next step needs. The first dimension of every leaf is B.

    The example has a prompt of three tokens in a buffer of six. The last token of the prompt is the root of the first
    draft and is not cached yet.

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
    length: Array  # i32[B]; number of committed tokens, including the prompt
    prompt_length: Array  # i32[B]; number of tokens in the prompt
    done: Array  # bool[B]; True if the row has finished
    # bool[B]; True if the row stopped because the target's logits were not finite or all tokens were banned
    failed: Array
    cache: PyTree  # the target's cache; only functions of its `LanguageModel` may access it
    draft: PyTree  # the drafter's state; leaves [B, ...]
    controls: Controls  # per-request settings, [B] each
    rule: PyTree  # the rule, whose parameters and state are [B, ...]
    keys: Array  # key[B]; constant: the random numbers of a row depend on its key and on positions
    guides: GuideStates | None = None  # current states of the automata in `Controls.guides`


@struct.dataclass(kw_only=True)
class StepInfo:
    """Results of one step that the next step does not need. Finished rows have `num_emitted == 0`.

    The example continues that of `DecodeState`: the tokens 1 and 0 are drafted for its row. The target accepts 1 and
    replaces 0 with 2, whose kind is `CORRECTED`.

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
    emitted: Array  # i32[B, D + 1]; new tokens; NO_TOKEN from num_emitted on
    num_emitted: Array  # i32[B]; number of new tokens
    num_proposed: Array  # i32[B]; number of drafted tokens, excluding padding
    kind: Array  # i32[B, D + 1]; EXACT, RELAXED, CORRECTED or TRUSTED; NO_KIND from num_emitted on
    # The next four fields have one value in nats per emitted token, and 0 from num_emitted on.
    regret: Array  # f32[B, D + 1]; max(z) - z[token], for the target's raw logits z
    log_prob: Array  # f32[B, D + 1]; log softmax(z)[token], for the target's raw logits z
    # f32[B, D + 1]; log softmax(z / T)[token] over the whole vocabulary, the log-probability that RL libraries use;
    # equal to log_prob at temperature T = 0
    temperature_log_prob: Array
    # f32[B, D + 1]; log-probability under the distribution from which the token was sampled, after the filters; NaN in
    # non-strict rows of a lossy rule, whose output does not follow p
    processed_log_prob: Array
    top: TopLogProbs | None = None  # None if `Decoder.top_log_probs` is 0


class TopLogProbs(NamedTuple):
    """The target's n most probable tokens at the position of each emitted token; NO_TOKEN and 0 from num_emitted on."""

    tokens: Array  # i32[B, D + 1, n]; by the target's raw logits z, most probable first
    log_prob: Array  # f32[B, D + 1, n]; log softmax(z) of these tokens
    processed_tokens: Array  # i32[B, D + 1, n]; in the distribution from which the token was sampled
    # f32[B, D + 1, n]; -inf for tokens that the filters exclude; NaN if `StepInfo.processed_log_prob` is NaN
    processed_log_prob: Array


class Params(NamedTuple):
    """Weights of the target, drafter and rule, and automaton tables. Pass them as an argument, not in a closure."""

    target: PyTree  # weights of the target
    draft: PyTree = ()  # weights of the drafter, in the drafter's format
    verify: PyTree = ()  # weights of the rule, which the rule reads from `Evidence.params`
    guides: GuideTables | None = None  # tables of the automata in `Controls.guides`


class ForwardOutput(NamedTuple):
    hidden: Array  # [B, N, E]; hidden states after the final norm, the input of `unembed`
    # [B, N, E] each: outputs of the requested layers, for drafters that read the target
    features: tuple[Array, ...]
    cache: PyTree  # the cache, including the rows of these nodes


class LanguageModel(NamedTuple):
    """A decoder-only language model, as pure functions of a pytree of weights.

    Only these functions access the cache. The default functions `slots`, `commit` and `put` work for every cache whose
    leaves are [B, S, ...].
    """

    init_cache: Callable[[int, int], PyTree]  # (batch, slots) -> cache
    # (params, tokens i32[B, N], visible, cache) -> ForwardOutput: write the rows of the tokens at `visible.slot`, then
    # attend to the slots that `visible` allows
    forward: Callable[[PyTree, Array, Visible, PyTree], ForwardOutput]
    unembed: Callable[[PyTree, Array], Array]  # (params, hidden [B, N, E]) -> f32[B, N, V]
    vocab_size: int  # V
    # The next two fields are only used by drafters that read their target.
    embed: Callable[[PyTree, Array], Array] | None = None  # (params, tokens i32[B, N]) -> [B, N, E]
    # layers -> this model, with `ForwardOutput.features` set to the outputs of these layers
    with_features: Callable[[tuple[int, ...]], LanguageModel] | None = None
    # flags (attention, mlp) per layer -> this model without the parts whose flag is False, with a separate cache
    with_layers: Callable[[tuple[tuple[bool, bool], ...]], LanguageModel] | None = None
    slots: Callable[[PyTree], int] = kv_cache.slots  # cache -> S
    # (cache, start i32[B], path i32[B, D + 1]) -> cache: move the rows of an accepted path to consecutive slots
    commit: Callable[[PyTree, Array, Array], PyTree] = kv_cache.commit_path
    # (cache, rows i32[b], new) -> cache: write the b rows of `new` to these rows, but skip row numbers >= B. Only
    # targets need this function, because the leaves of drafter states are always [B, ...].
    put: Callable[[PyTree, Array, PyTree], PyTree] = kv_cache.put_rows
    prefill_chunk: int | None = None  # prompt tokens per forward pass; None: chosen by `prefill.chunk_of`
    # Only recurrent models set the next two fields, because their caches cannot drop arbitrary tokens.
    # (nodes, prefill_chunk or None) -> this model with a cache that can drop the tokens of the last forward pass, if it
    # had at most `nodes` nodes. The cache is large enough for a prefill window that ends past the token buffer.
    for_chains: Callable[[int, int | None], LanguageModel] | None = None
    # (cache, count i32[B]) -> number of cached tokens, i32[B], that can be reused if only the first `count` are still
    # valid
    keep: Callable[[PyTree, Array], Array] | None = None


KEY_IMPL = "threefry2x32"
"""The PRNG implementation of row keys. With other implementations, such as `rbg`, the random numbers of a row would
depend on the batch."""


def keys_from_seeds(seeds: Array) -> Array:
    """Create one `threefry2x32` PRNG key per row, from seeds u32[B] or i32[B], regardless of JAX's default PRNG.

    Returns:
      key[B], for `Prompts.keys`.

    Raises:
      MarsError: `seeds` is not a one-dimensional array of integers.

    >>> keys_from_seeds(jax.numpy.arange(3)).shape
    (3,)
    """
    is_integer = jax.numpy.issubdtype(getattr(seeds, "dtype", float), jax.numpy.integer)
    if getattr(seeds, "ndim", None) != 1 or not is_integer:
        raise MarsError("keys_from_seeds takes one seed for each row: give an array, such as jnp.arange(4).")
    return jax.vmap(lambda seed: jax.random.key(seed, impl=KEY_IMPL))(seeds)
