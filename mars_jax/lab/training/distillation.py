"""Train a drafter for a target: EAGLE and Medusa heads on its features, small language models on its distributions.

Sources: see `training.heads` and `training.objectives`. W draft vocabulary. Oracle: the acceptance that a decode
with the exported drafter reaches (tests/lab/commands/test_distill.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from mars_jax.core.errors import MarsError
from mars_jax.core.mesh import names_of, size_of
from mars_jax.core.types import PyTree
from mars_jax.lab.training import block_training, data, head_training
from mars_jax.lab.training.features import Feed
from mars_jax.lab.training.loop import Objective, fit
from mars_jax.lab.training.objectives import Divergence, predict
from mars_jax.lab.training.recipe import DECAY, muon, plot
from mars_jax.models import dflash_head as block_head
from mars_jax.models import eagle_head, medusa_layers
from mars_jax.models.config import ModelConfig
from mars_jax.models.dflash_head import DFlashConfig
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.heads import layers_like
from mars_jax.models.medusa_layers import MedusaConfig
from mars_jax.models.transformer import init_params, language_model
from mars_jax.placement import hosts


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
        layer=layers_like(target, intermediate_size),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size if ids is None else len(ids),
        feature_layers=layers,
    )
    chosen = None if ids is None else jnp.asarray(ids, jnp.int32)

    def init() -> PyTree:
        made = eagle_head.init_params(config, jax.random.key(seed))
        made.pop("ids", None)
        unembed = params["embed" if target.tie_embeddings else "unembed"].astype(jnp.float32)
        made["unembed"] = jnp.array(unembed if chosen is None else unembed[chosen])
        made["norm"] = jnp.array(params["norm"], jnp.float32)
        size = target.hidden_size
        made["fc"] = made["fc"].at[:, -size:].add(jnp.eye(size))
        return made

    return _eagle3(target, config, init, chosen, steps, divergence)


def eagle3_again(
    target: ModelConfig,
    config: EagleConfig,
    params: PyTree,
    *,
    steps: int = 5,
    divergence: Divergence,
) -> Apprentice:
    """An EAGLE-3 head that has been trained before, by whomever, and learns on.

    Args:
      target: the model that it drafts for.
      config, params: of the head, as `hub.load_eagle` gives them.
      steps, divergence: see `heads.eagle3`.
    """

    def init() -> PyTree:
        return {name: _trainable(part) for name, part in params.items() if name != "ids"}

    return _eagle3(target, config, init, params.get("ids"), steps, divergence)


def _trainable(tree: PyTree) -> PyTree:
    """Copies in float32, which an optimizer may overwrite."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), tree)


def _eagle3(
    target: ModelConfig,
    config: EagleConfig,
    init: Callable[[], PyTree],
    ids: jax.Array | None,
    steps: int,
    divergence: Divergence,
) -> Apprentice:
    model = language_model(target, dtype="bfloat16", feature_layers=config.feature_layers)
    return Apprentice(
        config=config,
        init=init,
        objective=head_training.eagle3(config, model, ids=ids, steps=steps, divergence=divergence),
        panels=_panels(steps),
        ids=ids,
    )


def eagle1(
    target: ModelConfig, *, intermediate_size: int | None = None, divergence: Divergence, seed: int = 0
) -> Apprentice:
    """An EAGLE-1 head; its arguments are those of `eagle3`."""
    config = EagleConfig(
        version=1,
        layer=layers_like(target, intermediate_size),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=target.vocab_size,
        own_unembed=False,
    )

    def init() -> PyTree:
        made = eagle_head.init_params(config, jax.random.key(seed))
        size = target.hidden_size
        made["fc"] = made["fc"].at[:, -size:].add(jnp.eye(size))
        return made

    return Apprentice(
        config=config,
        init=init,
        objective=head_training.eagle1(
            config, language_model(target, dtype="bfloat16"), divergence=divergence
        ),
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
        made = medusa_layers.init_params(config, jax.random.key(seed))
        unembed = params["embed" if target.tie_embeddings else "unembed"]
        for head in made["heads"]:
            head["unembed"] = jnp.array(unembed, jnp.float32)
            head["blocks"][0]["weight"] = jnp.zeros_like(head["blocks"][0]["weight"])
        return made

    def all_heads(trained: PyTree, hidden: jax.Array) -> jax.Array:
        rows, length, size = hidden.shape
        made = medusa_layers.logits(trained, hidden.reshape(rows * length, 1, size), count)
        return made.reshape(rows, length, count, -1)

    return Apprentice(
        config=config,
        init=init,
        objective=head_training.medusa(
            all_heads, language_model(target, dtype="bfloat16"), divergence=divergence
        ),
        panels=_panels(count),
    )


def block_layers(target: ModelConfig, count: int = 5) -> tuple[int, ...]:
    """The layers whose outputs a DFlash head reads: `count` spread as published, or the thirds of a shallow target.

    >>> block_layers(ModelConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_layers=36, num_heads=1))
    (1, 9, 17, 25, 33)
    """
    if target.num_layers < 12:
        return feature_layers(target)
    return tuple(round(1 + i * (target.num_layers - 4) / max(count - 1, 1)) for i in range(count))


def dflash(
    target: ModelConfig,
    params: PyTree,
    *,
    ids: np.ndarray | None = None,
    layers: Sequence[int] | None = None,
    depth: int = 5,
    block_size: int = 16,
    mask_token: int | None = None,
    from_anchor: bool = False,
    markov_rank: int = 0,
    confidence: bool = False,
    intermediate_size: int | None = None,
    divergence: Divergence,
    seed: int = 0,
) -> Apprentice:
    """A DFlash head, begun from its target: its last norm, its last feature passed through, its embeddings shared.

    Args:
      target, params, ids, seed: as for `eagle3`.
      layers: of the target, default: `block_layers`.
      depth: layers of the head.
      block_size, from_anchor, markov_rank, confidence: see `DFlashConfig`.
      mask_token: default: the token that begins a text, or ends one.
      intermediate_size: of the layers' MLPs, default: the target's.
      divergence: see `blocks.dflash`.
    """
    layers = tuple(block_layers(target) if layers is None else layers)
    if mask_token is None:
        known = (target.bos_token_id, *target.eos_token_ids)
        mask_token = next((token for token in known if token is not None), 0)
    size = target.hidden_size
    config = DFlashConfig(
        layer=layers_like(target, intermediate_size, family="qwen3", qk_norm=True, num_layers=depth),
        target_hidden_size=size,
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
    chosen = None if ids is None else jnp.asarray(ids, jnp.int32)

    def init() -> PyTree:
        made = block_head.init_params(config, jax.random.key(seed))
        made.pop("ids", None)
        made["norm"] = jnp.array(params["norm"], jnp.float32)
        made["fc"] = made["fc"].at[:, -size:].add(jnp.eye(size))
        if chosen is not None:
            unembed = params["embed" if target.tie_embeddings else "unembed"].astype(jnp.float32)
            made["unembed"] = jnp.array(unembed[chosen])
        if markov_rank:  # it begins as no correction at all
            made["markov_out"] = jnp.zeros_like(made["markov_out"])
        return made

    model = language_model(target, dtype="bfloat16", feature_layers=layers)
    return Apprentice(
        config=config,
        init=init,
        objective=block_training.dflash(config, model, ids=chosen, divergence=divergence),
        panels=_panels(config.drafts),
        ids=chosen,
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
    mesh: Mesh | None = None,
) -> PyTree:
    """Train an apprentice; killed and called again with the same arguments it continues bit for bit.

    Args:
      apprentice: from one of the functions above.
      teacher: the target's params, on the mesh if there is one.
      streams: the text.
      work: directory of checkpoints, log.jsonl and plot.png.
      tokens: to train on.
      step_tokens, length: rows of `length` tokens, `step_tokens` in all.
      learning_rate: the peak; see `recipe.muon`.
      seed: of the order of the text.
      devices: to train on, the rows of a step divided among them; default: one.
      mesh: instead of them, the target divided over its axis `model`, as it was loaded, and the rows over `data`. The
        apprentice is whole on every device.

    Returns:
      The trained params in float32, `ids` among them where there is a draft vocabulary.

    Raises:
      MarsError: the rows cannot be divided among the devices, or the text is shorter than a row.
    """
    devices = list(devices or jax.devices()[:1])
    rows = max(1, step_tokens // length)
    parts = len(devices) if mesh is None else size_of("data", mesh)
    if rows % parts:
        raise MarsError(
            f"{rows} rows of {length} tokens cannot be divided among {parts} devices: choose a number of tokens "
            "per step that makes a multiple of them."
        )
    by_row = everywhere = SingleDeviceSharding(devices[0])
    over = mesh
    if mesh is None and len(devices) > 1:
        over = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    if over is not None:
        names = ("data",) if mesh is None else names_of("data", over)
        by_row = NamedSharding(over, PartitionSpec(names or None))
        everywhere = NamedSharding(over, PartitionSpec())
    steps = max(1, round(tokens / (rows * length)))
    batches = data.batches(streams, steps=steps, tokens=rows * length, lengths={length: 1.0}, seed=seed)
    # Cast once: the copy that the objective reads.
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), teacher)
    if mesh is None:
        low = jax.device_put(low, everywhere)

    def place(tree: PyTree, sharding: Any) -> PyTree:
        def one(x: Any) -> Array:
            if isinstance(x, Array) and not x.is_fully_addressable:  # of the target's, over several processes
                return jax.jit(lambda whole: whole, out_shardings=sharding)(x)
            return hosts.put(x, sharding)

        return jax.tree.map(one, tree)

    work = Path(work)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        params = fit(
            apprentice.objective,
            muon(learning_rate, steps),
            lambda: place(apprentice.init(), everywhere),
            lambda step: (place(batches(step), by_row), low),
            steps=steps,
            directory=work,
            tokens_per_step=rows * length,
            decay=DECAY,
            description="distilling",
        )
    plot(work / "log.jsonl", work / "plot.png", apprentice.panels, tokens=rows * length)
    return params if apprentice.ids is None else {**params, "ids": apprentice.ids}


def train_on_features(
    apprentice: Apprentice,
    teacher: PyTree,
    feed: Feed,
    work: str | os.PathLike[str],
    *,
    tokens: float,
    learning_rate: float = 1e-3,
) -> PyTree:
    """`train` of an EAGLE-3 head on what its target said before; figures of held-out rows are in `held_out.jsonl`.

    Args:
      apprentice: from `eagle3`.
      teacher: the target's params, of which its embedding is read.
      feed: the batches.
      work, learning_rate: as for `train`.
      tokens: to train on, padding among them. A run that was killed may be given another number until its rate falls.

    Raises:
      MarsError: a run goes on with other tokens and its rate has begun to fall, or more are done.
    """
    low = {"embed": teacher["embed"].astype(jnp.bfloat16)}
    figures = jax.jit(lambda params, batch: apprentice.objective(params, (batch, low))[1])
    held_out = feed.held_out()

    def measure(params: PyTree) -> dict[str, float]:
        found = [figures(params, jax.tree.map(jnp.asarray, batch)) for batch in held_out]
        mean = {name: float(np.mean([f[name] for f in found])) for name in found[0]}
        return mean | {"tau": tau(mean)}

    work, steps = Path(work), max(1, round(tokens / feed.step_tokens))
    params = fit(
        apprentice.objective,
        muon(learning_rate, steps),
        apprentice.init,
        lambda step: (feed.batch(step), low),
        steps=steps,
        directory=work,
        tokens_per_step=feed.step_tokens,
        decay=DECAY,
        save_every=25,
        held_out=measure if held_out else None,
        description="distilling",
    )
    plot(work / "log.jsonl", work / "plot.png", apprentice.panels, tokens=feed.step_tokens)
    return params if apprentice.ids is None else {**params, "ids": apprentice.ids}


def tau(figures: Mapping[str, float]) -> float:
    """Tokens of a step with a chain of drafts, of which the i-th is right with `accept_i` where those before it are.

    >>> tau({"accept_1": 0.5, "accept_2": 0.5, "loss": 3.0})
    1.75
    """
    count = sum(name.startswith("accept_") for name in figures)
    return 1 + float(np.cumprod([figures[f"accept_{i}"] for i in range(1, count + 1)]).sum())


def _panels(steps: int) -> dict[str, tuple[str, ...]]:
    names = range(1, steps + 1)
    return {"loss": tuple(f"loss_{i}" for i in names), "acceptance": tuple(f"accept_{i}" for i in names)}
