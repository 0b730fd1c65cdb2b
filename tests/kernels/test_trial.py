"""A switch that turns kernels off, and kernels that do not compile: the TPU kernel on a CPU stands in for one."""

import functools
import logging
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas import dispatch, margin_stats, sharded_top_k, top_k
from tests.helpers.lowering import LOGITS, acceptance, lowered, statistics
from tests.helpers.meshes import mesh_of


@pytest.fixture
def trials(monkeypatch):
    """Reset all trials; return (kernel, shape) of every later trial."""
    recorded = []
    untried = dispatch._failure.__wrapped__

    @functools.cache
    def counting(function, options, structure, shapes):
        recorded.append((function.__name__, shapes[0].shape))
        return untried(function, options, structure, shapes)

    monkeypatch.setattr(dispatch, "_failure", counting)
    monkeypatch.setattr(dispatch, "_logged", set())
    # Programs compiled with another choice of kernels must not reach other tests.
    jax.clear_caches()
    yield recorded
    jax.clear_caches()


@pytest.fixture
def on_a_chip_that_refuses(monkeypatch, trials):
    """Use the TPU's kernels on this CPU."""
    monkeypatch.setattr(dispatch, "KERNELS", {"cpu": "pallas_tpu"})
    return trials


def random_logits(*shape):
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def test_a_kernel_that_does_not_compile_is_one_line_and_the_xla_form(on_a_chip_that_refuses, caplog):
    logits = random_logits(4, 3, 300)
    with caplog.at_level(logging.WARNING, logger="kernels_pallas"):
        runs = [jax.jit(margin_stats)(logits) for _ in range(2)] + [margin_stats(logits[:2])]
    expected = margin_stats(logits, implementation="reference")
    jax.tree.map(np.testing.assert_array_equal, runs[0], expected)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:2]), runs[2], expected)
    assert on_a_chip_that_refuses == [("margin_stats", (4, 3, 300)), ("margin_stats", (2, 3, 300))]
    (line,) = caplog.messages
    assert line.startswith(
        "the kernel margin_stats does not compile for float32[4, 3, 300] on cpu (ValueError: O"
    )
    assert line.endswith("XLA operations replace it; MARS_JAX_PALLAS=0 disables all kernels.")


def test_kernels_with_a_collective_between_them_are_tried_without_it(on_a_chip_that_refuses, caplog):
    logits = random_logits(3, 800)
    mesh = mesh_of(model=4)
    local = functools.partial(sharded_top_k, k=5, axis="model")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=P(None, "model"), out_specs=P(), check_vma=False)
    largest = jax.jit(mapped)(logits)
    values, ids = jax.lax.top_k(logits, 5)
    np.testing.assert_array_equal(largest.values, values)
    np.testing.assert_array_equal(largest.ids, ids)
    assert on_a_chip_that_refuses == [("_top_k_of_parts", (3, 200))] and len(caplog.messages) == 1
    jax.eval_shape(functools.partial(top_k, k=5), jax.ShapeDtypeStruct((8, 2**18), jnp.float32))
    assert len(on_a_chip_that_refuses) == 1  # shapes that do not fit the kernel need no trial


def test_inside_shard_map_the_trial_is_of_one_devices_part(on_a_chip_that_refuses):
    logits = random_logits(8, 300)
    with jax.set_mesh(mesh_of(data=8)):
        actual = jax.jit(jax.shard_map(margin_stats, in_specs=P("data"), out_specs=P("data")))(logits)
    expected = margin_stats(logits, implementation="reference")
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert on_a_chip_that_refuses == [("margin_stats", (1, 300))]


def test_a_kernel_that_raises_does_not_run(trials, caplog):
    def _kernel(x):
        raise NotImplementedError("no rule for this op.\nAnd a page of module text")

    guarded = dispatch.kernel_or(_kernel, lambda x: -x, platform="cpu")
    assert [float(guarded(jnp.float32(3))) for _ in range(2)] == [-3.0, -3.0]
    (line,) = caplog.messages
    reason = "NotImplementedError: no rule for this op"
    assert f"the kernel kernel does not compile for float32[] on cpu ({reason}):" in line


def test_a_kernel_that_compiles_runs(trials, caplog):
    guarded = dispatch.kernel_or(lambda x: x * 2, lambda x: x, platform="cpu")
    assert [float(guarded(jnp.float32(3))) for _ in range(2)] == [6.0, 6.0]
    assert len(trials) == 1 and not caplog.messages


def test_ahead_of_time_nothing_is_tried(trials):
    """The program is for an absent TPU, whose own compiler must judge the kernel."""
    assert lowered(margin_stats, LOGITS, platform="tpu").count("tpu_custom_call") == 1
    assert not trials


def test_asking_for_the_platform_starts_no_device():
    """Otherwise, planning for a TPU would occupy the chip of a machine that has one."""
    code = """
import jax.numpy as jnp
from jax._src import xla_bridge
from kernels_pallas import dispatch
print(dispatch.runs_here("cpu"), xla_bridge.backends_are_initialized())
jnp.zeros(3)
print(dispatch.runs_here("cpu"), dispatch.runs_here("tpu"), xla_bridge.backends_are_initialized())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False", "True", "False", "True"]


@pytest.mark.parametrize(("value", "kernels"), [("0", 0), ("", 1), ("1", 1)])
def test_the_switch_turns_all_of_them_off(monkeypatch, value, kernels):
    monkeypatch.setenv("MARS_JAX_PALLAS", value)
    for function, arguments in (statistics(), acceptance()):
        assert lowered(function, *arguments, platform="tpu").count("tpu_custom_call") == kernels


def test_the_switch_does_not_turn_off_a_kernel_that_is_named(monkeypatch):
    monkeypatch.setenv("MARS_JAX_PALLAS", "0")
    named = functools.partial(margin_stats, implementation="pallas_tpu")
    assert lowered(named, LOGITS, platform="tpu").count("tpu_custom_call") == 1


def test_a_switch_of_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("MARS_JAX_PALLAS", "off")
    with pytest.raises(
        ValueError, match="MARS_JAX_PALLAS is 'off': expected 0, which turns Pallas kernels off"
    ):
        margin_stats(jnp.zeros((2, 300)))
