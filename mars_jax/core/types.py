"""The vocabulary every module shares: containers, protocols and constants. Oracle: none, it holds no logic.

Dimensions: B batch, N tree nodes, D tree depth, T token buffer, S cache slots, V vocabulary, E hidden size,
M stop tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
from jax import Array

PyTree = Any

ROOT = 0
"""Index of the root node of every tree: the last committed token."""
NO_NODE = -1
"""Parent of the root."""
NO_TOKEN = -1
"""Token of a padding node, or of an unused entry of `Controls.stop_tokens`. Never accepted, never emitted."""


@flax.struct.dataclass(kw_only=True)
class DraftTree:
    """Drafted tokens as a tree whose parents precede their children.

    Node 0 is the last committed token. A chain is `parents[:, i] == i - 1`; plain autoregression is one node.
    Padding nodes carry `NO_TOKEN` and are never accepted.
    """

    tokens: Array  # i32[B, N]
    parents: Array  # i32[B, N]; parents[:, 0] == NO_NODE and 0 <= parents[:, i] < i
    depths: Array  # i32[B, N]; depths[:, 0] == 0
    # f32[B, N, V] or None: the processed logits (see `sampling.process`) from which the children of node i were
    # drawn, so that softmax(draft_logits[b, i]) is the true q that faces the target's p at node i. None says that
    # the draft is a deterministic function of the committed tokens.
    draft_logits: Array | None = None
    max_depth: int = flax.struct.field(pytree_node=False)  # D
    is_chain: bool = flax.struct.field(pytree_node=False)


@flax.struct.dataclass(kw_only=True)
class KVCache:
    """Keys and values per layer. Row b is valid in slots `[0, length[b] - 1)`; the rest is never read."""

    k: tuple[Array, ...]  # each [B, S, kv_heads, head_dim]
    v: tuple[Array, ...]

    @property
    def slots(self) -> int:
        return self.k[0].shape[1]


@flax.struct.dataclass(kw_only=True)
class Controls:
    """Everything that may differ between requests of one batch and one compilation. Build with `controls`."""

    temperature: Array  # f32[B]; 0 is greedy
    top_k: Array  # i32[B]; 0 is off
    top_p: Array  # f32[B]; 1 is off
    min_p: Array  # f32[B]; 0 is off
    theta: Array  # f32[B]; threshold of the relaxed rule, in the units of its margin; inf is strict
    max_relaxed_run: Array  # i32[B]; relaxed tokens allowed in a row
    strict: Array  # bool[B]; True switches relaxation off for the row
    draft_stop: (
        Array  # f32[B]; nothing is drafted behind a draft entropy whose square root is above it; inf is off
    )
    limit: Array  # i32[B]; prompt and new tokens together never exceed it
    stop_tokens: Array  # i32[B, M]; padded with NO_TOKEN


@flax.struct.dataclass(kw_only=True)
class Verdict:
    """How far down the tree the target follows, and the token it adds."""

    path: Array  # i32[B, D + 1]; node ids from the root; past num_accepted it repeats the last node
    num_accepted: Array  # i32[B]; edges walked
    next_token: Array  # i32[B]; correction or bonus token
    relaxed: Array  # bool[B, D]; edge accepted only thanks to relaxation


@flax.struct.dataclass(kw_only=True)
class DecodeState:
    """Exactly what the next step needs."""

    tokens: Array  # i32[B, T]; tokens[b, :length[b]] are committed
    length: Array  # i32[B]
    done: Array  # bool[B]
    failed: Array  # bool[B]; the target's logits were not finite, and the row stopped there
    cache: KVCache
    draft: PyTree
    controls: Controls
    keys: Array  # key[B]; constant: step randomness is fold_in(key, length)


@flax.struct.dataclass(kw_only=True)
class StepInfo:
    """Diagnosis of one step, never carried. Finished rows have `num_emitted == 0` and count nothing."""

    verdict: Verdict
    emitted: Array  # i32[B, D + 1]; NO_TOKEN from num_emitted on
    num_emitted: Array  # i32[B]
    num_proposed: Array  # i32[B]; drafted nodes that are not padding
    regret: Array  # f32[B, D + 1]; z1 - z[token] in nats for each emitted token, 0 elsewhere


class Params(NamedTuple):
    """Weights of both models, and of a rule that has some; always an argument, never closed over."""

    target: PyTree
    draft: PyTree = ()
    verify: PyTree = ()


class ForwardOutput(NamedTuple):
    hidden: Array  # [B, N, E]; after the final norm: what `unembed` takes
    features: tuple[
        Array, ...
    ]  # [B, N, E] each: outputs of the layers asked for, for target-coupled drafters
    cache: KVCache


class LanguageModel(NamedTuple):
    """A decoder-only model as pure functions over a params pytree."""

    init_cache: Callable[..., KVCache]  # (batch, slots) -> KVCache
    # (params, tokens i32[B, N], positions i32[B, N], mask bool[B, N, S], cache, start i32[B]) -> ForwardOutput.
    # Writes the keys and values of the N tokens at slots start .. start + N - 1, then attends where mask is True.
    forward: Callable[..., ForwardOutput]
    unembed: Callable[..., Array]  # (params, hidden [B, N, E]) -> f32[B, N, V]
    vocab_size: int
    # What drafters that are coupled to their target ask of it; a model without them drafts with other drafters.
    embed: Callable[..., Array] | None = None  # (params, tokens i32[B, N]) -> [B, N, E]
    with_features: Callable[[tuple[int, ...]], LanguageModel] | None = (
        None  # layers -> the model that returns them
    )


class Drafter(NamedTuple):
    """A source of draft trees as pure functions. `num_nodes` and `max_depth` are the static N and D."""

    init: Callable[..., PyTree]  # (params: Params, tokens i32[B, T], length i32[B]) -> draft state
    propose: Callable[..., tuple[DraftTree, PyTree]]  # (params, keys, state, tokens, length, controls)
    update: Callable[..., PyTree]  # (params, state, tree, verdict, target output, length) -> state
    num_nodes: int
    max_depth: int
    # (params, state, tokens i32[B, T], first i32[B], length i32[B], target output) -> state: while the prompt is
    # read, the target's output at the n positions from `first` on; those at length - 1 and behind mean nothing.
    observe: Callable[..., PyTree] | None = None
    feature_layers: tuple[int, ...] = ()  # of the target; their outputs are what `observe` and `update` read
    vocab_size: int | None = None  # None: drafts only tokens it has seen
    stoppable: bool = False  # heeds Controls.draft_stop
    name: str = "drafter"


class Verifier(Protocol):
    """`verify(keys, tree, logits, controls)`: keys key[B], logits f32[B, N, V] raw target logits -> Verdict.

    A rule with a true attribute `reads_hidden` gets two arguments more: the target's hidden [B, N, E], after its final
    norm, and `Params.verify`.
    """

    def __call__(self, keys: Array, tree: DraftTree, logits: Array, controls: Controls) -> Verdict: ...


class Decoder(NamedTuple):
    """A pair of pure functions; see `decode.speculative_decoder`."""

    init: Callable[..., DecodeState]  # (params, prompts i32[B, T], lengths i32[B], controls, keys key[B])
    step: Callable[..., tuple[DecodeState, StepInfo]]  # (params, state)
    max_depth: int


def keys_from_seeds(seeds: Array) -> Array:
    """One PRNG key per row: seeds u32[B] or i32[B] -> key[B]."""
    return jax.vmap(jax.random.key)(seeds)
