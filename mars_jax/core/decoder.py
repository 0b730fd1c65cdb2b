"""The decoder: pure functions of a state that combine a target, a drafter and a rule. Start here.

B batch, N nodes, D depth, T token buffer, V vocabulary. Oracle: greedy autoregression of the same model, token for
token (tests/core/test_decode.py).
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
    """A target, a drafter and the structure of a rule, from `speculative_decoder`.

    Its methods are pure: jit and donate at the outermost edge, or use `run`, `stream`, `refill` and `extend`. Equal
    decoders share compiled programs, so a decoder may be rebuilt wherever it is needed.

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
    rule_structure: Structure  # static part of the rule; its parameters are in the state
    prefill_chunk: int | None = None  # prompt tokens per forward of the target; see `prefill.chunk_of`
    top_log_probs: int = 0  # number of most probable tokens that `StepInfo.top` reports; 0: no `top`

    @property
    def max_depth(self) -> int:
        """D: a step adds 1 to D + 1 tokens to a row."""
        return self.drafter.max_depth

    @property
    def vocab_size(self) -> int:
        """V of the target."""
        return self.target.vocab_size

    def init(self, params: Params, prompts: Prompts) -> DecodeState:
        """Create a state by reading prompts. Their width is T, the token buffer for prompt and output together.

        Raises:
          MarsError: see `checked`.
        """
        check_params(params)
        return by_rows(self._read)(params, self.checked(prompts))

    def step(self, params: Params, state: DecodeState) -> tuple[DecodeState, StepInfo]:
        """Advance every live row by 1 to D + 1 tokens: propose, score, judge, update, emit, commit.

        Raises:
          MarsError: `params` is not a `Params`, or `state` is not a `DecodeState` or was created under a different
            rule.
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
        """Restart some rows of a running state with new prompts; the other rows stay bitwise unchanged.

        Args:
          params, state: of this decoder; the state has B rows.
          rows: i32[b]; the row for each prompt, each at most once, or -1 for none. On a mesh with data=d, both `rows`
            and the state are split into d equal parts, and the i-th part of `rows` may only contain rows in the i-th
            part of the state.
          prompts: b prompts, at most T wide.
          read: a state of b rows that has already read these prompts; only on a mesh that does not shard rows.

        Raises:
          MarsError: see `checked`; or rows are out of range or repeated, or a state belongs to a different decoder.
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
        # Map -1 to the index past the end, which scatter drops.
        return self._put(
            state, jnp.where(rows < 0, rows_of(state), rows), begun(prompts, read.cache, read.draft)
        )

    def extend(self, params: Params, state: DecodeState, prompts: Prompts) -> tuple[DecodeState, Array]:
        """Continue every row with a new prompt, such as a conversation with one more turn.

        The longest common prefix of a row's committed tokens and its new prompt stays in the caches, and only the
        tokens after it are read. Callers therefore need not mark the new part. If a chat template renders an earlier
        turn differently, the prefix is shorter. A key or value depends only on its own and earlier tokens, so the state
        equals that of `init` up to rounding.

        Args:
          params, state: of this decoder; the state has B rows.
          prompts: one for each row, at most T wide: the full token sequence, including the part that was already read.

        Returns:
          The state, and i32[B], the number of tokens read from each prompt.

        Raises:
          MarsError: see `checked`; or the state belongs to a different decoder.
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
        """Check prompts, broadcast the rule's parameters to rows, and copy all arrays, since loops donate the state.

        Raises:
          MarsError: the rule has a different structure, the keys' generator is not that of `keys_from_seeds`, or arrays
            have the wrong shape or dtype. If values are concrete: a length is outside 1 .. t, or a token is outside the
            vocabulary; see `core.given`.
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
        # Draft a tree of cheap guesses whose root, node 0, is the last committed token.
        tree, draft = propose(self.drafter, params, state, conditions, draft_keys)
        nodes = conditions.at(tree)
        # One forward of the target gives p(. | the tokens up to node i) for every node i at once.
        scores = score_tree(self.drafter, self.target, params, state, tree, nodes)
        # Walk down from the root to the last accepted node. A correction or bonus token follows it.
        verdict, rule, num_trusted = judge(params, state, tree, scores, nodes, verify_keys)
        # A drafter that reads the target gets the target's output over the tree, and keeps the accepted path's part.
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
        # The forward has cached the whole tree; move the accepted path to where a chain would have been written.
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
            # Cache [0, length - 1): the prompt's last token is the root of the first step, and that step caches it.
            jnp.zeros_like(prompts.length),
            prompts.length - 1,
            # The N nodes of a draft are written from slot `length - 1` on, even when the buffer is full.
            self.target.init_cache(batch, buffer + self.drafter.num_nodes),
            self._init_draft(params, prompts.tokens, prompts.length),
            observing(self.drafter, params, prompts.tokens, prompts.length),
            chunk=self.prefill_chunk,
        )
        return begun(prompts, cache, draft)

    def _init_draft(self, params: Params, tokens: Array, length: Array) -> PyTree:
        """Return the drafter's state before it has read its target."""
        if self.target.for_chains is not None and self.drafter.reads is not None:
            # A window of a recurrent target may end past the buffer (see `prefill`), and a head reads whole windows.
            tokens = jnp.pad(tokens, ((0, 0), (0, self.target.prefill_chunk or chunk_of())))
        return self.drafter.init(params, tokens, length)

    def _read_into(self, params: Params, state: DecodeState, rows: Array, prompts: Prompts) -> DecodeState:
        """Read prompts into rows i32[b] of the state."""
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
        """Implement `extend` for prompts as wide as the token buffer."""
        tokens, length = prompts.tokens, prompts.length
        self._check_cache(state)
        check_same("draft", state.draft, jax.eval_shape(self._init_draft, params, tokens, length))
        # i32[B]: the length of the longest common prefix of the committed tokens and the new prompt.
        position = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        # Past its length, either buffer holds garbage.
        is_same = (tokens == state.tokens) & (position < jnp.minimum(state.length, length)[:, None])
        num_common = leading(is_same)
        # A draft head's entry for the last common token depends on the token after it, so a coupled drafter rereads
        # that one token.
        reread = int(self.drafter.reads is not None)
        # The last committed token is not cached. Nor will be the prompt's last token, which is the root of the next
        # step. So keep the target's cache up to `first_unread`, and read [first_unread, length - 1).
        first_unread = jnp.minimum(num_common - reread, jnp.minimum(state.length - 1, length - 1 - reread))
        first_unread = jnp.maximum(first_unread, 0)
        if self.target.keep is not None:
            first_unread = self.target.keep(state.cache, first_unread)
        # A draft model's cache lags by one more token, because draft models feed their last two tokens in every step.
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
        """Put the rows of `new` into rows i32[b] of the state; indices past the end are dropped."""
        self._check_cache(state)
        for name in ("tokens", "draft", "rule"):
            check_same(name, getattr(state, name), getattr(new, name), rows=False)
        # Only the target knows the layout of its cache. All other leaves are [B, ...].
        cache = self.target.put(state.cache, rows, new.cache)
        state_without_cache = dataclasses.replace(state, cache=())
        state_without_cache = kv_cache.put_rows(state_without_cache, rows, dataclasses.replace(new, cache=()))
        return dataclasses.replace(state_without_cache, cache=cache)

    def _check_state(self, state: DecodeState) -> None:
        """Raise MarsError unless `state` is a `DecodeState` whose rule has this decoder's structure."""
        rows_of(state)
        if structure(state.rule) != self.rule_structure:
            raise other_decoder("rule")

    def _check_cache(self, state: DecodeState) -> None:
        batch, buffer = state.tokens.shape
        # `eval_shape` allocates nothing.
        expected = jax.eval_shape(lambda: self.target.init_cache(batch, buffer + self.drafter.num_nodes))
        check_same("cache", state.cache, expected)


def _pad_tokens(prompts: Prompts, buffer: int) -> Prompts:
    """Widen the prompts to the token buffer."""
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
    """Build a speculative decoder (Leviathan et al. 2211.17192) from any drafter and any rule.

    Only the structure of `verify` is used: rules that differ only in parameters give equal decoders. The parameters are
    passed in `Prompts`.

    Args:
      target: the model to sample from.
      drafter: proposes the draft trees; `drafters.none()` for plain autoregression.
      verify: the rule, which decides how much of a draft is accepted; see `mars_jax.verify`.
      prefill_chunk: prompt tokens per prefill forward of the target. Default: `target.prefill_chunk`, or else
        `prefill.chunk_of` for the backend. A draft model uses its own `prefill_chunk`.
      top_log_probs: number of the target's most probable tokens that each step reports as `StepInfo.top`.

    Raises:
      MarsError: the drafter's vocabulary differs from the target's, or it needs features that the target does not
        provide; the target has recurrent layers and the drafter drafts trees; `verify` is not a rule; prefill_chunk
        is below 1; top_log_probs is below 0, or above `TOP_LOG_PROBS` or the vocabulary.

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
                "this target gives none: set LanguageModel.with_features."
            )
        target = _with_features(target, drafter.reads)
    if target.for_chains is not None:
        check_recurrent(drafter)
        target = target.for_chains(drafter.num_nodes, prefill_chunk)
    return Decoder(target, drafter, structure(verify), prefill_chunk, top_log_probs)


@functools.lru_cache(maxsize=64)
def _with_features(target: LanguageModel, layers: tuple[int, ...]) -> LanguageModel:
    """Return the same object for equal arguments, so that compiled programs are reused."""
    assert target.with_features is not None
    return target.with_features(layers)
