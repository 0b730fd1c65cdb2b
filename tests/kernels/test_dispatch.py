"""The implementation is chosen while lowering; a named one is never replaced."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import AcceptControls, TpuBlocks, lm_head_margin_stats, margin_accept, margin_stats

LOGITS = jax.ShapeDtypeStruct((8, 8, 128256), jnp.float32)


def lowered(function, *arguments, platform):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("logsumexp", [False, True])
def test_the_default_lowers_to_one_kernel_on_gpu_and_tpu(dtype, logsumexp):
    stats = functools.partial(margin_stats, logsumexp=logsumexp)
    logits = jax.ShapeDtypeStruct(LOGITS.shape, dtype)
    assert lowered(stats, logits, platform="cuda").count("xla.gpu.triton") == 1
    assert lowered(stats, logits, platform="tpu").count("tpu_custom_call") == 1
    on_cpu = lowered(stats, logits, platform="cpu")
    assert "custom_call" not in on_cpu


def test_acceptance_and_the_fused_unembedding_lower_to_kernels_as_well():
    i32, row = jax.ShapeDtypeStruct((8, 8), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    controls = AcceptControls(
        jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8,), bool), row, i32
    )
    accept = functools.partial(margin_accept, max_depth=7)
    hidden, weight = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((64, 4096), (128256, 4096)))
    for platform, marker in (("cuda", "xla.gpu.triton"), ("tpu", "tpu_custom_call")):
        text = lowered(accept, LOGITS, i32, i32, None, controls, platform=platform)
        assert text.count(marker) == 1
        assert lowered(lm_head_margin_stats, hidden, weight, platform=platform).count(marker) == 1


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
