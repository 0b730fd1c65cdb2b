"""The choice of the implementation while lowering; a named implementation is never replaced."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import TpuBlocks, margin_stats
from tests.helpers.lowering import LOGITS, acceptance, lowered, statistics


@pytest.mark.parametrize(
    "program",
    [
        statistics(),
        statistics(logsumexp=True),
        statistics(jnp.bfloat16),
        statistics(jnp.bfloat16, logsumexp=True),
        acceptance(),
    ],
)
def test_the_default_lowers_to_one_kernel_on_tpu_and_to_none_elsewhere(program):
    function, arguments = program
    assert lowered(function, *arguments, platform="tpu").count("tpu_custom_call") == 1
    for platform in ("cpu", "cuda"):
        assert "custom_call" not in lowered(function, *arguments, platform=platform)


@pytest.mark.parametrize(
    ("platform", "form", "other"),
    [("cuda", "partitioned", "xla"), ("rocm", "partitioned", "xla"), ("cpu", "xla", "partitioned")],
)
def test_a_gpu_takes_the_form_that_xla_can_partition(platform, form, other):
    """Distinguish programs by their number of reductions, which is higher for the search over blocks."""

    def reductions(**options):
        programs = [statistics(**options), acceptance(**options)]
        return [lowered(f, *args, platform=platform).count("stablehlo.reduce") for f, args in programs]

    assert reductions() == reductions(implementation=form) != reductions(implementation=other)


def test_only_a_cpu_takes_a_few_rows_at_a_time():
    stats = functools.partial(margin_stats, logsumexp=True, implementation="xla")
    assert "stablehlo.while" in lowered(stats, LOGITS, platform="cpu")
    assert "stablehlo.while" not in lowered(stats, LOGITS, platform="cuda")


def test_a_named_kernel_fails_where_it_cannot_run():
    with pytest.raises(ValueError, match="interpret mode is supported on CPU"):
        margin_stats(jnp.zeros((2, 300)), implementation="pallas_tpu")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"blocks": TpuBlocks(8, 128)}, "blocks and interpret belong to a kernel"),
        ({"implementation": "xla", "interpret": True}, "blocks and interpret belong to a kernel"),
        ({"implementation": "cuda"}, "implementation is 'cuda': expected None or one of reference, xla"),
    ],
)
def test_options_that_would_be_ignored_are_refused(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        margin_stats(jnp.zeros((2, 300)), **options)


@pytest.mark.parametrize("implementation", [None, "xla", "reference"])
def test_a_loss_that_holds_a_decision_can_be_differentiated(implementation):
    def loss(logits):
        stats = margin_stats(logits, implementation=implementation, logsumexp=True)
        return jnp.sum(logits**2) + stats.top1.sum() + stats.logsumexp.sum()

    logits = jnp.ones((2, 300))
    assert jnp.array_equal(jax.grad(loss)(logits), 2 * logits)
