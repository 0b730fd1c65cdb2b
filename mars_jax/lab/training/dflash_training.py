"""Training of block drafters on masked blocks at many positions of a row at once.

Sources: DFlash 2602.06036, section 3.3 (random anchors, loss that decays over the positions of a block); DSpark
(deepseek-ai/DeepSpec: the Markov head learns on the true tokens; the confidence head learns the overlap of the draft's
distribution with the target's). B rows, L tokens per row, A blocks per row, K tokens per block, of which D are drafted,
V vocabulary, W draft vocabulary. Oracle: the drafter itself, given the same tokens (tests/lab/training/test_blocks.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.contrib.models import dflash_head as head
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.contrib.teaching import Batch, Loss, teach
from mars_jax.core.types import ForwardOutput, LanguageModel, Params, PyTree, Visible
from mars_jax.lab.training import objectives
from mars_jax.lab.training.eagle_training import feature_layers, from_target
from mars_jax.lab.training.loop import Apprentice
from mars_jax.lab.training.objectives import Divergence, cast, forward_kl
from mars_jax.models.config import ModelConfig
from mars_jax.models.heads import layers_like
from mars_jax.models.transformer import language_model

SPACING = 8
"""Default number of tokens in a row per block."""


def decay_of(block_size: int) -> float:
    """Return the published decay (DFlash, section 3.3): position i has weight exp(-i / decay).

    >>> decay_of(16), decay_of(8)
    (7.0, 4.0)
    """
    return 7.0 if block_size >= 16 else 5.0 if block_size >= 10 else 4.0


def anchors(tokens: Array, count: int) -> Array:
    """Draw the start positions of A blocks in each row, i32[B, A]: one in each of A equal parts.

    The positions are a function of the tokens i32[B, L], so that a killed run continues bit for bit.
    """
    rows, length = tokens.shape
    key = jax.random.fold_in(jax.random.key(0), jnp.sum(tokens))
    part = jnp.arange(count, dtype=jnp.int32)[None] * length // count
    size = (jnp.arange(1, count + 1, dtype=jnp.int32)[None] * length // count) - part
    return part + jax.random.randint(key, (rows, count), 0, size)


def dflash(
    config: DFlashConfig,
    target: LanguageModel,
    *,
    ids: Array | None = None,
    blocks: int | None = None,
    divergence: Divergence = forward_kl,
    dtype: Any = "bfloat16",
) -> Loss:
    """Return the loss of a head: each block position learns the target's distribution given the true tokens before it.

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
        places = anchors(tokens, blocks or max(1, tokens.shape[1] // SPACING))
        both = Params(target=teacher, draft=cast(params, dtype, ids))
        hidden = block_hidden(config, target, both, lesson.output, tokens, segments, places)

        # Drafted position i learns the target's distribution after the token at `previous_positions[..., i]`.
        length = tokens.shape[1]
        previous_positions = places[..., None] + jnp.arange(config.drafts, dtype=jnp.int32)[None, None]
        inside = jnp.minimum(previous_positions, length - 1)
        one_document = jnp.take_along_axis(segments[:, None], inside, axis=2)
        valid = (previous_positions < length) & (
            one_document == jnp.take_along_axis(segments, places, axis=1)[..., None]
        )
        previous_tokens = jnp.take_along_axis(tokens[:, None], inside, axis=2)
        target_logits = jax.vmap(lambda z, index: z[index])(lesson.logits, inside)  # [B, A, D, V]
        choice = jnp.argmax(target_logits, axis=-1)
        labels = target_logits if ids is None else jnp.take(target_logits, ids, axis=-1)

        rows, count, drafts = previous_tokens.shape
        flat = hidden.reshape(rows, count * drafts, -1)
        drafted = head.unembed(config, target, both, flat)
        if config.markov_rank:
            drafted = drafted + head.markov(both.draft, previous_tokens.reshape(rows, -1))
        drafted = drafted.reshape(rows, count, drafts, -1)

        named = config.to_target(both, jnp.argmax(drafted, axis=-1))
        losses = objectives.masked_mean(divergence(labels, drafted), valid, axis=(0, 1))
        right = objectives.masked_mean((named == choice).astype(jnp.float32), valid, axis=(0, 1))
        total, figures = objectives.chain_mean(losses, fade), objectives.chain_figures(losses, right)
        if config.confidence:
            sure = head.confidence(config, both.draft, flat, previous_tokens.reshape(rows, -1))
            sure = sure.reshape(rows, count, drafts)
            overlap = jax.lax.stop_gradient(1 - objectives.total_variation(labels, drafted))
            entropy = jax.nn.softplus(sure) - overlap * sure  # cross entropy of a probability and its logit
            figures["confidence"] = objectives.chain_mean(
                objectives.masked_mean(entropy, valid, axis=(0, 1)), fade
            )
            total = total + figures["confidence"]
        return total, figures

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

    They are computed by the drafter's functions. A block attends to the earlier tokens of its document and to itself.

    Args:
      config, target, params: those of the head and its target.
      output: the target's output for the tokens, [B, L, ...].
      tokens, segments: i32[B, L].
      places: i32[B, A]; positions of the blocks' first tokens.
    """
    (rows, length), count, size = tokens.shape, places.shape[1], config.block_size
    draft = params.draft
    cache = config.init_cache(rows, length + count * size, draft["fc"].dtype)
    positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (rows, length))
    zero = jnp.zeros((rows,), jnp.int32)
    cache = head.absorb(config, draft, head.fuse(config, draft, output), positions, zero, cache)

    first = jnp.take_along_axis(tokens, places, axis=1).reshape(-1, 1)
    blocks = head.block(config, first).reshape(rows, count * size)
    block_positions = (places[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None]).reshape(rows, -1)
    begins = jnp.repeat(places, size, axis=1)[..., None]
    same = (
        segments[:, None]
        == jnp.repeat(jnp.take_along_axis(segments, places, axis=1), size, axis=1)[..., None]
    )
    context = same & (positions[:, None] < begins)
    number = jnp.arange(count * size, dtype=jnp.int32) // size
    same_block = jnp.broadcast_to(number[:, None] == number[None], (rows, count * size, count * size))
    visible = Visible(
        first=zero,
        positions=block_positions,
        slot=zero + length,
        seen=jnp.concatenate([context, same_block], axis=2),
        seen_positions=jnp.concatenate([positions, block_positions], axis=1),
    )
    hidden, _ = head.forward(config, target, params, blocks, visible, cache)
    hidden = hidden.reshape(rows, count, size, -1)
    return hidden[:, :, size - config.drafts :]


def block_layers(target: ModelConfig) -> tuple[int, ...]:
    """Return the layers that a DFlash head reads: five spread as published, or the ends of a shallow target's thirds.

    >>> block_layers(ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=36, num_heads=1))
    (1, 9, 17, 25, 33)
    """
    if target.num_layers < 12:
        return feature_layers(target)
    return tuple(round(1 + i * (target.num_layers - 4) / 4) for i in range(5))


def new_dflash(
    target: ModelConfig,
    params: PyTree,
    *,
    ids: np.ndarray | None = None,
    layers: Sequence[int] | None = None,
    depth: int = 5,
    block_size: int = 16,
    from_anchor: bool = False,
    markov_rank: int = 0,
    confidence: bool = False,
    intermediate_size: int | None = None,
    divergence: Divergence,
    seed: int = 0,
) -> Apprentice:
    """Return an apprentice for a DFlash head that starts from its target; see `eagle_training.from_target`.

    Args:
      target, params, ids, seed: as for `eagle_training.new_eagle3`.
      layers: target layers to read; default: `block_layers`.
      depth: number of layers of the head.
      block_size, from_anchor, markov_rank, confidence: see `DFlashConfig`.
      intermediate_size: width of the layers' MLPs; default: the target's.
      divergence: see `dflash`.
    """
    layers = tuple(block_layers(target) if layers is None else layers)
    # Use the token that begins or ends a document.
    special_tokens = (target.bos_token_id, *target.eos_token_ids)
    mask_token = next((token for token in special_tokens if token is not None), 0)
    config = DFlashConfig(
        layer=layers_like(target, intermediate_size, family="qwen3", qk_norm=True, num_layers=depth),
        target_hidden_size=target.hidden_size,
        feature_layers=layers,
        block_size=block_size,
        mask_token=mask_token,
        draft_vocab_size=target.vocab_size if ids is None else len(ids),
        from_anchor=from_anchor,
        own_unembed=ids is not None,
        markov_rank=markov_rank,
        confidence=confidence,
        confidence_bias=confidence,
        confidence_markov=confidence and markov_rank > 0,
    )
    vocabulary = None if ids is None else jnp.asarray(ids, jnp.int32)

    def init() -> PyTree:
        first = from_target(config, target, params, vocabulary, seed)
        if markov_rank:
            # The Markov correction starts at zero.
            first["markov_out"] = jnp.zeros_like(first["markov_out"])
        return first

    model = language_model(target, dtype="bfloat16", feature_layers=layers)
    loss = dflash(config, model, ids=vocabulary, divergence=divergence)
    return Apprentice(config=config, init=init, loss=loss, ids=vocabulary)
