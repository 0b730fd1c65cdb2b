"""Online refinement: between batches, a draft model or an EAGLE-3 head is trained on its rejected drafts.

Source: OSD (2310.07177). The loss is the cross-entropy with the target's distribution at positions where draft tokens
were rejected. For an EAGLE-3 head, it covers every step of the chains at these positions. B rows, T tokens, n
positions, K draft tokens, V vocabulary.
Tested against the verdicts of a run's steps (tests/lab/training/test_online.py).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from mars_jax import hub
from mars_jax.contrib.teaching import Batch, Loss, predict, teach
from mars_jax.core.types import LanguageModel, Params, PyTree
from mars_jax.drafters import LoadedDrafter
from mars_jax.drafters.registry import parse_draft
from mars_jax.drafters.shared_tokens import Shared
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.training.data import documents
from mars_jax.lab.training.eagle_training import drafted_ahead, eagle3, entries
from mars_jax.lab.training.loop import make_step
from mars_jax.lab.training.objectives import cast, masked_mean, with_ids
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.serve.queue import Queue
from mars_jax.serve.requests import Completion
from mars_jax.utils.errors import MarsError

BATCH = 8
"""Number of new documents, and number of old documents, per gradient step."""
EVERY, STEPS = 32, 8
"""Default number of completions between two updates of `--refine`, and number of gradient steps per update."""
HELD_OUT, WIDTH = 16, 256
"""Maximum number of held-out documents of `--refine`, and maximum number of tokens per document."""


class Refined(NamedTuple):
    """The result of a refinement."""

    params: PyTree  # params of the draft: the updated ones, or the old ones after a rollback
    kept: bool
    loss: float  # nats per rejected token, at the last step
    before: float  # expected tau on the held-out documents before the update
    after: float  # the same after the update, before any rollback


class Learner(NamedTuple):
    """Functions that compute the loss and the acceptance of one kind of drafter."""

    loss: Loss  # its batch marks the tokens to learn
    # (params, target params, tokens) -> K arrays f32[B, n]: probability that draft j of a chain is accepted
    acceptance: Callable[..., Sequence[Array]]
    ahead: int  # position t of these arrays refers to token t + ahead


def rejected_places(kinds: Sequence[str], depth: int) -> list[bool]:
    """Return which tokens replaced a rejected draft token, given the kind of each (`LogProbs.kind`) and K = `depth`.

    A token that ends a step is a bonus token if K draft tokens were accepted before it, and otherwise a correction. A
    token for which nothing was drafted also counts as a correction.

    >>> rejected_places(["exact", "corrected", "exact", "exact", "corrected", "corrected"], 2)
    [False, True, False, False, False, True]
    """
    is_rejected, num_accepted = [], 0
    for kind in kinds:
        ends_step = kind == "corrected"
        is_rejected.append(ends_step and num_accepted < depth)
        num_accepted = 0 if ends_step else num_accepted + 1
    return is_rejected


class Refiner:
    """Training of a draft model or an EAGLE-3 head on its rejected drafts, with a guard against forgetting.

    The expected tau on held-out documents must not fall below a given share of its initial value. An update that lowers
    it below that share is rolled back, including the state of the optimizer. If a change in the target has already
    lowered tau below that share, an update must not lower it further. To preserve earlier knowledge, the draft is also
    trained on old documents, at every position.
    """

    def __init__(
        self,
        target: LanguageModel,
        draft: LanguageModel | EagleConfig,
        params: PyTree,
        *,
        depth: int,
        held_out: Sequence[Sequence[int]],
        target_params: PyTree,
        old: Sequence[Sequence[int]] = (),
        optimizer: optax.GradientTransformation | None = None,
        rows: int = 64,
        width: int = 256,
        fall: float = 0.03,
        temperature: float = 0.0,
        seed: int = 0,
    ):
        """
        Args:
          target, draft: models with the same vocabulary. For an EAGLE-3 head, `draft` is its config from
            `hub.load_eagle`.
          params: params of the draft. `refine` returns params of the same dtypes, so that decoding programs are not
            recompiled.
          depth: K, the length of a drafted chain.
          held_out: token ids of documents that are never trained on.
          target_params: the current target params; pass later ones to `refine`.
          old: token ids of documents that the draft should not forget.
          optimizer: an optax optimizer; default: adamw(3e-4) with gradients clipped to norm 1.
          rows, width: the latest `rows` completions are stored, each truncated to `width` tokens.
          fall: share of the initial held-out tau that may be lost.
          temperature: temperature for the expected tau; at 0, tau depends only on the most probable tokens.
          seed: seed that determines the order of the documents.

        Raises:
          MarsError: the vocabularies differ, there are no held-out documents, or the draft is an EAGLE-1 head.
        """
        if not len(held_out):
            raise MarsError("there are no held-out texts, which guard against forgetting: pass at least one.")
        self._ids: Array | None = None
        if isinstance(draft, EagleConfig):
            # Exclude token ids, which are integers without a gradient, from the params.
            params = dict(params)
            self._ids = params.pop("ids", None)
            learner = _head_learner(target, draft, self._ids, depth, temperature)
        else:
            learner = _model_learner(target, draft, depth, temperature)
        self._texts: collections.deque[tuple[list[int], list[bool]]] = collections.deque(maxlen=rows)
        self._depth, self._width, self._fall = depth, width, fall
        self._random = np.random.default_rng(seed)
        self._dtypes = jax.tree.map(lambda x: x.dtype, params)
        # Keep float32 params, so that updates below the resolution of bfloat16 accumulate.
        self._params = cast(params, jnp.float32)
        optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4))
        self._state = optimizer.init(self._params)
        # Without old documents, train on an empty one, which adds nothing to the loss.
        self._held_out, self._old = list(held_out), list(old) or [[]]
        # The step must not overwrite the old weights, because `refine` may restore them.
        self._update = make_step(learner.loss, optimizer, donates=False)
        self._measure = jax.jit(functools.partial(_measure, learner))
        self._first = self.expected_tau(target_params)

    @property
    def params(self) -> PyTree:
        """The weights of the draft, in their original dtypes."""
        params = jax.tree.map(lambda x, dtype: x.astype(dtype), self._params, self._dtypes)
        return with_ids(params, self._ids)

    def expected_tau(self, target_params: PyTree) -> float:
        """Return the expected tau of a K-token chain on the held-out documents, with the current weights."""
        tokens = _padded(self._held_out, self._width)
        lengths = np.asarray([min(len(text), self._width) for text in self._held_out], np.int32)
        # The sum of tau over the chains, and the number of chains.
        sums = np.zeros(2)
        for first in range(0, len(tokens), BATCH):
            rows = slice(first, first + BATCH)
            sums += jax.device_get(self._measure(self._params, target_params, tokens[rows], lengths[rows]))
        return float(sums[0] / max(sums[1], 1))

    def see_completions(self, completions: Iterable[Completion]) -> None:
        """Store completions that were decoded with `log_probs=True`.

        Raises:
          MarsError: the completions have no log-probabilities.
        """
        for completion in completions:
            if completion.log_probs is None:
                raise MarsError("the completions have no log-probabilities: decode with log_probs=True.")
            prompt = list(completion.request.prompt_tokens)
            is_rejected = rejected_places(completion.log_probs.kind, self._depth)
            self._texts.append(([*prompt, *completion.tokens], [False] * len(prompt) + is_rejected))

    def refine(self, target_params: PyTree, steps: int = 8) -> Refined:
        """Update the draft, and roll back if the held-out tau fell too far; see the class.

        Args:
          target_params: the params that are currently used for decoding.
          steps: number of updates, each on `BATCH` completions and as many old documents. Without completions there is
            no update.
        """
        old_params, old_state = self._params, self._state
        tau_before = self.expected_tau(target_params)
        figures = {"loss": 0.0}
        if self._texts:
            for _ in range(steps):
                self._params, self._state, figures = self._update(
                    self._params, self._state, self._lessons(), target_params
                )
        tau_after = self.expected_tau(target_params)
        # If the target has changed, tau may have been below this share of its initial value even before the update.
        least_tau = min((1 - self._fall) * self._first, tau_before)
        is_kept = math.isfinite(tau_after) and tau_after >= least_tau
        if not is_kept:
            self._params, self._state = old_params, old_state
        return Refined(self.params, is_kept, float(figures["loss"]), tau_before, tau_after)

    def warm_up(self, target_params: PyTree) -> None:
        """Compile everything that `refine` runs, so that measured times exclude compilation."""
        empty_rows = [[]] * (2 * BATCH)
        batch = _batch(empty_rows, empty_rows, self._width)
        jax.block_until_ready(self._update(self._params, self._state, batch, target_params))

    def _lessons(self) -> Batch:
        """Draw the 2 * BATCH rows of a training step."""
        lessons = [self._texts[i] for i in self._random.choice(len(self._texts), BATCH)]
        for _ in range(BATCH):
            text = self._old[self._random.integers(len(self._old))]
            # Train on every token except the first, which no position predicts.
            lessons.append((list(text), [position > 0 for position in range(len(text))]))
        texts, masks = zip(*lessons, strict=True)
        return _batch(texts, masks, self._width)


def _batch(texts: Sequence[Sequence[int]], masks: Sequence[Sequence[bool]], width: int) -> Batch:
    """Return a batch of documents in which `masks` marks the tokens to learn."""
    tokens = jnp.asarray(_padded(texts, width))
    return Batch(tokens, jnp.zeros_like(tokens), jnp.asarray(_padded(masks, width), bool))


def _padded(rows: Sequence[Sequence[int]], width: int) -> np.ndarray:
    """Return rows i32[B, T], padded or truncated to T tokens. Padding comes last, so no token attends to it."""
    padded_rows = np.zeros((len(rows), width), np.int32)
    for padded_row, row in zip(padded_rows, rows, strict=True):
        padded_row[: len(row)] = row[:width]
    return padded_rows


def _measure(
    learner: Learner, params: PyTree, teacher: PyTree, tokens: Array, lengths: Array
) -> tuple[Array, Array]:
    """Sum the expected tau of the chains from all positions, and count these chains."""
    acceptance = learner.acceptance(params, teacher, tokens)
    # tau = 1 + a_1 + a_1 a_2 + ... The product so far is the probability that the chain is accepted that far.
    tau = reach_prob = jnp.float32(1)
    for j, accept in enumerate(acceptance):
        # Draft j of the chain that begins at t is at position t + j.
        reach_prob = reach_prob * jnp.pad(accept[:, j:], ((0, 0), (0, j)))
        tau = tau + reach_prob
    # Count only chains that lie inside the document.
    position = jnp.arange(tau.shape[1], dtype=jnp.int32)[None]
    chain_fits = position + len(acceptance) + learner.ahead - 1 < lengths[:, None]
    return jnp.sum(jnp.where(chain_fits, tau, 0.0)), jnp.sum(chain_fits)


def _agreement(z: Array, y: Array, temperature: float) -> Array:
    """Return the probability that a token drafted from logits y f32[..., V] is accepted under the target's logits z."""
    # Greedy verification accepts a token if the best tokens of target and draft agree. Rejection sampling accepts a
    # token with probability sum(min(p, q)).
    if temperature == 0:
        return (jnp.argmax(z, -1) == jnp.argmax(y, -1)).astype(jnp.float32)
    return jnp.sum(jnp.minimum(jax.nn.softmax(z / temperature), jax.nn.softmax(y / temperature)), axis=-1)


def _model_learner(target: LanguageModel, draft: LanguageModel, depth: int, temperature: float) -> Learner:
    if target.vocab_size != draft.vocab_size:
        raise MarsError(
            f"the draft has a vocabulary of {draft.vocab_size} tokens and the target one of {target.vocab_size}: "
            "refine a draft of the same size."
        )

    def loss(params: PyTree, batch: Batch, teacher: PyTree) -> tuple[Array, dict[str, Array]]:
        # Position t predicts token t + 1, so the mask of the tokens is shifted by one.
        p = jax.nn.softmax(predict(target, teacher, batch.tokens, batch.segments)[:, :-1])
        draft_logits = predict(draft, params, batch.tokens, batch.segments)[:, :-1]
        return masked_mean(optax.softmax_cross_entropy(draft_logits, p), batch.wanted[:, 1:]), {}

    def acceptance(params: PyTree, teacher: PyTree, tokens: Array) -> Sequence[Array]:
        segments = jnp.zeros_like(tokens)
        z = predict(target, teacher, tokens, segments)
        return [_agreement(z, predict(draft, params, tokens, segments), temperature)] * depth

    return Learner(loss, acceptance, ahead=1)


def _head_learner(
    target: LanguageModel, config: EagleConfig, ids: Array | None, depth: int, temperature: float
) -> Learner:
    config.check_target(target)
    if config.version != 3:
        raise MarsError(
            "an EAGLE-1 head learns features and not tokens, so it cannot be refined: train it by `mars-jax distill`."
        )
    assert target.with_features is not None  # `drafters.eagle` refuses such a target
    model = target.with_features(config.feature_layers)
    # Compute the loss in float32, because updates are small. The batches are small too, so this is fast enough.
    loss = eagle3(config, model, ids=ids, steps=depth, dtype="float32")

    def acceptance(params: PyTree, teacher: PyTree, tokens: Array) -> Sequence[Array]:
        pair = Params(target=teacher, draft=with_ids(params, ids))
        segments = jnp.zeros_like(tokens)
        lesson = teach(model, teacher, Batch(tokens, segments))
        target_logits = lesson.logits[:, 1:]
        output = entries(lesson.output, target_logits.shape[1])
        drafts = drafted_ahead(config, model, pair, output, tokens, segments, depth)
        return [_agreement(target_logits, config.widen(pair, drafted), temperature) for drafted, _ in drafts]

    return Learner(loss, acceptance, ahead=2)


def open_refiner(
    file: str, target: Pretrained, draft: str, drafter: LoadedDrafter, *, dtype: str | None, samples: bool
) -> Refiner:
    """Create the `Refiner` for `--refine`.

    Args:
      file: a file of documents separated by lines of <|endoftext|>. Some documents are held out.
      target, drafter: the loaded pair.
      draft: the spec of the drafter, whose kind must have the property `learns`.
      dtype: dtype in which the drafter was loaded.
      samples: whether any request has a temperature above 0.

    Raises:
      MarsError: the file holds fewer than two documents, or the draft has a different tokenizer.
    """
    width = min(WIDTH, target.config.max_positions)
    token_lists = [target.encode(text)[:width] for text in documents(file)]
    if len(token_lists) < 2:
        raise MarsError(
            f"--refine is {file}, which holds {len(token_lists)} texts: give at least 2, one to hold out and one to "
            "learn, with a line of <|endoftext|> between them."
        )
    params = drafter.params if drafter.sizes is None else drafter.params.weights
    if isinstance(params, Shared):
        raise MarsError(
            f"--refine does not apply to --draft {draft}, which has another tokenizer than the target: leave it out."
        )
    kind, path = parse_draft(draft)
    if kind == "eagle":
        draft_model, _ = hub.load_eagle(path, target.config, target.params, dtype=dtype)
    else:
        draft_model = hub.load(path, dtype=dtype).model
    # Hold out at most half of the documents, spread evenly over the file.
    spacing = max(len(token_lists) // HELD_OUT, 2)
    held_out = range(0, len(token_lists), spacing)[:HELD_OUT]
    return Refiner(
        target.model,
        draft_model,
        params,
        depth=drafter.drafter.max_depth,
        held_out=[token_lists[i] for i in held_out],
        old=[text for i, text in enumerate(token_lists) if i not in held_out],
        target_params=target.params,
        width=width,
        temperature=1.0 if samples else 0.0,
    )


class Refining:
    """Refinement of a queue's draft after every --refine-every completions.

    Refinement needs log-probabilities. They are removed from the completions if the user did not request them.
    """

    def __init__(
        self, args: argparse.Namespace, target: Pretrained, drafter: LoadedDrafter, *, samples: bool
    ):
        """Create the refiner for the flags of `generate`; see `open_refiner`."""
        self._refiner = open_refiner(
            args.refine, target, args.draft, drafter, dtype=args.dtype, samples=samples
        )
        self._target, self._every = target, args.refine_every or EVERY
        self._keeps = args.log_probs or args.top_log_probs is not None
        self._waiting: list[Completion] = []
        self._updates: list[Refined] = []

    def see(self, completion: Completion, queue: Queue) -> Completion:
        """Collect a completion and return it. Once there are enough completions, refine the draft that `queue` uses."""
        self._waiting.append(completion)
        if len(self._waiting) >= self._every:
            self._refiner.see_completions(self._waiting)
            self._waiting = []
            self._updates.append(self._refiner.refine(self._target.params, steps=STEPS))
            queue.draft_with(self._updates[-1].params)
        return completion if self._keeps else dataclasses.replace(completion, log_probs=None)

    def describe(self) -> str:
        """Return a description of the updates, for the statistics."""
        if not self._updates:
            return f"the draft was not refined: {self._every} completions make one update (--refine-every)"
        num_kept = sum(update.kept for update in self._updates)
        tau_before, tau_after = self._updates[0].before, self._refiner.expected_tau(self._target.params)
        return (
            f"the draft was refined {len(self._updates)} times, {num_kept} of them kept; expected tau on held-out "
            f"texts {tau_before:.2f} before and {tau_after:.2f} after"
        )
