"""A draft model or an EAGLE-3 head that learns from its failures between batches, and forgets nothing for it.

Source: OSD (2310.07177): cross-entropy to the target's distribution at the positions where drafts were rejected. The
buffer on the device holds texts and one bit per token. The target's distributions there are computed again: one forward
over a text costs its prefill, and top entries would take as many numbers per token as are kept of them.

R rows of the buffer, B rows of a batch, T tokens of a row, K tokens of a draft, V vocabulary. Oracle: a count by hand
of the steps of a run (tests/lab/training/test_online.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.core import struct
from mars_jax.core.errors import MarsError
from mars_jax.core.types import CORRECTED, LanguageModel, PyTree
from mars_jax.lab.training import online_eagle
from mars_jax.lab.training.objectives import predict
from mars_jax.models.heads import HeadConfig

HEADS: dict[str, Any] = {"eagle": online_eagle}
"""Modules by which heads learn here, by `HeadConfig.kind`; these and language models are `specs.REFINED`."""


@struct.dataclass(kw_only=True)
class Failures:
    """Texts and where their drafts were rejected, the latest R of them; on the device."""

    tokens: Array  # i32[R, T]
    length: Array  # i32[R]; 0 of a row that holds nothing yet
    rejected: Array  # bool[R, T]; of a token: the draft had another one here
    place: Array  # i32[]; where the next one goes


def no_failures(rows: int = 64, width: int = 256) -> Failures:
    """A buffer for `rows` texts of up to `width` tokens.

    >>> no_failures(4, 16).tokens.shape
    (4, 16)
    """
    return Failures(
        tokens=jnp.zeros((rows, width), jnp.int32),
        length=jnp.zeros((rows,), jnp.int32),
        rejected=jnp.zeros((rows, width), bool),
        place=jnp.int32(0),
    )


def rejected_places(kind: Array, depth: int, first: Array) -> Array:
    """Which tokens stand where a draft was rejected: bool[B, T] of kinds i32[B, T], as `TokenRecord` has them, and of
    the place i32[B] of the first new one.

    A token that ends a step is a bonus where K = `depth` tokens were accepted before it, and else a correction. A place
    where nothing was drafted counts as a correction too.

    >>> rejected_places(jnp.asarray([[-1, 0, 2, 0, 0, 2, 2]]), 2, jnp.asarray([1])).astype(int).tolist()
    [[0, 0, 1, 0, 0, 0, 1]]
    """
    index = jnp.arange(kind.shape[1], dtype=jnp.int32)[None]
    ends = kind == CORRECTED
    last = jax.lax.cummax(jnp.where(ends, index, -1), axis=1)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    before = jnp.maximum(before, first[:, None] - 1)
    return ends & (index - before - 1 < depth)


def add_failures(
    buffer: Failures, tokens: Array, prompt_length: Array, length: Array, kind: Array, depth: int
) -> Failures:
    """The buffer with the texts of a batch, such as a final `DecodeState` and its `DecodeStats.tokens` have them; pure.

    Args:
      tokens: i32[B, T] of the buffer's width T or less, prompts with what was said.
      prompt_length, length: i32[B].
      kind: i32[B, T]; of each token.
      depth: K, the drafter's.
    """
    batch, width = tokens.shape
    rows, room = buffer.tokens.shape
    spread = rejected_places(kind, depth, prompt_length)
    index = jnp.arange(width, dtype=jnp.int32)[None]
    spread &= (index >= prompt_length[:, None]) & (index < length[:, None])
    at = (buffer.place + jnp.arange(batch, dtype=jnp.int32)) % rows

    def wide(x: Array) -> Array:
        return jnp.pad(x, ((0, 0), (0, room - width)))

    return Failures(
        tokens=buffer.tokens.at[at].set(wide(tokens)),
        length=buffer.length.at[at].set(length),
        rejected=buffer.rejected.at[at].set(wide(spread)),
        place=(buffer.place + batch) % rows,
    )


class Refined(NamedTuple):
    """The result of a refinement."""

    params: PyTree  # of the draft: the new ones, or the old ones where it was rolled back
    kept: bool
    loss: float  # nats per rejected token, of the last step
    before: float  # expected tau on the held-out texts
    after: float


class Refiner:
    """Updates of a draft model or an EAGLE-3 head from its failures, with a guard.

    The updates of `refine` may not bring the expected tau on held-out texts below a share of the first one that was
    measured, however many they are; where they do, weights and optimizer go back to what they were. Where the target's
    own change has brought it there, they may not lower it further. Old texts, trained on at every position beside the
    failures, keep what the draft knew.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | HeadConfig,
        params: PyTree,
        *,
        depth: int,
        held_out: Sequence[Sequence[int]],
        target_params: PyTree,
        old: Sequence[Sequence[int]] = (),
        optimizer: Any = None,
        rows: int = 64,
        width: int = 256,
        batch_size: int = 8,
        fall: float = 0.03,
        temperature: float = 0.0,
        seed: int = 0,
    ):
        """
        Args:
          target, draft: of one vocabulary; of an EAGLE-3 head its config, as `hub.load_eagle` gives it.
          params: of the draft; what `refine` gives has their dtypes, so nothing that decodes compiles again.
          depth: K of the chain that is drafted.
          held_out: token ids of texts that are never trained on.
          target_params: as they are now; `refine` takes those of later updates.
          old: token ids of texts of what the draft is to remember.
          optimizer: of optax; default: adamw(3e-4), gradients clipped at norm 1.
          rows, width: of the buffer; texts are cut to the width.
          batch_size: texts of an update, and as many old ones beside them.
          fall: share of the first held-out tau that may be lost.
          temperature: at which tau is expected: 0 compares best tokens, above it distributions.
          seed: of which texts come when.

        Raises:
          MarsError: vocabularies differ, there are no held-out texts, an EAGLE-1 head, or a number is out of range.
        """
        import optax

        if isinstance(draft, LanguageModel) and target.vocab_size != draft.vocab_size:
            raise MarsError(
                f"the draft has a vocabulary of {draft.vocab_size} tokens and the target one of {target.vocab_size}: "
                "refine a draft of the same size."
            )
        if not len(held_out):
            raise MarsError("there are no held-out texts: give some, or nothing guards against forgetting.")
        if depth < 1 or batch_size < 1 or fall < 0:
            raise MarsError(
                f"depth is {depth}, batch_size {batch_size} and fall {fall}: give at least 1, 1 and 0."
            )
        self.failures = no_failures(rows, width)
        self._depth, self._batch, self._fall, self._width = depth, batch_size, fall, width
        self._rng = np.random.default_rng(seed)
        self._ids = None
        how = HEADS[draft.kind] if isinstance(draft, HeadConfig) else None
        if how is not None:
            target = how.with_layers(draft, target)
            params, self._ids = how.without_ids(params)
        self._dtypes = jax.tree.map(lambda x: x.dtype, params)
        # Updates smaller than a step of bfloat16 add up in float32.
        self._params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
        self._optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        self._state = self._optimizer.init(self._params)
        self._old = _padded(old, width) if len(old) else None
        self._held_out = _padded(held_out, width)
        if how is not None:
            self._update = how.updater(draft, target, depth, self._optimizer)
            self._expected = how.measurer(draft, target, depth, temperature)
        else:
            self._update = _updater(target, draft, self._optimizer)
            self._expected = _measurer(target, draft, depth, temperature)
        self._first = self.expected_tau(target_params)

    def expected_tau(self, target_params: PyTree, texts: Sequence[Sequence[int]] | None = None) -> float:
        """Expected tau of a chain of K on given texts, by default the held-out ones, with the weights as they are."""
        tokens, length = self._held_out if texts is None else _padded(texts, self._width)
        found = [
            self._expected(
                self._params,
                self._ids,
                target_params,
                tokens[i : i + self._batch],
                length[i : i + self._batch],
            )
            for i in range(0, len(tokens), self._batch)
        ]
        total = np.sum([np.asarray(pair) for pair in found], axis=0)
        return float(total[0] / max(total[1], 1))

    def see(self, tokens: Array, prompt_length: Array, length: Array, kind: Array) -> None:
        """Take the texts of a batch into the buffer; arrays on the device, as for `add_failures`."""
        self.failures = _add(self.failures, tokens, prompt_length, length, kind, self._depth)

    def see_completions(self, completions: Iterable[Any]) -> None:
        """Take completions into the buffer that were decoded with `log_probs=True`.

        Raises:
          MarsError: they were not.
        """
        numbers = {"exact": 0, "relaxed": 1, "corrected": CORRECTED, "trusted": 3}
        texts, prompts, kinds = [], [], []
        for completion in completions:
            if completion.log_probs is None:
                raise MarsError(
                    "the completions do not say what their tokens were: decode with log_probs=True."
                )
            prompt = list(completion.request.prompt_tokens)
            texts.append([*prompt, *completion.tokens])
            prompts.append(min(len(prompt), self._width))
            kinds.append([numbers[name] for name in completion.log_probs.kind])
        if not texts:
            return
        tokens, length = _padded(texts, self._width)
        kind = np.full(tokens.shape, -1, np.int32)
        for row, own in enumerate(kinds):
            first = prompts[row]
            kept = own[: self._width - first]
            kind[row, first : first + len(kept)] = kept
        self.see(jnp.asarray(tokens), jnp.asarray(prompts, jnp.int32), jnp.asarray(length), jnp.asarray(kind))

    def refine(self, target_params: PyTree, steps: int = 8) -> Refined:
        """Update the draft, and roll back where the held-out tau fell; see the class.

        Args:
          target_params: as they decode now.
          steps: updates, each of `batch_size` texts of the buffer.

        Returns:
          The params to draft with, and what became of it. An empty buffer changes nothing.
        """
        old_params, old_state = self._params, self._state
        before = self.expected_tau(target_params)
        filled = np.flatnonzero(np.asarray(self.failures.length))
        loss = jnp.float32(0)
        for _ in range(steps if len(filled) else 0):
            rows = jnp.asarray(self._rng.choice(filled, self._batch), jnp.int32)
            tokens, wanted = _lessons(self.failures, rows, self._old_rows())
            self._params, self._state, loss = self._update(
                self._params, self._ids, self._state, target_params, tokens, wanted
            )
        after = self.expected_tau(target_params)
        kept = bool(np.isfinite(after)) and after >= min((1 - self._fall) * self._first, before)
        if not kept:
            self._params, self._state = old_params, old_state
        return Refined(self.params, kept, float(loss), before, after)

    def warm_up(self, target_params: PyTree) -> None:
        """Compile what `refine` runs, so that a time that is told holds no compilation; it changes nothing."""
        rows = jnp.zeros((self._batch,), jnp.int32)
        tokens, wanted = _lessons(self.failures, rows, self._old_rows())
        jax.block_until_ready(
            self._update(self._params, self._ids, self._state, target_params, tokens, wanted)
        )

    def _old_rows(self) -> tuple[Array, Array]:
        tokens, length = self._old or (self._held_out[0][:1], np.zeros(1, np.int32))
        chosen = self._rng.integers(0, len(tokens), self._batch)
        return jnp.asarray(tokens[chosen]), jnp.asarray(length[chosen])

    @property
    def params(self) -> PyTree:
        """Weights of the draft, in the dtypes that it had."""
        trained = jax.tree.map(lambda x, dtype: x.astype(dtype), self._params, self._dtypes)
        return trained if self._ids is None else trained | {"ids": self._ids}


_add = jax.jit(add_failures, static_argnums=5)


def _padded(texts: Sequence[Sequence[int]], width: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens i32[n, width], lengths i32[n]) of texts, cut to the width."""
    tokens, length = np.zeros((len(texts), width), np.int32), np.zeros(len(texts), np.int32)
    for row, text in enumerate(texts):
        kept = list(text)[:width]
        tokens[row, : len(kept)], length[row] = kept, len(kept)
    return tokens, length


def _segments(tokens: Array) -> Array:
    return jnp.zeros(tokens.shape, jnp.int32)  # padding comes last, so that no token sees it


@jax.jit
def _lessons(failures: Failures, rows: Array, old: tuple[Array, Array]) -> tuple[Array, Array]:
    """(tokens i32[2 b, T], the ones that are learned bool[2 b, T]) of rows of the buffer and of old texts."""
    index = jnp.arange(failures.tokens.shape[1], dtype=jnp.int32)[None]
    texts = jnp.concatenate([failures.tokens[rows], old[0]])
    # Of failures the rejected tokens; of old texts all but the first.
    return texts, jnp.concatenate([failures.rejected[rows], (index > 0) & (index < old[1][:, None])])


@functools.lru_cache
def _updater(target: LanguageModel, draft: LanguageModel, optimizer: Any) -> Callable[..., Any]:
    """One update, compiled once."""
    import optax

    def update(
        params: PyTree, _: None, state: Any, target_params: PyTree, texts: Array, wanted: Array
    ) -> Any:
        weight = wanted[:, 1:].astype(jnp.float32)
        teacher = jax.nn.softmax(predict(target, target_params, texts, _segments(texts))[:, :-1])

        def loss(params: PyTree) -> Array:
            log_q = jax.nn.log_softmax(predict(draft, params, texts, _segments(texts))[:, :-1])
            return jnp.sum(-jnp.sum(teacher * log_q, axis=-1) * weight) / jnp.maximum(jnp.sum(weight), 1.0)

        value, gradient = jax.value_and_grad(loss)(params)
        change, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, change), state, value

    return jax.jit(update)


@functools.lru_cache
def _measurer(
    target: LanguageModel, draft: LanguageModel, depth: int, temperature: float
) -> Callable[..., Any]:
    """(sum over positions of the expected tau of a chain that begins there, how many positions)."""

    def measure(
        params: PyTree, _: None, target_params: PyTree, tokens: Array, length: Array
    ) -> tuple[Array, Array]:
        z = predict(target, target_params, tokens, _segments(tokens))
        y = predict(draft, params, tokens, _segments(tokens))
        if temperature == 0:
            accept = (jnp.argmax(z, -1) == jnp.argmax(y, -1)).astype(jnp.float32)
        else:
            accept = jnp.sum(
                jnp.minimum(jax.nn.softmax(z / temperature), jax.nn.softmax(y / temperature)), axis=-1
            )
        index = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        # Positions whose whole chain is inside of the text.
        valid = index + depth < length[:, None]
        tau, reach = jnp.ones_like(accept), jnp.ones_like(accept)
        for ahead in range(depth):
            reach = reach * jnp.pad(accept[:, ahead:], ((0, 0), (0, ahead)))
            tau = tau + reach
        return jnp.sum(jnp.where(valid, tau, 0.0)), jnp.sum(valid)

    return jax.jit(measure)
