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
from mars_jax.types import Params, keys_from_seeds
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


def weight_spec(path: tuple[Any, ...]) -> P:
    """Megatron's split: heads, hidden units and vocabulary over `model`; the rest on every chip."""
    name = path[-1].key
    if name in ("q", "k", "v", "gate", "up", "unembed"):
        return P("model", None)
    return P(None, "model") if name in ("o", "down") else P()


def compile_step(case: Case, generation: str, chips: int, *, layers: int | None = None) -> dict[str, Any]:
    """Compile `decode.run`, the loop over the step, with the state donated. `layers` shortens both models."""
    on = aot.mesh(generation, devices=chips)

    def model(config: ModelConfig) -> tuple[Any, Any]:
        config = config if layers is None else dataclasses.replace(config, num_layers=layers, windows=())
        shapes = jax.eval_shape(lambda: init_params(config, jax.random.key(0), "bfloat16"))
        placed = jax.tree.map_with_path(lambda path, x: aot.abstract(x, on, weight_spec(path)), shapes)
        return language_model(config, dtype="bfloat16"), placed

    target, target_params = model(TARGET)
    drafter, draft_params = drafters.none(), ()
    if case.branching:
        small, draft_params = model(DRAFT)
        drafter = drafters.language_model(small, tree=case.branching)
    decoder = speculative_decoder(target, drafter, verify.mars())
    params = Params(target=target_params, draft=draft_params)

    def start() -> Any:
        seeds = keys_from_seeds(jnp.arange(case.batch, dtype=jnp.uint32))
        prompts, lengths = jnp.zeros((case.batch, BUFFER), jnp.int32), jnp.full((case.batch,), 64, jnp.int32)
        controls = make_controls(case.batch, limit=BUFFER, stop_tokens=(128001, 128009))
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
