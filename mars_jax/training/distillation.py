"""Train a drafter for a target: EAGLE and Medusa heads on its features, small language models on its distributions.

Sources: see `training.heads` and `training.objectives`. W draft vocabulary. Oracle: the acceptance that a decode
with the exported drafter reaches (tests/cli/test_distill.py).
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec, SingleDeviceSharding

from mars_jax.core.errors import MarsError
from mars_jax.core.types import PyTree
from mars_jax.models import eagle, medusa
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle import EagleConfig
from mars_jax.models.medusa import MedusaConfig
from mars_jax.models.transformer import init_params, language_model
from mars_jax.training import data, heads
from mars_jax.training.loop import Objective, fit
from mars_jax.training.objectives import Divergence, predict
from mars_jax.training.recipe import muon, plot


@dataclasses.dataclass(frozen=True, kw_only=True)
class Apprentice:
    """A drafter in training: its static config, its first params (float32), and what training minimises."""

    config: Any
    init: Callable[[], PyTree]
    objective: Objective  # of (params, (batch, target params))
    panels: dict[str, tuple[str, ...]]  # of the plot
    ids: Any = None  # i32[W]; of an EAGLE-3 head with a draft vocabulary


def feature_layers(target: ModelConfig) -> tuple[int, ...]:
    """The layers whose outputs an EAGLE-3 head reads: the published choice, or the thirds of a shallow target.

    >>> feature_layers(ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=32, num_heads=1))
    (1, 15, 28)
    """
    count = target.num_layers
    if count >= 12:
        return (1, count // 2 - 1, count - 4)
    return tuple(sorted({max(count * i // 3 - 1, 0) for i in (1, 2, 3)}))


def draft_vocabulary(
    streams: Sequence[data.Stream], size: int, vocab_size: int, always: Sequence[int] = ()
) -> np.ndarray:
    """The `size` tokens that are most frequent in a text, those of `always` among them: i32[size], ascending.

    Args:
      streams: the text; each counts by its weight.
      size: W.
      vocab_size: V of the target.
      always: stop tokens, which a draft should be able to say.

    Raises:
      MarsError: size is not in 1..vocab_size.

    >>> text = data.Stream(np.asarray([3, 3, 1, 5, 5, 5], np.uint16), np.zeros(6, np.int32), 1.0)
    >>> draft_vocabulary([text], 3, 8, always=[7]).tolist()
    [3, 5, 7]
    """
    if not 1 <= size <= vocab_size:
        raise MarsError(f"a draft vocabulary of {size}: expected 1 to {vocab_size}, the target's vocabulary.")
    share = np.zeros(vocab_size)
    for stream in streams:
        counts = np.bincount(stream.tokens, minlength=vocab_size)[:vocab_size]
        share += stream.weight * counts / len(stream.tokens)
    share[list(always)] = np.inf
    return np.sort(np.argsort(-share, kind="stable")[:size]).astype(np.int32)


def eagle3(
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
    """An EAGLE-3 head, begun from its target: its unembedding, its last norm, and its last feature passed through.

    Args:
      target, params: the model and its weights.
      ids: i32[W]; tokens of the draft vocabulary, default: all.
      layers: see `feature_layers`.
      intermediate_size: of the head's MLP, default: the target's.
      steps, divergence: see `heads.eagle3`.
      seed: of the random rest.
    """
    layers = tuple(feature_layers(target) if layers is None else layers)
    config = EagleConfig(
        version=3,
        layer=_layer(target, intermediate_size),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size if ids is None else len(ids),
        feature_layers=layers,
    )
    chosen = None if ids is None else jnp.asarray(ids, jnp.int32)

    def init() -> PyTree:
        made = eagle.init_params(config, jax.random.key(seed))
        made.pop("ids", None)
        unembed = params["embed" if target.tie_embeddings else "unembed"].astype(jnp.float32)
        made["unembed"] = jnp.array(unembed if chosen is None else unembed[chosen])
        made["norm"] = jnp.array(params["norm"], jnp.float32)
        size = target.hidden_size
        made["fc"] = made["fc"].at[:, -size:].add(jnp.eye(size))
        return made

    model = language_model(target, dtype="bfloat16", feature_layers=layers)
    return Apprentice(
        config=config,
        init=init,
        objective=heads.eagle3(config, model, ids=chosen, steps=steps, divergence=divergence),
        panels=_panels(steps),
        ids=chosen,
    )


def eagle1(
    target: ModelConfig, *, intermediate_size: int | None = None, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """An EAGLE-1 head; its arguments are those of `eagle3`."""
    config = EagleConfig(
        version=1,
        layer=_layer(target, intermediate_size),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        own_unembed=False,
    )

    def init() -> PyTree:
        made = eagle.init_params(config, jax.random.key(seed))
        size = target.hidden_size
        made["fc"] = made["fc"].at[:, -size:].add(jnp.eye(size))
        return made

    return Apprentice(
        config=config,
        init=init,
        objective=heads.eagle1(config, language_model(target, dtype="bfloat16"), divergence=divergence),
        panels={"loss": ("regression", "token"), "acceptance": ("accept_1",)},
    )


def medusa_heads(
    target: ModelConfig, params: PyTree, *, count: int = 4, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """`count` Medusa heads of one block each, which begin as the target's own unembedding (2401.10774, section 2.2)."""
    config = MedusaConfig(
        num_heads=count, num_layers=1, hidden_size=target.hidden_size, vocab_size=target.vocab_size
    )

    def init() -> PyTree:
        made = medusa.init_params(config, jax.random.key(seed))
        unembed = params["embed" if target.tie_embeddings else "unembed"]
        for head in made["heads"]:
            head["unembed"] = jnp.array(unembed, jnp.float32)
            head["blocks"][0]["weight"] = jnp.zeros_like(head["blocks"][0]["weight"])
        return made

    def all_heads(trained: PyTree, hidden: jax.Array) -> jax.Array:
        rows, length, size = hidden.shape
        made = medusa.logits(trained, hidden.reshape(rows * length, 1, size), count)
        return made.reshape(rows, length, count, -1)

    return Apprentice(
        config=config,
        init=init,
        objective=heads.medusa(all_heads, language_model(target, dtype="bfloat16"), divergence=divergence),
        panels=_panels(count),
    )


def small_model(
    target: ModelConfig, draft: ModelConfig, first: PyTree | None, *, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """A small language model on the target's distributions (DistillSpec 2310.08461).

    Args:
      target, draft: the configs; one vocabulary.
      first: float32 params to go on from, or None for random ones.
      divergence: of the draft's distribution from the target's.
      seed: of random params.

    Raises:
      MarsError: the vocabularies differ.
    """
    if target.vocab_size != draft.vocab_size:
        raise MarsError(
            f"the draft has a vocabulary of {draft.vocab_size} tokens and the target one of {target.vocab_size}: "
            "distil between models that share a tokenizer."
        )

    def objective(params: PyTree, lesson: tuple[data.Batch, PyTree]):
        batch, teacher = lesson
        tokens, segments = batch.tokens[:, :-1], batch.segments[:, :-1]
        p = jax.lax.stop_gradient(
            predict(language_model(target, dtype="bfloat16"), teacher, tokens, segments)
        )
        low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        q = predict(language_model(draft, dtype="bfloat16"), low, tokens, segments)
        same = (jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)).astype(jnp.float32)
        return jnp.mean(divergence(p, q)), {"accept_1": jnp.mean(same)}

    def init() -> PyTree:
        return init_params(draft, jax.random.key(seed)) if first is None else jax.tree.map(jnp.array, first)

    return Apprentice(
        config=draft,
        init=init,
        objective=objective,
        panels={"loss": ("loss",), "acceptance": ("accept_1",)},
    )


def train(
    apprentice: Apprentice,
    teacher: PyTree,
    streams: Sequence[data.Stream],
    work: str | os.PathLike[str],
    *,
    tokens: float,
    step_tokens: int = 2048,
    length: int = 256,
    learning_rate: float = 1e-3,
    seed: int = 0,
    devices: Sequence[Any] | None = None,
) -> PyTree:
    """Train an apprentice; killed and called again with the same arguments it continues bit for bit.

    Args:
      apprentice: from one of the functions above.
      teacher: the target's params.
      streams: the text.
      work: directory of checkpoints, log.jsonl and plot.png.
      tokens: to train on.
      step_tokens, length: rows of `length` tokens, `step_tokens` in all.
      learning_rate: the peak; see `recipe.muon`.
      seed: of the order of the text.
      devices: to train on, the rows of a step divided among them; default: one.

    Returns:
      The trained params in float32, `ids` among them where there is a draft vocabulary.

    Raises:
      MarsError: the rows cannot be divided among the devices, or the text is shorter than a row.
    """
    devices = list(devices or jax.devices()[:1])
    rows = max(1, step_tokens // length)
    if rows % len(devices):
        raise MarsError(
            f"{rows} rows of {length} tokens cannot be divided among {len(devices)} devices: choose a number of tokens "
            "per step that makes a multiple of them."
        )
    by_row = everywhere = SingleDeviceSharding(devices[0])
    if len(devices) > 1:
        mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
        by_row, everywhere = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    steps = max(1, round(tokens / (rows * length)))
    batches = data.batches(streams, steps=steps, tokens=rows * length, lengths={length: 1.0}, seed=seed)
    # Cast once: the copy that the objective reads.
    low = jax.device_put(jax.tree.map(lambda x: x.astype(jnp.bfloat16), teacher), everywhere)
    work = Path(work)
    params = fit(
        apprentice.objective,
        muon(learning_rate, steps),
        lambda: jax.device_put(apprentice.init(), everywhere),
        lambda step: (jax.device_put(batches(step), by_row), low),
        steps=steps,
        directory=work,
        tokens_per_step=rows * length,
        description="distilling",
    )
    plot(work / "log.jsonl", work / "plot.png", apprentice.panels, tokens=rows * length)
    return params if apprentice.ids is None else {**params, "ids": apprentice.ids}


def _layer(target: ModelConfig, intermediate_size: int | None) -> ModelConfig:
    """A head's one layer: the heads and positions of its target's layers, in Llama's form."""
    return ModelConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_layers=1,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        max_positions=target.max_positions,
        norm_eps=target.norm_eps,
        rope=target.rope,
        activation=target.activation,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def _panels(steps: int) -> dict[str, tuple[str, ...]]:
    names = range(1, steps + 1)
    return {"loss": tuple(f"loss_{i}" for i in names), "acceptance": tuple(f"accept_{i}" for i in names)}
