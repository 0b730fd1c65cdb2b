"""Training of EAGLE-3 heads and MTP modules by training-time test, and of EAGLE-1 heads by regression.

Sources: EAGLE-3 2503.01840, section 3; EAGLE 2401.15077, section 3.2. B rows, L tokens per row, n = L - 1 entries, E
hidden size, V vocabulary, W draft vocabulary. Tested against the drafter itself, given the same tokens
(tests/lab/training/test_heads.py).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.typing import DTypeLike

from mars_jax.contrib.teaching import Batch, Loss, document_mask, in_documents, teach
from mars_jax.core.types import ForwardOutput, LanguageModel, Params, PyTree, Visible
from mars_jax.lab.training import objectives
from mars_jax.lab.training.features import PADDING, Recorded, default_layers
from mars_jax.lab.training.loop import Apprentice
from mars_jax.lab.training.objectives import Divergence, cast, forward_kl
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.heads import FeatureHead, LayeredHead, init_params, layers_like
from mars_jax.models.mtp_head import MtpConfig
from mars_jax.models.transformer import language_model

NOISE, TOKEN_WEIGHT = 0.1, 0.1
"""EAGLE-1: half-width of the uniform noise on features, and weight of the divergence (the published recipe)."""


class Labels(NamedTuple):
    """The training labels of an EAGLE-3 head at its n entries."""

    output: ForwardOutput  # [B, n, ...]; the target's output, with the features that the head reads
    logits: Array  # f32[B, n, W]; the target's logits of token t + 2 in the draft vocabulary
    choice: Array  # i32[B, n]; the target's most likely token t + 2
    in_vocabulary: Array  # bool[B, n]; True if `choice` is in the draft vocabulary


def _labels(target: LanguageModel, teacher: PyTree, batch: Batch, ids: Array | None) -> Labels:
    """Compute labels with a forward pass of the target."""
    lesson = teach(target, teacher, batch)
    # Entry t embeds token t + 1, so its label is the target's distribution after token t + 1.
    target_logits = lesson.logits[:, 1:]
    logits = objectives.select(target_logits, ids)
    in_vocabulary = jnp.max(logits, axis=-1) == jnp.max(target_logits, axis=-1)
    entry_output = entries(lesson.output, target_logits.shape[1])
    return Labels(entry_output, logits, jnp.argmax(target_logits, axis=-1), in_vocabulary)


def _recorded_labels(record: Recorded, vocab_size: int, layers: int, ids: Array | None) -> Labels:
    """Compute labels from recorded features. Tokens outside `top` share the remaining probability equally."""
    rows, length, _ = record.features.shape
    features = tuple(jnp.split(record.features[:, : length - 1], layers, axis=-1))
    top_ids, log_probs = record.top[:, 1:], record.log_probs[:, 1:].astype(jnp.float32)
    remaining_prob = jnp.maximum(1 - jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True), 1e-6)
    # The index of each token of `top` in the draft vocabulary, which is also its column in the logits.
    width, draft_ids = vocab_size, top_ids
    if ids is not None:
        # Tokens outside the draft vocabulary map to an index past its end, and the scatter drops them.
        width = len(ids)
        column_of = jnp.full((vocab_size,), width, jnp.int32).at[ids].set(jnp.arange(width, dtype=jnp.int32))
        draft_ids = column_of[top_ids]
    logits = jnp.log(remaining_prob / (vocab_size - top_ids.shape[-1]))
    logits = jnp.broadcast_to(logits, (rows, length - 1, width))
    row_index, entry_index = jnp.indices((rows, length - 1), dtype=jnp.int32, sparse=True)
    logits = logits.at[row_index[..., None], entry_index[..., None], draft_ids].set(log_probs, mode="drop")
    no_hidden = jnp.zeros((rows, length - 1, 0), features[0].dtype)
    return Labels(ForwardOutput(no_hidden, features, ()), logits, top_ids[..., 0], draft_ids[..., 0] < width)


def entries(output: ForwardOutput, count: int) -> ForwardOutput:
    """Truncate the hidden states and features of an output to the first `count` tokens."""
    return output._replace(
        hidden=output.hidden[:, :count], features=tuple(x[:, :count] for x in output.features)
    )


def _agreement(config: FeatureHead, params: Params, drafted: Array, choice: Array, valid: Array) -> Array:
    """Return the share of valid entries whose most likely token is the target's choice i32[B, n]."""
    drafted_tokens = config.to_target(params, jnp.argmax(drafted, axis=-1))
    return objectives.masked_mean((drafted_tokens == choice).astype(jnp.float32), valid)


def eagle3(
    config: FeatureHead,
    target: LanguageModel,
    *,
    ids: Array | None = None,
    steps: int = 5,
    divergence: Divergence = forward_kl,
    dtype: DTypeLike = "bfloat16",
) -> Loss:
    """Return the training-time test loss of a head, which drafts `steps` tokens from every position at once.

    At step j, entry t is the j-th token drafted after position t - j. Its feature is the head's own output at entry
    t - 1 of the previous step. It attends to the target's features up to t - j and to its own chain, as in decoding.
    Every entry learns the target's distribution of token t + 2, restricted to the draft vocabulary. Entries are
    excluded if the target's most likely token is not in the draft vocabulary.

    The batch is a `Batch`, for which the loss runs the target, or `Recorded` rows, for which the target's params need
    only the embedding.

    Args:
      config: config of the EAGLE-3 head or MTP module.
      target: a model that returns the head's features; see `LanguageModel.with_features`.
      ids: i32[W]; target token ids of the draft vocabulary, if it is smaller than the target's. They are not trained,
        so they are not part of the params.
      steps: number of tokens to draft.
      divergence: divergence of the head's distribution from the target's.
      dtype: dtype of the computation.
    """

    def loss(params: PyTree, batch: Batch | Recorded, teacher: PyTree) -> tuple[Array, dict[str, Array]]:
        if isinstance(batch, Recorded):
            labels = _recorded_labels(batch, target.vocab_size, len(config.feature_layers), ids)
        else:
            labels = _labels(target, teacher, batch, ids)
        included = labels.in_vocabulary
        if isinstance(batch, Batch) and batch.wanted is not None:
            included &= batch.wanted[:, 2:]
        pair = Params(target=teacher, draft=cast(params, dtype, ids))
        step_losses, step_acceptance = [], []
        drafts = drafted_ahead(config, target, pair, labels.output, batch.tokens, batch.segments, steps)
        for drafted, valid in drafts:
            step_losses.append(objectives.masked_mean(divergence(labels.logits, drafted), valid & included))
            step_acceptance.append(_agreement(config, pair, drafted, labels.choice, valid))
        return objectives.chain_mean(step_losses), objectives.chain_figures(step_losses, step_acceptance)

    return loss


def drafted_ahead(
    config: FeatureHead,
    target: LanguageModel,
    both: Params,
    output: ForwardOutput,
    tokens: Array,
    segments: Array,
    steps: int,
) -> Iterator[tuple[Array, Array]]:
    """Yield an EAGLE-3 head's logits for `steps` steps of drafting from every position at once; see `eagle3`.

    Args:
      config, target, both: the head, its target, and the weights of both.
      output: the target's output at the n entries, [B, n, ...].
      tokens, segments: i32[B, L + 1] with L = n + 1; the last column is not read.
      steps: as for `eagle3`.

    Yields:
      For step j: logits f32[B, n, W], whose entry t predicts token t + 2 in a chain that begins at entry t - j; and
      bool[B, n], True if that chain lies inside one document.
    """
    feature = config.fuse(both.draft, output)
    rows, n = feature.shape[:2]
    next_tokens, segments = tokens[:, 1 : n + 1], segments[:, : n + 1]
    entry_index = jnp.arange(n, dtype=jnp.int32)
    positions = jnp.broadcast_to(entry_index, (rows, n))
    same_document = document_mask(segments[:, :n])
    # The cache consists of `steps` blocks of n slots each. Block i holds the entries of step i.
    cache = config.init_cache(rows, steps * n, both.draft["fc"].dtype)
    distance = (entry_index[:, None] - entry_index[None, :])[None]  # from the attended entry
    for j in range(steps):
        # Entry t attends to the target's features up to t - j (block 0) and to its own chain: entry t - (j - i) of each
        # block i from 1 to j. Later blocks are still empty.
        visible_blocks = [same_document & (distance >= j)]
        visible_blocks += [jnp.broadcast_to(distance == j - i, same_document.shape) for i in range(1, j + 1)]
        visible_blocks += [jnp.zeros(same_document.shape, bool)] * (steps - j - 1)
        visible = Visible(
            first=jnp.zeros((rows,), jnp.int32),
            positions=positions,
            slot=jnp.full((rows,), j * n, jnp.int32),
            seen=jnp.concatenate(visible_blocks, axis=2),
            seen_positions=jnp.tile(positions, (1, steps)),
        )
        hidden, cache = config.forward(target, both, feature, next_tokens, visible, cache)
        # An entry is valid if the last target feature and the embedded token belong to the same document.
        valid = (jnp.roll(segments[:, :n], j, axis=1) == segments[:, 1:]) & (entry_index >= j)[None]
        yield config.logits(target, both, hidden), valid & (segments[:, 1:] != PADDING)
        # The feature of entry t at the next step is the head's output at entry t - 1.
        feature = jnp.roll(hidden, 1, axis=1).astype(feature.dtype)


def eagle1(
    config: EagleConfig,
    target: LanguageModel,
    *,
    divergence: Divergence = forward_kl,
    dtype: DTypeLike = "bfloat16",
) -> Loss:
    """Return the loss of an EAGLE-1 head: regression of the next feature (smooth L1) and divergence of the next token.

    Noise on the features makes the head robust to errors that accumulate in decoding.

    Args:
      config, target, divergence, dtype: as for `eagle3`.
    """

    def loss(params: PyTree, batch: Batch, teacher: PyTree) -> tuple[Array, dict[str, Array]]:
        lesson = teach(target, teacher, batch)
        rows, length = batch.tokens[:, :-1].shape
        n = length - 1
        pair = Params(target=teacher, draft=cast(params, dtype))
        segments = batch.segments[:, :length]
        feature = lesson.output.hidden[:, :n]
        # The noise depends only on the tokens of the batch and not on earlier steps, so a run that is killed and
        # resumed gives bit-identical results.
        key = jax.random.fold_in(jax.random.key(0), jnp.sum(batch.tokens))
        feature = feature + jax.random.uniform(key, feature.shape, feature.dtype, -NOISE, NOISE)
        next_tokens, visible = batch.tokens[:, 1:length], in_documents(segments[:, :n])
        cache = config.init_cache(rows, n, dtype)
        hidden, _ = config.forward(target, pair, feature, next_tokens, visible, cache)
        drafted, target_logits = config.logits(target, pair, hidden), lesson.logits[:, 1:]
        valid = segments[:, :n] == segments[:, 1:]
        # The regression target of entry t is the target's feature at t + 1. Smooth L1 is the Huber loss.
        next_feature = lesson.output.hidden[:, 1:].astype(jnp.float32)
        smooth_l1 = jnp.mean(optax.huber_loss(hidden.astype(jnp.float32), next_feature), axis=-1)
        regression_loss = objectives.masked_mean(smooth_l1, valid)
        token_loss = objectives.masked_mean(divergence(target_logits, drafted), valid)
        acceptance = _agreement(config, pair, drafted, jnp.argmax(target_logits, axis=-1), valid)
        figures = {"regression": regression_loss, "token": token_loss, "accept_1": acceptance}
        return regression_loss + TOKEN_WEIGHT * token_loss, figures

    return loss


def unembedding(params: PyTree) -> Array:
    """Return the target's unembedding f32[V, E]."""
    return params.get("unembed", params["embed"]).astype(jnp.float32)


def from_target(
    config: LayeredHead, target: ModelConfig, params: PyTree, ids: Array | None, seed: int
) -> PyTree:
    """Return the initial params of a head, in float32.

    The head's final norm and unembedding, if it has any, are copied from the target. An identity matrix is added to the
    columns of `fc` that read the target's last feature. All other weights are random. `ids` i32[W] is the draft
    vocabulary, or None if the head drafts all tokens.
    """
    initial_params = init_params(config, jax.random.key(seed))
    initial_params.pop("ids", None)
    if "norm" in initial_params:
        initial_params["norm"] = params["norm"].astype(jnp.float32)
    if config.own_unembed:
        initial_params["unembed"] = objectives.select(unembedding(params), ids, axis=0)
    hidden_size = target.hidden_size
    initial_params["fc"] = initial_params["fc"].at[:, -hidden_size:].add(jnp.eye(hidden_size))
    return initial_params


def new_eagle3(
    target: ModelConfig,
    params: PyTree,
    *,
    ids: np.ndarray | None = None,
    layers: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    trained: tuple[EagleConfig, PyTree] | None = None,
    steps: int = 5,
    divergence: Divergence,
    seed: int = 0,
) -> Apprentice:
    """Return an `Apprentice` for an EAGLE-3 head, initialised from the target (`from_target`) or from a trained head.

    Args:
      target, params: the model and its weights.
      ids: i32[W]; tokens of the draft vocabulary; default: all.
      layers: see `features.default_layers`.
      intermediate_size: width of the head's MLP; default: the target's.
      trained: a head from `hub.load_eagle`, which determines `ids`, `layers` and `intermediate_size`.
      steps, divergence: see `eagle3`.
      seed: seed of the random weights.
    """
    if trained is not None:
        config, head_params = trained
        vocabulary = head_params.get("ids")
        trained_weights = {name: part for name, part in head_params.items() if name != "ids"}
        init = functools.partial(cast, trained_weights, jnp.float32)
    else:
        draft_vocab_size, vocabulary = target.vocab_size, None
        if ids is not None:
            draft_vocab_size, vocabulary = len(ids), jnp.asarray(ids, jnp.int32)
        config = EagleConfig(
            version=3,
            layer=layers_like(target, intermediate_size),
            target_hidden_size=target.hidden_size,
            draft_vocab_size=draft_vocab_size,
            feature_layers=tuple(layers or default_layers(target)),
        )
        init = functools.partial(from_target, config, target, params, vocabulary, seed)
    model = language_model(target, dtype="bfloat16", feature_layers=config.feature_layers)
    loss = eagle3(config, model, ids=vocabulary, steps=steps, divergence=divergence)
    return Apprentice(config=config, init=init, loss=loss, ids=vocabulary)


def new_eagle1(
    target: ModelConfig, *, intermediate_size: int | None = None, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """Return an `Apprentice` for an EAGLE-1 head. The arguments are as for `new_eagle3`."""
    config = EagleConfig(
        version=1,
        layer=layers_like(target, intermediate_size),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        own_unembed=False,
    )
    return Apprentice(
        config=config,
        init=functools.partial(from_target, config, target, None, None, seed),
        loss=eagle1(config, language_model(target, dtype="bfloat16"), divergence=divergence),
    )


def new_mtp(
    target: ModelConfig, params: PyTree, *, steps: int = 5, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """Return an `Apprentice` for an MTP module. The arguments are as for `new_eagle3`."""
    config = MtpConfig.outline(target)
    model = language_model(target, dtype="bfloat16", feature_layers=config.feature_layers)
    init = functools.partial(from_target, config, target, params, None, seed)
    return Apprentice(
        config=config, init=init, loss=eagle3(config, model, steps=steps, divergence=divergence)
    )
