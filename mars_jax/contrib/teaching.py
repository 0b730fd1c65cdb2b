"""Shared parts of training: the input of the training loop, and forward passes over whole rows.

The loop is `mars_jax.lab.training.loop.fit`. B rows, L tokens per row, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core.types import ForwardOutput, LanguageModel, PyTree, Visible

Loss = Callable[[PyTree, Any, PyTree], tuple[Array, Mapping[str, Array]]]
"""(params, batch, frozen params) -> (loss, figures for the log); differentiable in params."""


class Training(NamedTuple):
    """Everything that `fit` needs to train a drafter or a rule."""

    init: Callable[[], PyTree]  # returns the initial params, in float32
    loss: Loss
    batches: Any  # a `grain.MapDataset`, whose item i is the batch of step i
    optimizer: Any  # an `optax.GradientTransformation`
    steps: int
    step_tokens: int = 1  # tokens or examples per batch


def shuffled(examples: PyTree, rows: int, seed: int) -> Any:
    """Return an endless `grain.MapDataset` of batches of `rows` examples, from a named tuple of arrays [n, ...]."""
    import grain

    num_examples = len(examples[0])
    indices = grain.MapDataset.source(range(num_examples)).seed(seed).shuffle().repeat()
    batches = indices.batch(rows, drop_remainder=True)
    return batches.map(lambda batch: type(examples)(*(column[batch] for column in examples)))


def binary_loss(log_odds: Array, labels: Array) -> tuple[Array, dict[str, Array]]:
    """Return the cross entropy of labels f32[n] in [0, 1], and the share of log odds f32[n] on the right side of 0."""
    import optax

    right_share = jnp.mean(((log_odds > 0) == (labels > 0.5)).astype(jnp.float32))
    return jnp.mean(optax.sigmoid_binary_cross_entropy(log_odds, labels)), {"right": right_share}


class Batch(NamedTuple):
    """Rows of consecutive tokens. Position j predicts position j + 1."""

    tokens: Any  # i32[B, L + 1], on the host or on a device
    segments: Any  # i32[B, L + 1]; document number of each token
    wanted: Any = None  # bool[B, L + 1]; tokens to learn; None: all


class Lesson(NamedTuple):
    """The output of a frozen target for the tokens [0, L) of a batch."""

    output: ForwardOutput  # [B, L, ...]
    logits: Array  # f32[B, L, V]; row t is the distribution of token t + 1


def document_mask(segments: Array) -> Array:
    """Return bool[B, L, L] for segments i32[B, L]: a token attends to itself and to earlier tokens of its document.

    >>> document_mask(jnp.asarray([[0, 0, 1]]))[0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = segments.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    return causal & (segments[:, :, None] == segments[:, None, :])


def in_documents(segments: Array) -> Visible:
    """Describe rows that start at position 0 and hold several documents, for segments i32[B, L]."""
    batch, length = segments.shape
    visible = Visible.causal(jnp.zeros((batch,), jnp.int32), length)
    return dataclasses.replace(visible, seen=document_mask(segments), documents=segments)


def forward_packed(model: LanguageModel, params: PyTree, tokens: Array, segments: Array) -> ForwardOutput:
    """Return the output of a model for tokens i32[B, L] with segments i32[B, L].

    A token reads only its own document, in attention and in recurrent layers.
    """
    return model.forward(params, tokens, in_documents(segments), model.init_cache(*tokens.shape))


def predict(model: LanguageModel, params: PyTree, tokens: Array, segments: Array) -> Array:
    """Return logits f32[B, L, V] for tokens and segments i32[B, L]: row j is the distribution of token j + 1."""
    return model.unembed(params, forward_packed(model, params, tokens, segments).hidden)


def teach(target: LanguageModel, teacher: PyTree, batch: Batch) -> Lesson:
    """Run the target over a batch once, without a gradient."""
    output = forward_packed(target, teacher, batch.tokens[:, :-1], batch.segments[:, :-1])
    return jax.lax.stop_gradient(Lesson(output, target.unembed(teacher, output.hidden)))
