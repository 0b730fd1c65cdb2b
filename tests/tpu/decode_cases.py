"""The whole decode step of a Llama-3.1-8B in bfloat16, as a program to compile: draft, forward, verify,
emit."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from mars_jax import drafters, verify
from mars_jax.controls import make_controls
from mars_jax.decode import run, speculative_decoder
from mars_jax.models import ModelConfig, Rope, init_params, language_model
from mars_jax.models.eagle import EagleConfig
from mars_jax.models.eagle import init_params as init_head
from mars_jax.types import Drafter, LanguageModel, Params, keys_from_seeds
from tests.tpu import aot

ROPE = Rope(theta=500000.0, kind="llama3", factor=8.0, original_max_positions=8192)
SHARED = {"vocab_size": 128256, "head_dim": 64, "num_kv_heads": 8, "rope": ROPE, "max_positions": 131072}
TARGET = ModelConfig(
    **SHARED | {"head_dim": 128}, hidden_size=4096, intermediate_size=14336, num_layers=32, num_heads=32
)
DRAFT = ModelConfig(
    **SHARED, hidden_size=2048, intermediate_size=8192, num_layers=16, num_heads=32, tie_embeddings=True
)
"""The sizes of Llama-3.2-1B."""
BUFFER = 2048
"""Tokens of prompt and output together."""


class Case(NamedTuple):
    name: str
    batch: int
    branching: tuple[int, ...]  # of the small model's tree; () is plain autoregression


CASES = (
    Case("autoregressive", 1, ()),
    Case("chain", 8, (1,) * 7),
    Case("tree", 1, (4, 2, 2, 1)),
)
PLACES = (("v5e", 4), ("v6e", 1), ("v5p", 1), ("v4", 2))
"""Generation and devices. 16 GB of weights do not fit in the 16 GiB of one v5e, so there it is spread over
2x2, and over the two cores of a v4."""

TARGET_70B = ModelConfig(
    **SHARED | {"head_dim": 128}, hidden_size=8192, intermediate_size=28672, num_layers=80, num_heads=64
)


class EagleCase(NamedTuple):
    name: str
    target: ModelConfig
    generation: str
    chips: int


EAGLE_CASES = (
    EagleCase("Llama-3.1-8B", TARGET, "v5e", 4),
    EagleCase("Llama-3.3-70B", TARGET_70B, "v5p", 8),
)
TREE = drafters.Dynamic(top_k=10, depth=7, nodes=60)
"""The tree of the published results."""


def weight_spec(path: tuple[Any, ...]) -> P:
    """Megatron's split: heads, hidden units and vocabulary over `model`; the rest on every chip."""
    name = getattr(path[-1], "key", None)
    if name in ("q", "k", "v", "gate", "up", "unembed"):
        return P("model", None)
    return P(None, "model") if name in ("o", "down") else P()


def place(shapes: Any, on: Any) -> Any:
    """Abstract weights over a mesh."""
    return jax.tree.map_with_path(lambda path, x: aot.abstract(x, on, weight_spec(path)), shapes)


def shortened(config: ModelConfig, layers: int | None) -> ModelConfig:
    return config if layers is None else dataclasses.replace(config, num_layers=layers, windows=())


def abstract_model(config: ModelConfig, on: Any) -> tuple[LanguageModel, Any]:
    """A model in bfloat16 and its abstract weights over a mesh."""
    shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), "bfloat16"))
    return language_model(config, dtype="bfloat16"), place(shapes, on)


def compile_step(case: Case, generation: str, chips: int, *, layers: int | None = None) -> dict[str, Any]:
    """The loop with a small model, or without a draft. `layers` shortens both models."""
    on = aot.mesh(generation, devices=chips)
    target, target_params = abstract_model(shortened(TARGET, layers), on)
    drafter, draft_params = drafters.none(), ()
    if case.branching:
        small, draft_params = abstract_model(shortened(DRAFT, layers), on)
        drafter = drafters.language_model(small, tree=case.branching)
    params = Params(target=target_params, draft=draft_params)
    return compile_loop(target, drafter, params, case.batch, generation, on)


def compile_eagle(case: EagleCase, *, layers: int | None = None) -> dict[str, Any]:
    """The loop with an EAGLE-3 head of the published shape, batch 1. `layers` shortens the target."""
    on = aot.mesh(case.generation, devices=case.chips)
    config, count = shortened(case.target, layers), layers or case.target.num_layers
    target, target_params = abstract_model(config, on)
    head = EagleConfig(
        version=3,
        layer=shortened(config, 1),
        target_hidden_size=config.hidden_size,
        draft_vocab_size=32000,
        feature_layers=(1, count // 2 - 1, count - 4) if count > 4 else (0, count // 2, count - 1),
    )
    shapes = jax.eval_shape(lambda: init_head(head, jax.random.key(0), "bfloat16"))
    drafter = drafters.eagle(head, target, tree=TREE, cache_dtype="bfloat16")
    params = Params(target=target_params, draft=place(shapes, on))
    return compile_loop(target, drafter, params, 1, case.generation, on)


def compile_loop(
    target: LanguageModel, drafter: Drafter, params: Params, batch: int, generation: str, on: Any
) -> dict[str, Any]:
    """Compile `decode.run`, the loop over the step, with the state donated."""
    decoder = speculative_decoder(target, drafter, verify.mars())

    def start() -> Any:
        seeds = keys_from_seeds(jnp.arange(batch, dtype=jnp.uint32))
        prompts, lengths = jnp.zeros((batch, BUFFER), jnp.int32), jnp.full((batch,), 64, jnp.int32)
        controls = make_controls(batch, limit=BUFFER, stop_tokens=(128001, 128009))
        return lambda p: decoder.init(p, prompts, lengths, controls, seeds)

    state = jax.eval_shape(start(), params)

    def state_spec(path: tuple[Any, ...], leaf: Any) -> Any:
        cache = any(getattr(key, "name", None) in ("k", "v") for key in path) and leaf.ndim == 4
        return aot.abstract(leaf, on, P(None, None, "model", None) if cache else P())

    state = jax.tree.map_with_path(state_spec, state)
    report = aot.compile_program(run.lower(decoder, params, state))
    held = aot.hbm_bytes(report)
    return {
        "hbm_gib": round(held / 2**30, 2),
        "hbm_share": round(held / aot.HBM_BYTES[generation], 3),
        **report,
    }
