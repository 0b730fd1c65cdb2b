"""Training of block drafters on masked blocks at many positions of a row at once.

Sources: DFlash 2602.06036, section 3.3 (random anchors, loss that decays over the positions of a block); DSpark
(deepseek-ai/DeepSpec: the Markov head is trained on the true tokens; the confidence head learns the overlap of the
draft's and the target's distributions). B rows, L tokens per row, A blocks per row, K tokens per block, of which D are
drafted, V vocabulary, W draft vocabulary. Tested against the drafter itself, given the same tokens
(tests/lab/training/test_blocks.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from mars_jax.contrib.models import dflash_head as head
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.contrib.teaching import Batch, Loss, teach
from mars_jax.core.types import ForwardOutput, LanguageModel, Params, PyTree, Visible
from mars_jax.lab.training import objectives
from mars_jax.lab.training.eagle_training import from_target
from mars_jax.lab.training.features import default_layers
from mars_jax.lab.training.loop import Apprentice
from mars_jax.lab.training.objectives import Divergence, cast, forward_kl
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import layers_like
from mars_jax.models.transformer import language_model

SPACING = 8
"""Default spacing of blocks: a row of L tokens has L // SPACING blocks."""


def decay_of(block_size: int) -> float:
    """Return the published decay (DFlash, section 3.3): position i has weight exp(-i / decay).

    >>> decay_of(16), decay_of(8)
    (7.0, 4.0)
    """
    decay_by_size = ((16, 7.0), (10, 5.0), (0, 4.0))
    return next(decay for smallest, decay in decay_by_size if block_size >= smallest)


def anchors(tokens: Array, count: int) -> Array:
    """Draw the start positions i32[B, A] of A blocks per row, one in each of A equal parts of the row.

    The positions depend only on the tokens i32[B, L], so a run that is killed and resumed gives bit-identical results.
    """
    rows, length = tokens.shape
    key = jax.random.fold_in(jax.random.key(0), jnp.sum(tokens))
    # Part i covers the positions part_bounds[i] to part_bounds[i + 1] - 1.
    part_bounds = jnp.arange(count + 1, dtype=jnp.int32)[None] * length // count
    return jax.random.randint(key, (rows, count), part_bounds[:, :-1], part_bounds[:, 1:])


def dflash(
    config: DFlashConfig,
    target: LanguageModel,
    *,
    ids: Array | None = None,
    blocks: int | None = None,
    divergence: Divergence = forward_kl,
    dtype: DTypeLike = "bfloat16",
) -> Loss:
    """Return the loss of a DFlash head.

    Each position of a block learns the target's distribution, given the true tokens before that position.

    Args:
      config: config of the head.
      target: a model that returns the head's features; see `LanguageModel.with_features`.
      ids: i32[W]; target tokens of the draft vocabulary, if it is smaller.
      blocks: A; default: one per `SPACING` tokens in a row.
      divergence: divergence of the head's distribution from the target's.
      dtype: dtype of the computation.
    """
    fade = math.exp(-1 / decay_of(config.block_size))

    def loss(params: PyTree, batch: Batch, teacher: PyTree) -> tuple[Array, dict[str, Array]]:
        lesson = teach(target, teacher, batch)
        tokens, segments = batch.tokens[:, :-1], batch.segments[:, :-1]
        length = tokens.shape[1]
        starts = anchors(tokens, blocks or max(1, length // SPACING))
        pair = Params(target=teacher, draft=cast(params, dtype, ids))
        hidden = block_hidden(config, target, pair, lesson.output, tokens, segments, starts)

        # The label of drafted position i is the target's distribution after the token at `previous_positions[..., i]`.
        previous_positions = starts[..., None] + jnp.arange(config.drafts, dtype=jnp.int32)[None, None]
        # Positions past the end of the row are clipped to its last token, and are not valid.
        clipped_positions = jnp.minimum(previous_positions, length - 1)
        anchor_segments = jnp.take_along_axis(segments, starts, axis=1)[..., None]
        same_document = jnp.take_along_axis(segments[:, None], clipped_positions, axis=2) == anchor_segments
        valid = (previous_positions < length) & same_document

        def mean(values: Array) -> Array:
            """Return the mean of values [B, A, D] over all valid blocks, f32[D]."""
            return objectives.masked_mean(values, valid, axis=(0, 1))

        target_logits = jax.vmap(lambda z, index: z[index])(lesson.logits, clipped_positions)  # [B, A, D, V]
        label_logits = objectives.select(target_logits, ids)

        # The head's functions expect a single axis of tokens, [B, A * D], instead of blocks [B, A, D].
        rows = tokens.shape[0]
        flat_hidden = hidden.reshape(rows, -1, hidden.shape[-1])
        previous_tokens = jnp.take_along_axis(tokens[:, None], clipped_positions, axis=2).reshape(rows, -1)
        draft_logits = head.unembed(config, target, pair, flat_hidden)
        if config.markov_rank:
            draft_logits = draft_logits + head.markov(pair.draft, previous_tokens)
        draft_logits = draft_logits.reshape(*valid.shape, -1)

        drafted_tokens = config.to_target(pair, jnp.argmax(draft_logits, axis=-1))
        is_accepted = (drafted_tokens == jnp.argmax(target_logits, axis=-1)).astype(jnp.float32)
        position_losses = mean(divergence(label_logits, draft_logits))
        total_loss = objectives.chain_mean(position_losses, fade)
        figures = objectives.chain_figures(position_losses, mean(is_accepted))
        if config.confidence:
            logit = head.confidence(config, pair.draft, flat_hidden, previous_tokens).reshape(valid.shape)
            # The probability that rejection accepts the draft is the overlap of the two distributions.
            overlap = jax.lax.stop_gradient(1 - objectives.total_variation(label_logits, draft_logits))
            # Binary cross entropy between the overlap and the predicted probability, sigmoid(logit).
            confidence_loss = jax.nn.softplus(logit) - overlap * logit
            figures["confidence"] = objectives.chain_mean(mean(confidence_loss), fade)
            total_loss = total_loss + figures["confidence"]
        return total_loss, figures

    return loss


def block_hidden(
    config: DFlashConfig,
    target: LanguageModel,
    params: Params,
    output: ForwardOutput,
    tokens: Array,
    segments: Array,
    places: Array,
) -> Array:
    """Return hidden states [B, A, D, E] of the drafted positions of blocks that begin at `places`.

    They are computed with the functions of the drafter. A block attends to the earlier tokens of its document and to
    itself.

    Args:
      config, target, params: the config of the head, its target, and the weights of both.
      output: the target's output for the tokens, [B, L, ...].
      tokens, segments: i32[B, L].
      places: i32[B, A]; positions of the blocks' first tokens.
    """
    (rows, length), count, size = tokens.shape, places.shape[1], config.block_size
    weights = params.draft
    cache = config.init_cache(rows, length + count * size, weights["fc"].dtype)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    zeros = jnp.zeros((rows,), jnp.int32)
    cache = head.absorb(config, weights, head.fuse(config, weights, output), positions, zeros, cache)

    first_tokens = jnp.take_along_axis(tokens, places, axis=1).reshape(-1, 1)
    block_tokens = head.block(config, first_tokens).reshape(rows, count * size)
    block_positions = (places[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]).reshape(rows, -1)
    # Slots 0 to L - 1 of the cache hold the context of the row's tokens. The next A * K slots hold the blocks. A block
    # attends to the context before its first token, within its document.
    block_starts = jnp.repeat(places, size, axis=1)[..., None]
    block_segments = jnp.repeat(jnp.take_along_axis(segments, places, axis=1), size, axis=1)[..., None]
    visible_context = (segments[:, None] == block_segments) & (positions[:, None] < block_starts)
    block_ids = jnp.arange(count * size, dtype=jnp.int32) // size
    same_block = jnp.broadcast_to(block_ids[:, None] == block_ids[None], (rows, count * size, count * size))
    visible = Visible(
        first=zeros,
        positions=block_positions,
        slot=zeros + length,
        seen=jnp.concatenate([visible_context, same_block], axis=2),
        seen_positions=jnp.concatenate([positions, block_positions], axis=1),
    )
    hidden, _ = head.forward(config, target, params, block_tokens, visible, cache)
    hidden = hidden.reshape(rows, count, size, -1)
    return hidden[:, :, size - config.drafts :]


def block_layers(target: ModelConfig) -> tuple[int, ...]:
    """Return the target layers that a DFlash head reads.

    These are the five layers that the published heads read or, if the target has fewer than 12 layers, the last layer
    of each third.

    >>> block_layers(ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=36, num_heads=1))
    (1, 9, 17, 25, 33)
    """
    if target.num_layers < 12:
        return default_layers(target)
    return DFlashConfig.outline(target).feature_layers


def new_dflash(
    target: ModelConfig,
    params: PyTree,
    *,
    ids: np.ndarray | None = None,
    layers: Sequence[int] | None = None,
    depth: int = 5,
    block_size: int = 16,
    markov_rank: int = 0,
    confidence: bool = False,
    intermediate_size: int | None = None,
    divergence: Divergence,
    seed: int = 0,
) -> Apprentice:
    """Return an `Apprentice` for a new DFlash head, whose weights are initialised from the target by `from_target`.

    Args:
      target, params, ids, seed: as for `eagle_training.new_eagle3`.
      layers: target layers to read; default: `block_layers`.
      depth: number of layers of the head.
      block_size: number of tokens in a block, including the last committed token.
      markov_rank, confidence: settings of DSpark, whose blocks draft from their anchor; see `DFlashConfig`.
      intermediate_size: width of the layers' MLPs; default: the target's.
      divergence: see `dflash`.
    """
    layers = tuple(layers or block_layers(target))
    # The mask token is one that never occurs inside a document: the BOS token, or the first EOS token if there is no
    # BOS token.
    special_tokens = (target.bos_token_id, *target.eos_token_ids)
    mask_token = next((token for token in special_tokens if token is not None), 0)
    draft_vocab_size, vocabulary = target.vocab_size, None
    if ids is not None:
        draft_vocab_size, vocabulary = len(ids), jnp.asarray(ids, jnp.int32)
    config = DFlashConfig(
        layer=layers_like(target, intermediate_size, family="qwen3", qk_norm=True, num_layers=depth),
        target_hidden_size=target.hidden_size,
        feature_layers=layers,
        block_size=block_size,
        mask_token=mask_token,
        draft_vocab_size=draft_vocab_size,
        from_anchor=markov_rank > 0 or confidence,
        own_unembed=ids is not None,
        markov_rank=markov_rank,
        confidence=confidence,
        confidence_bias=confidence,
        confidence_markov=confidence and markov_rank > 0,
    )

    def init() -> PyTree:
        initial_params = from_target(config, target, params, vocabulary, seed)
        if markov_rank:
            # The Markov correction starts at zero.
            initial_params["markov_out"] = jnp.zeros_like(initial_params["markov_out"])
        return initial_params

    model = language_model(target, dtype="bfloat16", feature_layers=layers)
    loss = dflash(config, model, ids=vocabulary, divergence=divergence)
    return Apprentice(config=config, init=init, loss=loss, ids=vocabulary)
