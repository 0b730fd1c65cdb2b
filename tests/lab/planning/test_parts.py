"""Tests that the decode loop names its parts on every platform."""

import re

import jax
import jax.numpy as jnp
import pytest

from mars_jax import drafters, verify
from mars_jax.core.controls import make_controls
from mars_jax.core.decode import run, speculative_decoder
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.models import ModelConfig, eagle_head, language_model, transformer
from scripts.tpu_schedule.parts import COMPONENTS, PHASES, part

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=4, num_heads=4)


def lowered():
    """Lower the decode loop with the dynamic tree of an EAGLE-3 head."""
    model, head = language_model(CONFIG), eagle_head.EagleConfig.outline(CONFIG)
    tree = drafters.Dynamic(top_k=2, depth=2, nodes=4)
    drafter = drafters.eagle(head, model, tree=tree)
    decoder = speculative_decoder(model, drafter, verify.mars())

    def start(key):
        params = Params(transformer.init_params(CONFIG, key), eagle_head.init_params(head, key))
        keys, lengths = keys_from_seeds(jnp.arange(1, dtype=jnp.uint32)), jnp.full((1,), 2, jnp.int32)
        controls = make_controls(1, limit=64)
        batch = Prompts(jnp.zeros((1, 64), jnp.int32), lengths, controls, verify.mars(), keys)
        return params, decoder.init(params, batch)

    return run.lower(decoder, *jax.eval_shape(start, jax.random.key(0)))


@pytest.mark.slow
def test_every_part_of_the_step_has_operations_and_almost_all_operations_a_part():
    names = re.findall(r'op_name="(jit\(run\)/[^"]*)"', lowered().compile().as_text())
    parts = {part(name) for name in names}
    for phase in PHASES:
        assert any(name and name.split("/")[0] == phase for name in parts), phase
    expected = {f"target/{name}" for name in COMPONENTS if name != "fuse"}
    # The levels of a draft are a separate function until XLA inlines it.
    expected |= {"draft/unembed", "update/attention", "update/mlp", "update/fuse", "commit", "verify", "emit"}
    assert expected <= parts
    body = [part(name) for name in set(names) if "/while/body/" in name]
    assert sum(name is not None for name in body) > 0.95 * len(body)
