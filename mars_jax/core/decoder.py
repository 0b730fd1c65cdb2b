"""The decoder, which combines a target, a drafter and a rule into pure functions of a state. Read this module first.

Dimensions: B batch, N nodes, D draft depth, T token buffer, V vocabulary. Tested token by token against greedy
autoregression of the same model (tests/core/test_decode.py).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import cache as kv_cache
from mars_jax.core.axes import by_rows
from mars_jax.core.conditions import Conditions
from mars_jax.core.controls import pad_controls
from mars_jax.core.drafter import Drafter
from mars_jax.core.given import (
    begun,
    check_pair,
    check_params,
    check_places,
    check_prompts,
    check_recurrent,
    check_same,
    check_settings,
    other_decoder,
    rows_of,
)
from mars_jax.core.pick import leading
from mars_jax.core.prefill import chunk_of, observing, prefill
from mars_jax.core.rule import Rule, Structure, for_rows, structure
from mars_jax.core.step import commit, emit, judge, propose, score_tree, step_keys
from mars_jax.core.types import DecodeState, LanguageModel, Params, Prompts, PyTree, StepInfo
from mars_jax.utils.errors import MarsError, check_count
from mars_jax.utils.limits import TOP_LOG_PROBS


@dataclasses.dataclass(frozen=True)
class Decoder:
    """A target, a drafter and the structure of a rule, combined by `speculative_decoder`.

    The methods are pure functions. Apply `jax.jit` and donate the state in your outermost function, or call `run`,
    `stream`, `refill` and `extend`, which do both. Equal decoders share compiled programs, so a decoder may be rebuilt
    wherever it is needed.

    >>> from mars_jax import drafters, fake, make_controls, verify
    >>> from mars_jax.core.types import keys_from_seeds
    >>> model, rule = fake.hash_model(vocab_size=11), verify.mars(theta=0.9)
    >>> decoder = speculative_decoder(model, drafters.ngram(4), rule)
    >>> prompts = Prompts(jnp.ones((1, 32), jnp.int32), jnp.asarray([3]), make_controls(1, limit=32), rule,
    ...                   keys_from_seeds(jnp.arange(1)))
    >>> state = jax.jit(decoder.init)(Params(target=()), prompts)
    >>> state, info = jax.jit(decoder.step)(Params(target=()), state)
    >>> int(state.length[0]) == 3 + int(info.num_emitted[0])
    True
    """

    target: LanguageModel  # the model to sample from
    drafter: Drafter  # proposes the draft trees
    rule_structure: Structure  # the static part of the rule; the rule's parameters are in the state
    prefill_chunk: int | None = None  # prompt tokens per forward pass of the target; see `prefill.chunk_of`
    top_log_probs: int = 0  # number of most probable tokens in `StepInfo.top`; 0 if `top` is None

    @property
    def max_depth(self) -> int:
        """D, the maximum number of drafted tokens on a path; a step adds at most D + 1 tokens to a row."""
        return self.drafter.max_depth

    @property
    def vocab_size(self) -> int:
        """V, the size of the target's vocabulary."""
        return self.target.vocab_size

    def init(self, params: Params, prompts: Prompts) -> DecodeState:
        """Read the prompts and return the initial state.

        The width of the prompts is T, the size of the token buffer for prompt and output together.

        Raises:
          MarsError: the prompts are invalid; see `checked`.
        """
        check_params(params)
        return by_rows(self._read)(params, self.checked(prompts))

    def step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """Advance every unfinished row by 1 to D + 1 tokens: propose, score, judge, update, emit, commit.

        Raises:
          MarsError: `params` is not a `Params`, or `state` is not a `DecodeState` of a decoder with the same rule.
        """
        check_params(params)
        self._check_state(state)
        return by_rows(self._step)(params, state)

    def insert(
        self,
        params: Params,
        state: DecodeState,
        rows: Array,
        prompts: Prompts,
        read: DecodeState | None = None,
    ) -> DecodeState:
        """Restart some rows of a running state with new prompts, and leave the other rows bitwise unchanged.

        Args:
          params, state: the weights, and a state of this decoder with B rows.
          rows: i32[b]; the row of the state for each prompt, or -1 to skip the prompt. Rows must not repeat. On a mesh
            with data=d, `rows` and the state are each split into d equal parts, and the i-th part of `rows` may only
            contain rows in the i-th part of the state.
          prompts: b prompts, padded to at most T tokens.
          read: a state of b rows that has already read these prompts. Allowed only if the mesh does not shard rows.

        Raises:
          MarsError: the prompts are invalid (see `checked`), rows are out of range or repeated, or a state belongs to a
            different decoder.
        """
        check_params(params)
        prompts = self.checked(prompts)
        self._check_state(state)
        check_places(rows, prompts.length.shape[0], rows_of(state))
        prompts = dataclasses.replace(prompts, controls=pad_controls(prompts.controls, state.controls))
        if read is None:
            return self._read_into(params, state, rows, prompts)
        self._check_state(read)
        self._check_cache(read)
        prompts = dataclasses.replace(prompts, tokens=read.tokens, length=read.length)
        # Replace -1 with an index past the end, which scatter drops.
        return self._put(
            state, jnp.where(rows < 0, rows_of(state), rows), begun(prompts, read.cache, read.draft)
        )

    def extend(self, params: Params, state: DecodeState, prompts: Prompts) -> tuple[DecodeState, Array]:
        """Continue every row with a new prompt, such as a conversation with one more turn.

        The caches keep the longest common prefix of a row's committed tokens and its new prompt, and only the tokens
        after this prefix are read. Callers therefore need not specify which tokens are new. If a chat template renders
        an earlier turn differently, the common prefix is shorter. A key or value depends only on its own token and
        earlier tokens, so the returned state equals that of `init` up to rounding.

        Args:
          params, state: the weights, and a state of this decoder with B rows.
          prompts: the full token sequence of every row, including the tokens that were already read; at most T wide.

        Returns:
          The state, and the number of tokens read from each prompt, i32[B].

        Raises:
          MarsError: the prompts are invalid (see `checked`), or the state belongs to a different decoder.
        """
        check_params(params)
        batch, buffer = rows_of(state), state.tokens.shape[1]
        prompts = self.checked(prompts)
        count, width = prompts.tokens.shape
        if count != batch or width > buffer:
            raise MarsError(
                f"the prompts are {[count, width]} and the state has {batch} rows of {buffer} tokens: give one prompt "
                "for each row, at most as wide."
            )
        return by_rows(self._extend)(params, state, _pad_tokens(prompts, buffer))

    def checked(self, prompts: Prompts) -> Prompts:
        """Check prompts, broadcast the rule's parameters to one value per row, and copy all arrays.

        Raises:
          MarsError: the rule's structure differs from this decoder's, the keys are not from the generator of
            `keys_from_seeds`, or an array has the wrong shape or dtype. Concrete values are also checked: every length
            must be from 1 to the width of the prompts, and every token in the vocabulary.
        """
        check_prompts(prompts, self.target.vocab_size)
        if structure(prompts.rule) != self.rule_structure:
            raise MarsError(
                f"the rule {prompts.rule.name} is not of the structure that this decoder was made for: give "
                "speculative_decoder the same rule; only its numbers may differ."
            )
        num_prompts = prompts.tokens.shape[0]
        check_settings(prompts.controls, prompts.keys, num_prompts)
        controls, rule, keys = jax.tree.map(
            jnp.copy, (prompts.controls, for_rows(prompts.rule, num_prompts), prompts.keys)
        )
        tokens, length = jnp.array(prompts.tokens, jnp.int32), jnp.array(prompts.length, jnp.int32)
        return Prompts(tokens, length, controls, rule, keys)

    def _step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        draft_keys, verify_keys = step_keys(state)
        conditions = Conditions.of(params, state)
        # Draft a tree of cheap guesses. Its root, node 0, is the last committed token.
        tree, draft = propose(self.drafter, params, state, conditions, draft_keys)
        nodes = conditions.at(tree)
        # One forward pass of the target computes p(. | tokens up to node i) for all nodes i at once.
        scores = score_tree(self.drafter, self.target, params, state, tree, nodes)
        # Walk down from the root to the last accepted node. The target's correction or bonus token follows this node.
        verdict, rule, num_trusted = judge(params, state, tree, scores, nodes, verify_keys)
        # Update the drafter's state. A drafter that reads the target's features caches those of the accepted path.
        with jax.named_scope("update"):
            draft = self.drafter.update(params, draft, tree, verdict, scores.output, state.length)
        with jax.named_scope("emit"):
            emitted_state, info = emit(
                state,
                tree,
                verdict,
                scores.raw,
                scores.logits,
                num_trusted,
                nodes.ended(verdict),
                self.top_log_probs,
            )
        # The forward pass has cached the whole tree. Move the accepted path to consecutive cache slots.
        next_state = commit(
            self.target,
            state,
            emitted_state,
            tree,
            verdict,
            cache=scores.output.cache,
            draft=draft,
            rule=rule,
            guides=nodes.after(verdict, state),
        )
        return next_state, info

    def _read(self, params: Params, prompts: Prompts) -> DecodeState:
        batch, buffer = prompts.tokens.shape
        cache, draft = prefill(
            self.target,
            params.target,
            prompts.tokens,
            # Cache the tokens [0, length - 1). The first step caches the prompt's last token, the root of its tree.
            jnp.zeros_like(prompts.length),
            prompts.length - 1,
            # The cache needs N extra slots: a step writes the N nodes of a draft from slot `length - 1` on, even if the
            # token buffer is full.
            self.target.init_cache(batch, buffer + self.drafter.num_nodes),
            self._init_draft(params, prompts.tokens, prompts.length),
            observing(self.drafter, params, prompts.tokens, prompts.length),
            chunk=self.prefill_chunk,
        )
        return begun(prompts, cache, draft)

    def _init_draft(self, params: Params, tokens: Array, length: Array) -> PyTree:
        """Return the drafter's state before it has read any output of the target."""
        if self.target.for_chains is not None and self.drafter.reads is not None:
            # A prefill window of a recurrent target may end past the token buffer (see `prefill`), and a head reads
            # whole windows.
            tokens = jnp.pad(tokens, ((0, 0), (0, self.target.prefill_chunk or chunk_of())))
        return self.drafter.init(params, tokens, length)

    def _read_into(self, params: Params, state: DecodeState, rows: Array, prompts: Prompts) -> DecodeState:
        """Read the prompts and write the results to the given rows of the state, i32[b]."""
        batch, buffer = state.tokens.shape
        prompt_width = prompts.tokens.shape[1]
        if prompt_width > buffer:
            raise MarsError(
                f"the prompts are {prompt_width} wide and the state's token buffer {buffer}: cut them to {buffer}."
            )

        def insert_shard(
            params: Params, state: DecodeState, ids: Array, rows: Array, prompts: Prompts
        ) -> DecodeState:
            # `ids` holds the global row numbers of this shard. Rows of other shards map past the end, where scatter
            # drops them.
            is_here = rows[:, None] == ids[None]  # bool[b, B]
            local_rows = jnp.where(jnp.any(is_here, axis=1), jnp.argmax(is_here, axis=1), ids.shape[0])
            return self._put(state, local_rows.astype(jnp.int32), self._read(params, prompts))

        ids = jnp.arange(batch, dtype=jnp.int32)
        rows = jnp.asarray(rows, jnp.int32)
        return by_rows(insert_shard)(params, state, ids, rows, _pad_tokens(prompts, buffer))

    def _extend(self, params: Params, state: DecodeState, prompts: Prompts) -> tuple[DecodeState, Array]:
        """Implement `extend` for prompts that are as wide as the token buffer."""
        tokens, length = prompts.tokens, prompts.length
        self._check_cache(state)
        check_same("draft", state.draft, jax.eval_shape(self._init_draft, params, tokens, length))
        # Compute the length of the longest common prefix of the committed tokens and the new prompt, i32[B].
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        # Entries past the length of either sequence are garbage.
        is_same = (tokens == state.tokens) & (position < jnp.minimum(state.length, length)[:, None])
        num_common = leading(is_same)
        # A draft head's cache entry for the last common token depends on the token after it, so a drafter that reads
        # the target's features rereads this one token.
        reread = int(self.drafter.reads is not None)
        # The cache does not contain the last committed token. It will not contain the prompt's last token either,
        # because that token is the root of the next step's tree. So keep the target's cache up to `first_unread`, and
        # read [first_unread, length - 1).
        first_unread = jnp.minimum(num_common - reread, jnp.minimum(state.length - 1, length - 1 - reread))
        first_unread = jnp.maximum(first_unread, 0)
        if self.target.keep is not None:
            first_unread = self.target.keep(state.cache, first_unread)
        # The cache of a draft model is one token shorter, because a draft model feeds its last two tokens in every
        # step.
        draft = self.drafter.catch_up(params, state.draft, tokens, jnp.maximum(num_common - 2, 0), length)
        cache, draft = prefill(
            self.target,
            params.target,
            tokens,
            first_unread,
            length - 1,
            state.cache,
            draft,
            observing(self.drafter, params, tokens, length),
            chunk=self.prefill_chunk or self.target.prefill_chunk or chunk_of(),
        )
        return begun(prompts, cache, draft), jnp.maximum(length - 1 - first_unread, 0)

    def _put(self, state: DecodeState, rows: Array, new: DecodeState) -> DecodeState:
        """Write the rows of `new` to the given rows of the state, i32[b], and ignore row numbers past the end."""
        self._check_cache(state)
        for name in ("tokens", "draft", "rule"):
            check_same(name, getattr(state, name), getattr(new, name), rows=False)
        # The layout of the cache depends on the target. All other leaves are [B, ...].
        cache = self.target.put(state.cache, rows, new.cache)
        state_without_cache = dataclasses.replace(state, cache=())
        state_without_cache = kv_cache.put_rows(state_without_cache, rows, dataclasses.replace(new, cache=()))
        return dataclasses.replace(state_without_cache, cache=cache)

    def _check_state(self, state: DecodeState) -> None:
        """Raise MarsError unless `state` is a `DecodeState` whose rule has the structure of this decoder's rule."""
        rows_of(state)
        if structure(state.rule) != self.rule_structure:
            raise other_decoder("rule")

    def _check_cache(self, state: DecodeState) -> None:
        batch, buffer = state.tokens.shape
        # `eval_shape` allocates nothing.
        expected = jax.eval_shape(lambda: self.target.init_cache(batch, buffer + self.drafter.num_nodes))
        check_same("cache", state.cache, expected)


def _pad_tokens(prompts: Prompts, buffer: int) -> Prompts:
    """Pad the prompts to the width of the token buffer."""
    padding = buffer - prompts.tokens.shape[1]
    return dataclasses.replace(prompts, tokens=jnp.pad(prompts.tokens, ((0, 0), (0, padding))))


def speculative_decoder(
    target: LanguageModel,
    drafter: Drafter,
    verify: Rule,
    *,
    prefill_chunk: int | None = None,
    top_log_probs: int = 0,
) -> Decoder:
    """Build a speculative decoder (Leviathan et al., arXiv 2211.17192) from any drafter and any rule.

    The decoder stores only the structure of `verify`, so rules that differ only in their parameters produce equal
    decoders. The parameters are passed in `Prompts`.

    Args:
      target: the model to sample from.
      drafter: the drafter that proposes tokens; with `drafters.none()`, decoding is plain autoregression.
      verify: the rule, which decides how much of a draft is accepted; see `mars_jax.verify`.
      prefill_chunk: prompt tokens per forward pass of the target during prefill. Default: `target.prefill_chunk` if
        set, otherwise `prefill.chunk_of`. A draft model uses its own `prefill_chunk`.
      top_log_probs: number of the target's most probable tokens that each step reports in `StepInfo.top`.

    Raises:
      MarsError: the drafter's vocabulary differs from the target's, or the drafter reads features that the target does
        not provide; the target has recurrent layers and the drafter drafts trees; `verify` is not a rule; or
        `prefill_chunk` or `top_log_probs` is out of range.

    Example:
      >>> from mars_jax import drafters, fake, verify
      >>> from mars_jax.core.controls import make_controls
      >>> from mars_jax.core.types import keys_from_seeds
      >>> rule = verify.mars(theta=0.9)
      >>> decoder = speculative_decoder(fake.hash_model(vocab_size=11), drafters.ngram(4), rule)
      >>> prompts = Prompts(jnp.ones((1, 32), jnp.int32), jnp.array([3], jnp.int32), make_controls(1, limit=32),
      ...                   rule, keys_from_seeds(jnp.arange(1)))
      >>> state = jax.jit(decoder.init)(Params(()), prompts)
      >>> state = jax.lax.while_loop(lambda s: ~jnp.all(s.done), lambda s: decoder.step(Params(()), s)[0], state)
      >>> int(state.length[0])
      32
    """
    check_pair(target, drafter)
    if prefill_chunk is not None:
        check_count("prefill_chunk", prefill_chunk)
    check_count("top_log_probs", top_log_probs, 0, min(TOP_LOG_PROBS, target.vocab_size))
    if drafter.vocab_size is not None and drafter.vocab_size != target.vocab_size:
        raise MarsError(
            f"the drafter '{drafter.name}' has a vocabulary of {drafter.vocab_size} tokens and the target one of "
            f"{target.vocab_size}: pair models that share a tokenizer."
        )
    if drafter.reads:
        if target.with_features is None:
            raise MarsError(
                f"the drafter '{drafter.name}' reads the outputs of the target's layers {drafter.reads}, and "
                "this target provides none: set LanguageModel.with_features."
            )
        target = _with_features(target, drafter.reads)
    if target.for_chains is not None:
        check_recurrent(drafter)
        target = target.for_chains(drafter.num_nodes, prefill_chunk)
    return Decoder(target, drafter, structure(verify), prefill_chunk, top_log_probs)


@functools.lru_cache(maxsize=64)
def _with_features(target: LanguageModel, layers: tuple[int, ...]) -> LanguageModel:
    """Return `target.with_features(layers)` from a cache, so that equal arguments reuse the same compiled programs."""
    assert target.with_features is not None
    return target.with_features(layers)
