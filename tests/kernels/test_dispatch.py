"""The implementation is chosen while lowering; a named one is never replaced."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import AcceptControls, TpuBlocks, margin_accept, margin_stats
from tests.helpers.lowering import LOGITS, lowered


def acceptance(**options):
    """`margin_accept` of `LOGITS`, and the shapes of its arguments."""
    i32, row = jax.ShapeDtypeStruct((8, 8), jnp.int32), jax.ShapeDtypeStruct((8,), jnp.int32)
    controls = AcceptControls(
        jax.ShapeDtypeStruct((8,), jnp.float32), jax.ShapeDtypeStruct((8,), bool), row, i32
    )
    return functools.partial(margin_accept, max_depth=7, **options), (LOGITS, i32, i32, None, controls)


BOTH_DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
BOTH_FORMS = pytest.mark.parametrize("logsumexp", [False, True])


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


@pytest.mark.parametrize(
    ("platform", "form", "other"),
    [("cuda", "partitioned", "xla"), ("rocm", "partitioned", "xla"), ("cpu", "xla", "partitioned")],
)
def test_a_gpu_takes_the_form_that_xla_can_partition(platform, form, other):
    """Programs are told apart by their reductions, of which the search of blocks has more."""

    def reductions(**options):
        accept, arguments = acceptance(**options)
        return [
            lowered(function, *operands, platform=platform).count("stablehlo.reduce")
            for function, operands in (
                (functools.partial(margin_stats, **options), (LOGITS,)),
                (accept, arguments),
            )
        ]

    assert reductions() == reductions(implementation=form) != reductions(implementation=other)


def test_only_a_cpu_takes_a_few_rows_at_a_time():
    stats = functools.partial(margin_stats, logsumexp=True, implementation="xla")
    assert "stablehlo.while" in lowered(stats, LOGITS, platform="cpu")
    assert "stablehlo.while" not in lowered(stats, LOGITS, platform="cuda")


def test_a_named_kernel_fails_where_it_cannot_run():
    with pytest.raises(ValueError, match="interpret mode is supported on CPU"):
        margin_stats(jnp.zeros((2, 300)), implementation="pallas_tpu")


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
