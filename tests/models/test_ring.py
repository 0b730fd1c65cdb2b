"""A prompt's chunk whose rows go around the devices of a mesh, compared with the same chunk on one device."""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.core.types import Visible
from mars_jax.models import ModelConfig, init_params, language_model, ring, shardings, transformer
from mars_jax.models.rope import Rope

SMALL = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_layers": 2, "num_heads": 8, "num_kv_heads": 4,
    "head_dim": 16,
}  # fmt: skip


@pytest.fixture
def as_on_tpu(monkeypatch):
    """Trace as for a TPU, whose kernel falls back on this machine."""
    monkeypatch.setattr(transformer, "on_tpu", lambda: True)
    monkeypatch.setattr(transformer, "RING_ROWS", 8)


def forwards(config, mesh=None, *, bits=None, batch=1, layer_mask=None, **options):
    """Return the outputs of two consecutive chunks, and the number of times rows were sent."""
    model = language_model(config, feature_layers=(0, config.num_layers - 1), **options)
    if layer_mask is not None:
        model = model.with_layers(layer_mask)
    params = init_params(config, jax.random.key(0), scale=0.2)
    if bits is not None:
        params = quantized(config, params, bits)
    elif mesh is not None:
        params = shardings.place(params, config, mesh)
    tokens = jax.random.randint(jax.random.key(1), (batch, 64), 0, config.vocab_size)
    starts = [jnp.full((batch,), first, jnp.int32) for first in (0, 32)]

    def run(params, tokens, first, cache):
        return model.forward(params, tokens, Visible.causal(first, 32), cache)

    cache = model.init_cache(batch, 96)
    with jax.set_mesh(mesh):
        program = jax.jit(run).lower(params, tokens[:, :32], starts[0], cache).compile()
        first = program(params, tokens[:, :32], starts[0], cache)
        second = program(params, tokens[:, 32:], starts[1], first.cache)
    outputs = [(out.hidden, out.features) for out in (first, second)]
    return (outputs, second.cache), program.as_text().count(" collective-permute")


def quantized(config, params, bits):
    with tempfile.TemporaryDirectory() as folder:
        hub.save(folder, config, params, overwrite=True)
        return hub.load(folder, dtype=f"int{bits}").params


GEMMA = {
    "qk_norm": True, "post_norms": True, "windows": (24, None), "local_rope": Rope(theta=1e4),
    "rope": Rope(theta=1e6), "attention_cap": 30.0,
}  # fmt: skip


@pytest.mark.usefixtures("as_on_tpu")
@pytest.mark.parametrize(
    ("changes", "options", "devices"),
    [
        pytest.param({}, {}, 2, marks=pytest.mark.slow),
        ({}, {}, 4),
        pytest.param(GEMMA, {"batch": 2}, 2, marks=pytest.mark.slow),
        pytest.param(GEMMA, {"batch": 2, "attention": "interpret"}, 2, marks=pytest.mark.slow),
        pytest.param(
            {"family": "qwen2", "qkv_bias": True},
            {"bits": 8, "cache_dtype": "int8"},
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param({"head_dim": 32, "intermediate_size": 256}, {"bits": 4}, 2, marks=pytest.mark.slow),
        pytest.param(GEMMA | {"attention_sinks": True}, {}, 2, marks=pytest.mark.slow),
        pytest.param({}, {"layer_mask": ((True, False), (False, True))}, 2, marks=pytest.mark.slow),
    ],
    ids=[
        "plain",
        "four devices",
        "norms and windows",
        "the kernel",
        "8 bits",
        "4 bits",
        "sinks",
        "some sublayers",
    ],
)
def test_a_chunk_is_that_of_one_device(changes, options, devices):
    config = ModelConfig(**SMALL | changes)
    expected, _ = forwards(config, **options)
    actual, sent = forwards(config, shardings.parse_mesh(f"model={devices}"), **options)
    assert sent > 0
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-4)


@pytest.mark.usefixtures("as_on_tpu")
@pytest.mark.parametrize(
    ("changes", "axes"),
    [
        ({}, "data=2,model=2"),  # a loop over chunks ends with its rows, not on all devices at once
        ({}, "expert=2,model=2"),  # heads are ordered differently from the devices that rows would go to
        ({"num_kv_heads": 2}, "model=4"),  # each of the four devices has both heads
        ({"o_bias": True}, "model=2"),  # every device would add the bias
        ({"num_experts": 4, "experts_per_token": 2, "expert_size": 32}, "model=2"),
    ],
    ids=["rows are divided", "another order", "heads are not", "a bias after the sum", "experts"],
)
def test_other_meshes_and_layers_do_without(changes, axes):
    _, sent = forwards(
        ModelConfig(**SMALL | {"num_layers": 1} | changes), shardings.parse_mesh(axes), batch=2
    )
    assert sent == 0


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_tpu")
def test_a_text_goes_on_from_a_prompt_that_went_around(monkeypatch):
    """Use a head that reads its target's layers, through the same entry point as the command."""
    mesh, sent = shardings.parse_mesh("model=2"), []
    passed = ring._passed
    monkeypatch.setattr(ring, "_passed", lambda *args: sent.append(1) or passed(*args))

    def tokens(rows):
        monkeypatch.setattr(transformer, "RING_ROWS", rows)
        jax.clear_caches()
        target = mj.load("tiny/target", dtype="float32", mesh=mesh, prefill_chunk=32)
        prompt = "Once upon a time there was a little girl who loved to play in the garden with her dog. "
        output = mj.generate(target, "eagle:tiny/eagle3", [2 * prompt], max_new_tokens=24, temperature=0.0)
        return output.tokens[0]

    expected = tokens(1 << 20)
    assert not sent
    assert tokens(8) == expected and sent
