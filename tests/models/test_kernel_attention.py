"""A model with the attention kernel in Pallas' interpreter: the tokens of the model without it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import dispatch
from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, Prompts, Visible, keys_from_seeds
from mars_jax.models import ModelConfig, init_params, language_model, shardings, transformer
from mars_jax.models import attention as attention_module
from mars_jax.utils.errors import MarsError
from tests.helpers import committed, ragged
from tests.helpers.small_models import SIZES

BATCH, BUFFER = 4, 24
CONFIG = ModelConfig(num_layers=2, windows=(None, 5), attention_cap=20.0, **SIZES)
SINKS = dataclasses.replace(CONFIG, attention_sinks=True)
DRAFTERS = {
    "ngram": lambda draft: drafters.ngram(3),
    "chain": lambda draft: drafters.language_model(draft, 3),
    "tree": lambda draft: drafters.language_model(draft, tree=(2, 2)),
    "dynamic tree": lambda draft: drafters.language_model(draft, tree=drafters.Dynamic(3, 2, 6)),
}


@functools.cache
def params(config):
    drawn, noise = (
        init_params(config, jax.random.key(seed), scale=scale) for seed, scale in ((0, 0.3), (1, 0.1))
    )
    return Params(target=drawn, draft=jax.tree.map(lambda x, y: x + y if x.ndim > 1 else x, drawn, noise))


def decoded(name, attention, mesh=None, config=CONFIG):
    model = language_model(config, attention=attention)
    decoder = decode.speculative_decoder(model, DRAFTERS[name](model), verify.mars(), prefill_chunk=8)
    prompts, lengths = ragged([1, 12, 7, 3], BUFFER, config.vocab_size)
    rows = (prompts, lengths, make_controls(BATCH, limit=BUFFER), verify.for_rows(verify.mars(), BATCH))
    rows = Prompts(*rows, keys_from_seeds(jnp.arange(BATCH, dtype=jnp.uint32)))
    weights = params(config)
    if mesh is not None:
        weights = Params(*(shardings.place(part, config, mesh) for part in weights[:2]))
        rows = jax.device_put(rows, shardings.state_shardings(rows, mesh))
    quick = {"xla_backend_optimization_level": 0}
    with jax.set_mesh(mesh):
        state = decode.start_ready.lower(decoder, weights, rows).compile(quick)(weights, rows)
        program = decode.run.lower(decoder, weights, state).compile(quick)
        state, stats = program(weights, state)
    return committed(state), stats.steps.tolist(), program.as_text()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "config"), [*((name, CONFIG) for name in DRAFTERS), ("tree", SINKS)])
def test_the_tokens_are_those_without_the_kernel(name, config):
    tokens, steps, _ = decoded(name, "interpret", config=config)
    expected, expected_steps, _ = decoded(name, "xla", config=config)
    assert tokens == expected and steps == expected_steps
    assert all(len(row) == BUFFER for row in tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "config"), [("data=2,model=2", CONFIG), ("model=4", CONFIG), ("data=2,model=2", SINKS)]
)
def test_on_a_mesh_each_device_attends_with_its_own_heads(axes, config):
    """Divide two heads over two devices; with four devices, every device has both heads."""
    mesh = shardings.parse_mesh(axes)
    tokens, steps, with_kernel = decoded("tree", "interpret", mesh, config)
    expected, expected_steps, without = decoded("tree", "xla", mesh, config)
    assert tokens == expected and steps == expected_steps
    if config is SINKS:
        assert tokens == decoded("tree", "xla", config=config)[0]
    collectives = re.compile(r" (?:all-reduce|all-gather|all-to-all)(?:-start)?\(")
    if axes == "data=2,model=2":
        assert len(collectives.findall(with_kernel)) == len(collectives.findall(without))


def lowered(attention, platform, *, rows=2, nodes=4, kv_heads=2, slots=300, differentiated=False):
    """Return the program text of one forward for a platform."""
    config = ModelConfig(
        num_layers=2, head_dim=128, **SIZES | {"num_heads": kv_heads, "num_kv_heads": kv_heads}
    )
    model = language_model(config, dtype="bfloat16", attention=attention)
    first, tokens = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows,), (rows, nodes)))
    params = jax.eval_shape(lambda: init_params(config, jax.random.key(0), "bfloat16"))
    cache = jax.eval_shape(lambda: model.init_cache(rows, slots))

    def forward(params, tokens, cache, first):
        return model.forward(params, tokens, Visible.causal(first, nodes), cache)

    if differentiated:
        inference = forward
        forward = jax.grad(lambda *args: jnp.sum(inference(*args).hidden.astype(jnp.float32)))
    traced = jax.jit(forward).trace(params, tokens, cache, first)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_on_tpu_it_is_one_kernel_a_layer_without_a_mask_and_elsewhere_none():
    kernel, xla = (lowered(attention, "tpu") for attention in ("pallas", "xla"))
    # The layers are alike, so they are lowered once.
    assert kernel.count("tpu_custom_call") == 1 and kernel.count("call @run_layer(") == 2
    assert xla.count("tpu_custom_call") == 0
    mask = re.compile(r"tensor<2x4x(300|384)xi1>")
    assert mask.search(xla) and not mask.search(kernel)
    for platform in ("cpu", "cuda"):
        assert "tpu_custom_call" not in lowered("pallas", platform)


@pytest.fixture
def as_on_tpu(monkeypatch):
    """Trace as for a TPU."""
    for module in (attention_module, transformer):
        monkeypatch.setattr(module, "on_tpu", lambda: True)
    monkeypatch.setattr(attention_module, "device_kind", lambda: "TPU v6 lite")


@pytest.mark.slow
@pytest.mark.usefixtures("as_on_tpu")
def test_from_8_rows_or_where_xla_takes_turns_a_tpu_takes_the_kernel_unasked(monkeypatch):
    calls = {
        name: lowered("auto", **{"platform": "tpu", "rows": 8} | case).count("tpu_custom_call")
        for name, case in {
            "a step": {},
            "few rows": {"rows": 7},
            "few rows of a long cache": {"rows": 1, "slots": 1 << 14},
            "a chunk of a prompt": {"nodes": 65},
            "heads that it cannot read": {"kv_heads": 3},
            "another platform": {"platform": "cuda"},
            "a gradient": {"differentiated": True},
        }.items()
    }
    once = ("a step", "few rows of a long cache", "a chunk of a prompt")
    assert calls == dict.fromkeys(calls, 0) | dict.fromkeys(once, 1)
    # A single row leaves one of two cores idle, which slows down a single query.
    monkeypatch.setattr(attention_module, "device_kind", lambda: "TPU v5")
    jax.clear_caches()
    for nodes in (1, 4):
        text = lowered("auto", "tpu", rows=1, nodes=nodes, slots=1 << 14)
        assert ("tpu_custom_call" in text) == (nodes == 4)


@pytest.mark.usefixtures("as_on_tpu")
def test_a_kernel_that_is_switched_off_or_does_not_compile_gives_way(monkeypatch):
    monkeypatch.setenv("MARS_JAX_PALLAS", "0")
    jax.clear_caches()  # a layer that was traced with the switch on stays cached
    assert "tpu_custom_call" not in lowered("auto", "tpu", rows=8)
    monkeypatch.setenv("MARS_JAX_PALLAS", "1")
    # The trial compiles for a CPU, which has no Mosaic.
    monkeypatch.setattr(dispatch, "runs_here", lambda platform: True)
    jax.clear_caches()
    assert "tpu_custom_call" not in lowered("auto", "tpu", rows=8)
    assert "tpu_custom_call" in lowered("pallas", "tpu", rows=8)


def test_a_cache_that_the_kernel_cannot_read_is_refused_where_it_would_run():
    config = ModelConfig(vocab_size=64, hidden_size=48, intermediate_size=64, num_layers=1, num_heads=3)
    model = language_model(config, dtype="bfloat16", attention="pallas")
    weights, first = init_params(config, jax.random.key(0), "bfloat16"), jnp.zeros((1,), jnp.int32)
    operands = weights, jnp.zeros((1, 2), jnp.int32), Visible.causal(first, 2), model.init_cache(1, 8)
    traced = jax.jit(model.forward).trace(*operands)
    with pytest.raises(MarsError, match=r'3 heads of bfloat16 .* Or load the model with attention="xla"'):
        traced.lower(lowering_platforms=("tpu",))
    assert jnp.isfinite(model.forward(*operands).hidden).all()  # elsewhere XLA's form runs, on any cache
