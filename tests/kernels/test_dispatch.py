"""The implementation is chosen while lowering; a named one is never replaced."""

from __future__ import annotations

import contextlib
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from kernels_pallas import AcceptControls, TpuBlocks, margin_accept, margin_stats

LOGITS = jax.ShapeDtypeStruct((8, 8, 128256), jnp.float32)


def on_a_card():
    """jax 0.12 lowers for Triton only where it knows the card; 0.10 asks for none."""
    if jax.__version_info__ < (0, 12):
        return contextlib.nullcontext()
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H100", None, "gpu")))


def lowered(function, *arguments, platform):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def acceptance(**options):
    """`margin_accept` of `LOGITS`, and the shapes of its arguments."""
    i32, row = jax.ShapeDtypeStruct((8, 8), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    controls = AcceptControls(
        jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8,), bool), row, i32
    )
    return functools.partial(margin_accept, max_depth=7, **options), (LOGITS, i32, i32, None, controls)


BOTH_DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
BOTH_FORMS = pytest.mark.parametrize("logsumexp", [False, True])
# jax 0.12 warns that the next ones have no Triton backend. Only who names "pallas_gpu" hears of it.
EXPECT_DEPRECATION = pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)


@BOTH_DTYPES
@BOTH_FORMS
def test_the_default_lowers_to_one_kernel_on_tpu_and_to_none_elsewhere(dtype, logsumexp):
    stats = functools.partial(margin_stats, logsumexp=logsumexp)
    logits = jax.ShapeDtypeStruct(LOGITS.shape, dtype)
    assert lowered(stats, logits, platform="tpu").count("tpu_custom_call") == 1
    for platform in ("cpu", "cuda"):
        assert "custom_call" not in lowered(stats, logits, platform=platform)


def test_acceptance_lowers_to_one_kernel_on_tpu_and_to_none_elsewhere():
    accept, arguments = acceptance()
    assert lowered(accept, *arguments, platform="tpu").count("tpu_custom_call") == 1
    for platform in ("cpu", "cuda"):
        assert "custom_call" not in lowered(accept, *arguments, platform=platform)


@EXPECT_DEPRECATION
@BOTH_DTYPES
@BOTH_FORMS
def test_the_gpu_kernel_runs_where_it_is_named(dtype, logsumexp):
    stats = functools.partial(margin_stats, logsumexp=logsumexp, implementation="pallas_gpu")
    logits = jax.ShapeDtypeStruct(LOGITS.shape, dtype)
    with on_a_card():
        assert lowered(stats, logits, platform="cuda").count("xla.gpu.triton") == 1


@EXPECT_DEPRECATION
def test_acceptance_by_the_gpu_kernel_is_that_kernel_and_a_walk():
    accept, arguments = acceptance(implementation="pallas_gpu")
    with on_a_card():
        assert lowered(accept, *arguments, platform="cuda").count("xla.gpu.triton") == 1


def test_only_a_cpu_takes_a_few_rows_at_a_time():
    stats = functools.partial(margin_stats, logsumexp=True)
    assert "stablehlo.while" in lowered(stats, LOGITS, platform="cpu")
    assert "stablehlo.while" not in lowered(stats, LOGITS, platform="cuda")


def test_nothing_is_imported_from_the_deprecated_backend_before_it_is_named():
    code = """
import sys
import jax.numpy as jnp
import kernels_pallas
kernels_pallas.margin_stats(jnp.zeros((2, 300)))
print("jax.experimental.pallas.triton" in sys.modules, "kernels_pallas.gpu.margin_gpu" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_a_jax_without_that_backend_says_what_to_do(monkeypatch):
    monkeypatch.delitem(sys.modules, "kernels_pallas.gpu.margin_gpu", raising=False)
    monkeypatch.delattr("kernels_pallas.gpu.margin_gpu", raising=False)
    monkeypatch.delattr("jax.experimental.pallas.triton", raising=False)
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    with pytest.raises(NotImplementedError, match="has no Triton backend for it: leave implementation out"):
        margin_stats(jnp.zeros((2, 300)), implementation="pallas_gpu", interpret=True)
    assert margin_stats(jnp.zeros((2, 300))).id2.tolist() == [1, 1]


@pytest.mark.parametrize("implementation", ["pallas_tpu", "pallas_gpu"])
def test_a_named_kernel_fails_where_it_cannot_run(implementation):
    with pytest.raises(ValueError, match="interpret mode is supported on CPU"):
        margin_stats(jnp.zeros((2, 300)), implementation=implementation)


def test_options_that_would_be_ignored_are_refused():
    with pytest.raises(ValueError, match="blocks and interpret belong to a kernel"):
        margin_stats(jnp.zeros((2, 300)), blocks=TpuBlocks(8, 128))
    with pytest.raises(ValueError, match="blocks and interpret belong to a kernel"):
        margin_stats(jnp.zeros((2, 300)), implementation="xla", interpret=True)
    with pytest.raises(ValueError, match="implementation is 'cuda': expected None or one of reference, xla"):
        margin_stats(jnp.zeros((2, 300)), implementation="cuda")


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_a_loss_that_holds_a_decision_can_be_differentiated(implementation):
    def loss(logits):
        stats = margin_stats(logits, implementation=implementation, logsumexp=True)
        return jnp.sum(logits**2) + stats.top1.sum() + stats.logsumexp.sum()

    logits = jnp.ones((2, 300))
    assert jnp.array_equal(jax.grad(loss)(logits), 2 * logits)
