"""Shared code for training: the input of the training loop, and forward passes over rows of packed documents.

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
"""A loss function (params, batch, frozen params) -> (loss, metrics to log), differentiable in params."""


class Training(NamedTuple):
    """The functions, data and settings that `fit` needs to train a drafter or a rule."""

    init: Callable[[], PyTree]  # function that returns the initial params, in float32
    loss: Loss
    batches: Any  # a `grain.MapDataset` whose item i is the batch of step i
    optimizer: Any  # an `optax.GradientTransformation`
    steps: int
    step_tokens: int = 1  # number of tokens or examples per batch


def shuffled(examples: PyTree, rows: int, seed: int) -> Any:
    """Return an endless `grain.MapDataset` of shuffled batches of `rows` examples.

    `examples` is a named tuple of arrays [n, ...].
    """
    import grain

    num_examples = len(examples[0])
    indices = grain.MapDataset.source(range(num_examples)).seed(seed).shuffle().repeat()
    batches = indices.batch(rows, drop_remainder=True)
    return batches.map(lambda batch: type(examples)(*(column[batch] for column in examples)))


def binary_loss(log_odds: Array, labels: Array) -> tuple[Array, dict[str, Array]]:
    """Return the mean binary cross entropy of log odds f32[n] and labels f32[n] in [0, 1], and the accuracy."""
    import optax

    right_share = jnp.mean(((log_odds > 0) == (labels > 0.5)).astype(jnp.float32))
    return jnp.mean(optax.sigmoid_binary_cross_entropy(log_odds, labels)), {"right": right_share}


class Batch(NamedTuple):
    """A batch of token rows for training, in which position j predicts position j + 1."""

    tokens: Any  # i32[B, L + 1], on the host or on a device
    segments: Any  # i32[B, L + 1]; document number of each token
    wanted: Any = None  # bool[B, L + 1]; tokens that contribute to the loss; None: all


class Lesson(NamedTuple):
    """The output of a frozen target for tokens [0, L) of each row of a batch."""

    output: ForwardOutput  # hidden states and features, [B, L, ...]
    logits: Array  # f32[B, L, V]; entry t predicts token t + 1


def document_mask(segments: Array) -> Array:
    """Return the mask bool[B, L, L] that lets each token attend to itself and to earlier tokens of its document.

    >>> document_mask(jnp.asarray([[0, 0, 1]]))[0].astype(int).tolist()
    [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    length = segments.shape[1]
    causal = jnp.tril(jnp.ones((length, length), bool))[None]
    return causal & (segments[:, :, None] == segments[:, None, :])


def in_documents(segments: Array) -> Visible:
    """Return the visibility of packed rows that start at position 0.

    `segments` i32[B, L] contains the document number of each token.
    """
    batch, length = segments.shape
    visible = Visible.causal(jnp.zeros((batch,), jnp.int32), length)
    return dataclasses.replace(visible, seen=document_mask(segments), documents=segments)


def forward_packed(model: LanguageModel, params: PyTree, tokens: Array, segments: Array) -> ForwardOutput:
    """Run a model on packed rows: tokens i32[B, L], and `segments` i32[B, L], the number of each token's document.

    Attention and recurrent layers do not cross document boundaries.
    """
    return model.forward(params, tokens, in_documents(segments), model.init_cache(*tokens.shape))


def predict(model: LanguageModel, params: PyTree, tokens: Array, segments: Array) -> Array:
    """Return the logits f32[B, L, V] of packed rows: entry j predicts token j + 1."""
    return model.unembed(params, forward_packed(model, params, tokens, segments).hidden)


def teach(target: LanguageModel, teacher: PyTree, batch: Batch) -> Lesson:
    """Run the target on a batch, without computing gradients."""
    output = forward_packed(target, teacher, batch.tokens[:, :-1], batch.segments[:, :-1])
    return jax.lax.stop_gradient(Lesson(output, target.unembed(teacher, output.hidden)))
