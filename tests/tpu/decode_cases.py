"""Functions that compile the whole decode step of published models in bfloat16: draft, forward, verify, emit."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh

from mars_jax import drafters, verify
from mars_jax.core.controls import make_controls
from mars_jax.core.decode import run, speculative_decoder
from mars_jax.core.drafter import Drafter
from mars_jax.core.types import DecodeState, LanguageModel, Params, Prompts, PyTree, keys_from_seeds
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.lab.planning.pair_programs import abstract_state
from mars_jax.models import ModelConfig, language_model
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.shardings import AnyConfig, abstract_params, params_shardings
from tests.tpu import aot

BUFFER = 2048
"""Tokens of prompt and output together."""


class Case(NamedTuple):
    name: str
    batch: int
    branching: tuple[int, ...]  # of the draft model's tree; () is plain autoregression


CASES = (
    Case("autoregressive", 1, ()),
    Case("chain", 8, (1,) * 7),
    Case("tree", 1, (4, 2, 2, 1)),
)


TREE = drafters.Dynamic(top_k=10, depth=7, nodes=60)
"""The tree of the published results."""


def shortened(name: str, layers: int) -> ModelConfig:
    return dataclasses.replace(CONFIGS[name], num_layers=layers, windows=())


def model(config: ModelConfig) -> LanguageModel:
    return language_model(config, dtype="bfloat16")


def weights(config: AnyConfig, on: Mesh) -> PyTree:
    return abstract_params(config, "bfloat16", shardings=params_shardings(config, on))


def compile_step(case: Case, generation: str, chips: int, *, layers: int) -> dict[str, Any]:
    """Compile the loop of Llama-3.1-8B, drafted by Llama-3.2-1B or without a draft, both shortened to `layers`."""
    on = aot.mesh(generation, devices=chips)
    target, small = shortened("llama-3.1-8b", layers), shortened("llama-3.2-1b", layers)
    params = Params(target=weights(target, on))
    drafter = drafters.none()
    if case.branching:
        params = params._replace(draft=weights(small, on))
        drafter = drafters.language_model(model(small), tree=case.branching)
    return compile_loop(target, drafter, params, case.batch, generation, on)


def eagle_pair(target: ModelConfig, on: Mesh, **shape: Any) -> tuple[Drafter, Params]:
    """Return an EAGLE-3 head of the published shape as a drafter, and the weights of target and head."""
    head = EagleConfig.outline(target)
    drafter = drafters.eagle(head, model(target), 5, cache_dtype="bfloat16", **shape)
    return drafter, Params(target=weights(target, on), draft=weights(head, on))


def compile_eagle(name: str, generation: str, chips: int, *, layers: int) -> dict[str, Any]:
    """Compile the loop of a target, shortened to `layers`, with an EAGLE-3 head at batch 1."""
    on, target = aot.mesh(generation, devices=chips), shortened(name, layers)
    drafter, params = eagle_pair(target, on, tree=TREE)
    return compile_loop(target, drafter, params, 1, generation, on)


def eagle_loop(*, layers: int, batch: int, tree: Any, slots: int = BUFFER) -> tuple[str, int, int]:
    """Compile the loop of Llama-3.1-8B with an EAGLE-3 head on four v5e.

    Return the program, the bytes of its temporaries, and the bytes of one device's part of the embedding.
    """
    on, target = aot.mesh("v5e", devices=4), shortened("llama-3.1-8b", layers)
    drafter, params = eagle_pair(target, on, tree=tree)
    compiled = lower_loop(target, drafter, params, on, batch, slots).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None
    return text, memory.temp_size_in_bytes, target.vocab_size * target.hidden_size * 2 // 4


def lower_loop(
    target: ModelConfig, drafter: Drafter, params: Params, on: Mesh, batch: int, context: int
) -> jax.stages.Lowered:
    """Lower `decode.run`, the loop over the step, for rows of `context` tokens."""
    decoder = speculative_decoder(model(target), drafter, verify.mars())
    state = abstract_state(decoder, params, verify.mars(), on, batch, context)
    with jax.set_mesh(on):
        return run.lower(decoder, params, state)


def prompt(context: int) -> str:
    """Compile the program that reads a prompt: Llama-3.2-1B of two layers with an EAGLE-3 head on four v5e."""
    on, target = aot.mesh("v5e", devices=4), shortened("llama-3.2-1b", 2)
    drafter, params = eagle_pair(target, on)
    decoder = speculative_decoder(model(target), drafter, verify.mars())

    def start(params: Params, tokens: Array, lengths: Array) -> DecodeState:
        controls, keys = make_controls(1, limit=context), keys_from_seeds(jnp.zeros(1, jnp.uint32))
        return decoder.init(params, Prompts(tokens, lengths, controls, verify.mars(), keys))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, context), (1,))]
    with jax.set_mesh(on):
        text = jax.jit(start).lower(params, *aot.abstract(shapes, on)).compile().as_text()
    assert text is not None
    return text


def compile_loop(
    target: ModelConfig, drafter: Drafter, params: Params, batch: int, generation: str, on: Mesh
) -> dict[str, Any]:
    """Compile `decode.run`, the loop over the step, with the state donated."""
    lowered = lower_loop(target, drafter, params, on, batch, BUFFER)
    report = aot.compile_program(lowered)
    return report | {"hbm_share": round(aot.held_bytes(report) / aot.hbm_bytes(generation), 3)}
