"""Heads that are trained on their target's features, as they begin and what they learn: EAGLE-3, EAGLE-1 and Medusa.

Sources: EAGLE-3 2503.01840, section 3 (training-time test); EAGLE 2401.15077, section 3.2 (regression); Medusa
2401.10774, section 2.2. B rows, L tokens of a row, n = L - 1 entries, E hidden size, V vocabulary, W draft vocabulary.
Oracle: the drafter itself, fed the same tokens (tests/lab/training/test_heads.py).

An objective takes (params, (batch, teacher)), for `training.fit`. The target is frozen: `teacher` are its params.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.contrib.models import medusa_layers
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.core.types import ForwardOutput, LanguageModel, Params, PyTree, Visible
from mars_jax.lab.training.data import Batch
from mars_jax.lab.training.features import PADDING, Recorded
from mars_jax.lab.training.loop import Apprentice, Objective, panels_of
from mars_jax.lab.training.objectives import Divergence, document_mask, forward_kl, in_documents, read
from mars_jax.models import eagle_head as head
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.heads import LayeredHead, init_params, layers_like
from mars_jax.models.transformer import language_model

DECAY = 0.8
"""A step further ahead weighs this much less (the EAGLE-3 and Medusa recipes)."""


class Lesson(NamedTuple):
    """The frozen target's output for the tokens [0, L) of a batch."""

    output: ForwardOutput  # [B, L, ...]
    logits: Array  # f32[B, L, V]; row t is the distribution of token t + 1


class Told(NamedTuple):
    """The labels of an EAGLE-3 head at its n entries: W draft vocabulary."""

    output: ForwardOutput  # [B, n, ...]; the features that it begins with
    labels: Array  # f32[B, n, W]; logits of token t + 2 in the draft vocabulary
    choice: Array  # i32[B, n]; the target's likeliest token t + 2
    known: Array  # bool[B, n]; it is in the draft vocabulary


def _told(target: LanguageModel, teacher: PyTree, batch: Batch | Weighed, ids: Array | None) -> Told:
    """From the target's own forward."""
    said = teach(target, teacher, batch)
    wanted = said.logits[:, 1:]
    labels = wanted if ids is None else jnp.take(wanted, ids, axis=-1)
    known = jnp.max(labels, axis=-1) == jnp.max(wanted, axis=-1)
    return Told(entries(said.output, wanted.shape[1]), labels, jnp.argmax(wanted, axis=-1), known)


def _told_by(record: Recorded, vocab_size: int, layers: int, ids: Array | None) -> Told:
    """From a record, whose likeliest tokens have their own probability and the others one share each of the rest."""
    rows, length, _ = record.features.shape
    features = tuple(jnp.split(record.features[:, : length - 1], layers, axis=-1))
    top, log_probs = record.top[:, 1:], record.log_probs[:, 1:].astype(jnp.float32)
    rest = jnp.maximum(1 - jnp.sum(jnp.exp(log_probs), axis=-1, keepdims=True), 1e-6)
    size = vocab_size if ids is None else len(ids)
    place = top
    if ids is not None:
        place = jnp.full((vocab_size,), size, jnp.int32).at[ids].set(jnp.arange(size, dtype=jnp.int32))[top]
    labels = jnp.broadcast_to(jnp.log(rest / (vocab_size - top.shape[-1])), (rows, length - 1, size))
    row, entry = jnp.indices((rows, length - 1), dtype=jnp.int32, sparse=True)
    labels = labels.at[row[..., None], entry[..., None], place].set(log_probs, mode="drop")
    nothing = jnp.zeros((rows, length - 1, 0), features[0].dtype)
    return Told(ForwardOutput(nothing, features, ()), labels, top[..., 0], place[..., 0] < size)


def teach(target: LanguageModel, teacher: PyTree, batch: Batch | Weighed) -> Lesson:
    """One forward of the target over a batch; no gradient goes into it."""
    tokens, segments = batch.tokens[:, :-1], batch.segments[:, :-1]
    output = read(target, teacher, tokens, segments)
    return jax.lax.stop_gradient(Lesson(output, target.unembed(teacher, output.hidden)))


def _cast(params: PyTree, dtype) -> PyTree:
    """Float32 params in the dtype of the computation."""
    return jax.tree.map(lambda x: x.astype(dtype), params)


def entries(output: ForwardOutput, count: int) -> ForwardOutput:
    """The output at the first tokens."""
    return output._replace(
        hidden=output.hidden[:, :count], features=tuple(x[:, :count] for x in output.features)
    )


def _masked_mean(values: Array, valid: Array) -> Array:
    return jnp.sum(jnp.where(valid, values, 0.0)) / jnp.maximum(jnp.sum(valid, dtype=jnp.float32), 1.0)


def _agreement(config: EagleConfig, params: Params, drafted: Array, choice: Array, valid: Array) -> Array:
    """Share of the entries whose likeliest token is the target's, i32[B, n]."""
    token = config.to_target(params, jnp.argmax(drafted, axis=-1))
    return _masked_mean((token == choice).astype(jnp.float32), valid)


def eagle3(
    config: EagleConfig,
    target: LanguageModel,
    *,
    ids: Array | None = None,
    steps: int = 5,
    divergence: Divergence = forward_kl,
    dtype: Any = "bfloat16",
) -> Objective:
    """Training-time test: the head continues on its own features for `steps` steps from every position at once.

    At step j entry t stands for the j-th token that is drafted after position t - j: its feature is what the head
    itself wrote at entry t - 1 one step before, and it attends to the target's features up to t - j and to its own
    chain, just as in decoding. Every entry learns the target's distribution of token t + 2, within the draft
    vocabulary and where the target's own choice is in it.

    Args:
      config: of the head.
      target: a model that returns the head's features; see `LanguageModel.with_features`.
      ids: i32[W]; the target tokens of the draft vocabulary, where it is smaller. They are not trained, and so no part
        of the params here.
      steps: how far ahead; step j weighs 0.8**j.
      divergence: of the head's distribution from the target's.
      dtype: of the computation.

    A batch is tokens, which the target reads here, or `Recorded` rows of it, which it has read before; of its params
    the embedding is enough for those.
    """

    def objective(
        params: PyTree, lesson: tuple[Batch | Recorded | Weighed, PyTree]
    ) -> tuple[Array, dict[str, Array]]:
        batch, teacher = lesson
        if isinstance(batch, Recorded):
            told = _told_by(batch, target.vocab_size, len(config.feature_layers), ids)
        else:
            told = _told(target, teacher, batch, ids)
        known = told.known & batch.wanted[:, 2:] if isinstance(batch, Weighed) else told.known
        both = Params(target=teacher, draft=_cast(params, dtype) | ({} if ids is None else {"ids": ids}))
        total, figures = jnp.float32(0), {}
        chain = drafted_ahead(config, target, both, told.output, batch.tokens, batch.segments, steps, dtype)
        for j, (drafted, valid) in enumerate(chain):
            loss = _masked_mean(divergence(told.labels, drafted), valid & known)
            total = total + DECAY**j * loss
            figures[f"loss_{j + 1}"] = loss
            figures[f"accept_{j + 1}"] = _agreement(config, both, drafted, told.choice, valid)
        return total / sum(DECAY**j for j in range(steps)), figures

    return objective


class Weighed(NamedTuple):
    """A `Batch`, of which some tokens alone are learned."""

    tokens: Any  # i32[B, L + 1]
    segments: Any  # i32[B, L + 1]
    wanted: Any  # bool[B, L + 1]


def drafted_ahead(
    config: EagleConfig,
    target: LanguageModel,
    both: Params,
    output: ForwardOutput,
    tokens: Array,
    segments: Array,
    steps: int,
    dtype: Any,
) -> Iterator[tuple[Array, Array]]:
    """The drafts of an EAGLE-3 head from every position at once, one to `steps` tokens ahead; see `eagle3`.

    Args:
      config, target, both: the head, its target and the weights of the two.
      output: the target's at the n entries, [B, n, ...].
      tokens, segments: i32[B, L + 1] with L = n + 1, or as long as the entries ask for.
      steps, dtype: as for `eagle3`.

    Yields:
      Step j: logits f32[B, n, W], whose entry t is about token t + 2 and was begun at entry t - j; and where that is
      inside of one document, bool[B, n].
    """
    feature = head.fuse(config, both.draft, output)
    rows, n = feature.shape[:2]
    following, segments = tokens[:, 1 : n + 1], segments[:, : n + 1]
    entry = jnp.arange(n, dtype=jnp.int32)
    position = jnp.broadcast_to(entry, (rows, n))
    together = document_mask(segments[:, :n])
    cache = config.init_cache(rows, steps * n, dtype)
    for j in range(steps):
        distance = (entry[:, None] - entry[None, :])[None]  # from the entry attended to
        blocks = [together & (distance >= j)]
        blocks += [jnp.broadcast_to(distance == j - i, together.shape) for i in range(1, j + 1)]
        blocks += [jnp.zeros(together.shape, bool)] * (steps - j - 1)
        hidden, cache = head.forward(
            config,
            target,
            both,
            feature,
            following,
            Visible(
                first=jnp.zeros((rows,), jnp.int32),
                positions=position,
                slot=jnp.full((rows,), j * n, jnp.int32),
                seen=jnp.concatenate(blocks, axis=2),
                seen_positions=jnp.tile(position, (1, steps)),
            ),
            cache,
        )
        # From the last of the target's features to the token that is embedded, one document.
        valid = (jnp.roll(segments[:, :n], j, axis=1) == segments[:, 1:]) & (entry >= j)[None]
        yield head.unembed(config, target, both, hidden), valid & (segments[:, 1:] != PADDING)
        feature = jnp.roll(hidden, 1, axis=1).astype(feature.dtype)


def eagle1(
    config: EagleConfig,
    target: LanguageModel,
    *,
    token_weight: float = 0.1,
    noise: float = 0.1,
    divergence: Divergence = forward_kl,
    dtype: Any = "bfloat16",
) -> Objective:
    """The next feature by regression (smooth L1), and the token that it stands for.

    Args:
      config, target, dtype: as for `eagle3`.
      token_weight: of the divergence beside the regression (0.1 in the paper).
      noise: half the width of the uniform noise on the features, against errors that add up in decoding.
      divergence: of the head's distribution from the target's.
    """

    def objective(params: PyTree, lesson: tuple[Batch, PyTree]) -> tuple[Array, dict[str, Array]]:
        batch, teacher = lesson
        said = teach(target, teacher, batch)
        rows, length = batch.tokens[:, :-1].shape
        n = length - 1
        both = Params(target=teacher, draft=_cast(params, dtype))
        segments = batch.segments[:, :length]
        feature = said.output.hidden[:, :n]
        # The noise is a function of the batch, so that a run that was killed continues bit for bit.
        key = jax.random.fold_in(jax.random.key(0), jnp.sum(batch.tokens))
        feature = feature + jax.random.uniform(key, feature.shape, feature.dtype, -noise, noise)
        hidden, _ = head.forward(
            config,
            target,
            both,
            feature,
            batch.tokens[:, 1:length],
            in_documents(segments[:, :n]),
            config.init_cache(rows, n, dtype),
        )
        drafted, wanted = head.unembed(config, target, both, hidden), said.logits[:, 1:]
        valid = segments[:, :n] == segments[:, 1:]
        error = jnp.abs(hidden.astype(jnp.float32) - said.output.hidden[:, 1:].astype(jnp.float32))
        smooth = jnp.mean(jnp.where(error < 1, 0.5 * error**2, error - 0.5), axis=-1)
        regression = _masked_mean(smooth, valid)
        token = _masked_mean(divergence(wanted, drafted), valid)
        figures = {
            "regression": regression,
            "token": token,
            "accept_1": _agreement(config, both, drafted, jnp.argmax(wanted, axis=-1), valid),
        }
        return regression + token_weight * token, figures

    return objective


Heads = Callable[[PyTree, Array], Array]
"""(params, hidden [B, L, E]) -> logits f32[B, L, H, V] of H Medusa heads."""


def medusa(
    heads: Heads, target: LanguageModel, *, divergence: Divergence = forward_kl, dtype: Any = "bfloat16"
) -> Objective:
    """Head i learns the target's distribution of the token i + 2 after the one that it reads; 0.8**i is its weight.

    Args:
      heads: of the model to train.
      target, divergence, dtype: as for `eagle3`.
    """

    def objective(params: PyTree, lesson: tuple[Batch, PyTree]) -> tuple[Array, dict[str, Array]]:
        batch, teacher = lesson
        said = teach(target, teacher, batch)
        drafted = heads(_cast(params, dtype), said.output.hidden)
        length, count = drafted.shape[1], drafted.shape[2]
        segments, total, figures = batch.segments, jnp.float32(0), {}
        for i in range(count):
            n = length - 1 - i
            ours, wanted = drafted[:, :n, i], said.logits[:, 1 + i :]
            # The target says token t + 2 + i from what is one document up to t + 1 + i.
            valid = segments[:, :n] == segments[:, 1 + i : length]
            loss = _masked_mean(divergence(wanted, ours), valid)
            same = (jnp.argmax(ours, axis=-1) == jnp.argmax(wanted, axis=-1)).astype(jnp.float32)
            total = total + DECAY**i * loss
            figures[f"loss_{i + 1}"] = loss
            figures[f"accept_{i + 1}"] = _masked_mean(same, valid)
        return total / sum(DECAY**i for i in range(count)), figures

    return objective


def feature_layers(target: ModelConfig) -> tuple[int, ...]:
    """The layers whose outputs an EAGLE-3 head reads: the published choice, or the thirds of a shallow target.

    >>> feature_layers(ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=32, num_heads=1))
    (1, 15, 28)
    """
    count = target.num_layers
    if count >= 12:
        return (1, count // 2 - 1, count - 4)
    return tuple(sorted({max(count * i // 3 - 1, 0) for i in (1, 2, 3)}))


def _unembed(target: ModelConfig, params: PyTree) -> Array:
    return params["embed" if target.tie_embeddings else "unembed"].astype(jnp.float32)


def from_target(
    config: LayeredHead, target: ModelConfig, params: PyTree, ids: Array | None, seed: int
) -> PyTree:
    """First params of a head, in float32: its target's last norm and unembedding where it has them, its target's last
    feature passed through, and the rest random. `ids` i32[W] are its draft vocabulary, None: all tokens."""
    made = init_params(config, jax.random.key(seed))
    made.pop("ids", None)
    if "norm" in made:
        made["norm"] = jnp.array(params["norm"], jnp.float32)
    if config.own_unembed:
        unembed = _unembed(target, params)
        made["unembed"] = jnp.array(unembed if ids is None else unembed[ids])
    size = target.hidden_size
    made["fc"] = made["fc"].at[:, -size:].add(jnp.eye(size))
    return made


def new_eagle3(
    target: ModelConfig,
    params: PyTree,
    *,
    ids: np.ndarray | None = None,
    layers: Sequence[int] | None = None,
    intermediate_size: int | None = None,
    steps: int = 5,
    divergence: Divergence,
    seed: int = 0,
) -> Apprentice:
    """An EAGLE-3 head, begun from its target; see `from_target`.

    Args:
      target, params: the model and its weights.
      ids: i32[W]; tokens of the draft vocabulary, default: all.
      layers: see `feature_layers`.
      intermediate_size: of the head's MLP, default: the target's.
      steps, divergence: see `eagle3`.
      seed: of the random rest.
    """
    config = EagleConfig(
        version=3,
        layer=layers_like(target, intermediate_size),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size if ids is None else len(ids),
        feature_layers=tuple(feature_layers(target) if layers is None else layers),
    )
    chosen = None if ids is None else jnp.asarray(ids, jnp.int32)
    init = functools.partial(from_target, config, target, params, chosen, seed)
    return _eagle3(target, config, init, chosen, steps, divergence)


def eagle3_again(
    target: ModelConfig, config: EagleConfig, params: PyTree, *, steps: int = 5, divergence: Divergence
) -> Apprentice:
    """An EAGLE-3 head that has been trained before, by whomever, and learns on.

    Args:
      target: the model that it drafts for.
      config, params: of the head, as `hub.load_eagle` gives them.
      steps, divergence: see `eagle3`.
    """

    def init() -> PyTree:
        # Copies, which an optimizer may overwrite.
        trained = {name: part for name, part in params.items() if name != "ids"}
        return jax.tree.map(lambda x: jnp.array(x, jnp.float32), trained)

    return _eagle3(target, config, init, params.get("ids"), steps, divergence)


def _eagle3(
    target: ModelConfig,
    config: EagleConfig,
    init: Callable[[], PyTree],
    ids: Array | None,
    steps: int,
    divergence: Divergence,
) -> Apprentice:
    model = language_model(target, dtype="bfloat16", feature_layers=config.feature_layers)
    objective = eagle3(config, model, ids=ids, steps=steps, divergence=divergence)
    return Apprentice(config=config, init=init, objective=objective, panels=panels_of(steps), ids=ids)


def new_eagle1(
    target: ModelConfig, *, intermediate_size: int | None = None, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """An EAGLE-1 head; its arguments are those of `new_eagle3`."""
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
        objective=eagle1(config, language_model(target, dtype="bfloat16"), divergence=divergence),
        panels={"loss": ("regression", "token"), "acceptance": ("accept_1",)},
    )


def new_medusa(
    target: ModelConfig, params: PyTree, *, count: int = 4, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """`count` Medusa heads of one block each, which begin as the target's own unembedding (2401.10774, section 2.2)."""
    config = MedusaConfig(
        num_heads=count, num_layers=1, hidden_size=target.hidden_size, vocab_size=target.vocab_size
    )

    def init() -> PyTree:
        made = init_params(config, jax.random.key(seed))
        for one in made["heads"]:
            one["unembed"] = jnp.array(_unembed(target, params))
            one["blocks"][0]["weight"] = jnp.zeros_like(one["blocks"][0]["weight"])
        return made

    def all_heads(trained: PyTree, hidden: Array) -> Array:
        rows, length, size = hidden.shape
        made = medusa_layers.logits(trained, hidden.reshape(rows * length, 1, size), count)
        return made.reshape(rows, length, count, -1)

    objective = medusa(all_heads, language_model(target, dtype="bfloat16"), divergence=divergence)
    return Apprentice(config=config, init=init, objective=objective, panels=panels_of(count))
