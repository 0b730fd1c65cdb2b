"""The choice of the implementation and of its blocks while lowering; a named implementation is never replaced."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import BlockError, TpuBlocks, margin_stats
from kernels_pallas.margin.shapes import tpu_blocks
from mars_jax import drafters, verify
from mars_jax.core import fake
from mars_jax.core.controls import make_controls
from mars_jax.core.decode import run, shapes, speculative_decoder
from mars_jax.core.tree import chain
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from tests.helpers import judge, make_rows
from tests.helpers.accept_cases import accept_case
from tests.helpers.kernel_shapes import DRAFTS, VOCABULARIES
from tests.helpers.lowering import acceptance, lowered, statistics
from tests.helpers.meshes import mesh_of


@pytest.mark.parametrize(
    "program",
    [
        statistics(),
        statistics(logsumexp=True),
        statistics(jnp.bfloat16),
        acceptance(),
    ],
)
def test_the_default_lowers_to_one_kernel_on_tpu_and_to_none_elsewhere(program):
    function, arguments = program
    assert lowered(function, *arguments, platform="tpu").count("tpu_custom_call") == 1
    for platform in ("cpu", "cuda"):
        assert "custom_call" not in lowered(function, *arguments, platform=platform)


@pytest.mark.parametrize(
    ("platform", "form", "other_form"),
    [("cuda", "partitioned", "xla"), ("rocm", "partitioned", "xla"), ("cpu", "xla", "partitioned")],
)
def test_a_gpu_takes_the_form_that_xla_can_partition(platform, form, other_form):
    """Distinguish programs by their number of reductions, which is higher for the search over blocks."""

    def reductions(**options):
        programs = [statistics(**options), acceptance(**options)]
        return [lowered(f, *args, platform=platform).count("stablehlo.reduce") for f, args in programs]

    assert reductions() == reductions(implementation=form) != reductions(implementation=other_form)


def test_a_named_kernel_fails_where_it_cannot_run():
    with pytest.raises(ValueError, match="interpret mode is supported on CPU"):
        margin_stats(jnp.zeros((2, 300)), implementation="pallas_tpu")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"blocks": TpuBlocks(8, 128)}, "blocks and interpret belong to a kernel"),
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


@pytest.mark.parametrize(
    ("dtype", "blocks", "sentence"),
    [
        (jnp.float32, TpuBlocks(8, 100), "blocks.tokens is 100: expected a positive multiple of 128."),
        (jnp.float32, TpuBlocks(8, 0), "blocks.tokens is 0: expected a positive multiple of 128."),
        (jnp.float32, TpuBlocks(12, 128), "blocks.trees is 12: expected a positive multiple of 8 for f"),
        (jnp.bfloat16, TpuBlocks(8, 128), "blocks.trees is 8: expected a positive multiple of 16 for b"),
        (jnp.float32, TpuBlocks(40, 2**20), "a block of 40 trees of 1 nodes by 1048576 tokens does not fit"),
        (jnp.int32, None, "logits are int32: the kernels take float32 or bfloat16."),
    ],
)
def test_illegal_blocks_of_margin_stats(dtype, blocks, sentence):
    with pytest.raises(BlockError, match=re.escape(sentence)):
        margin_stats(jnp.zeros((40, 300), dtype), implementation="pallas_tpu", blocks=blocks, interpret=True)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_every_named_shape_has_legal_default_blocks(dtype):
    for vocab, draft in itertools.product(VOCABULARIES.values(), DRAFTS.values()):
        options = {"vocab": vocab, "dtype": dtype}
        for group, nodes in ((1, draft.nodes), (8, draft.nodes), (16, 1)):
            blocks = tpu_blocks(None, trees=draft.batch, nodes=nodes, group=group, **options)
            assert blocks == tpu_blocks(blocks, trees=draft.batch, nodes=nodes, group=group, **options)


@pytest.mark.parametrize(
    ("rule", "kernel"),
    [
        (verify.mars(), "margin_accept"),
        pytest.param(verify.mars(base=verify.rejection()), "margin_stats", marks=pytest.mark.slow),
    ],
)
def test_the_decode_loop_holds_the_tpu_kernel_once_and_no_other_elsewhere(rule, kernel):
    decoder = speculative_decoder(fake.hash_model(vocab_size=1100), drafters.ngram(4), rule)
    params, prompts = Params(target=()), (jnp.ones((2, 32), jnp.int32), jnp.full((2,), 3, jnp.int32))
    batch = Prompts(*prompts, make_controls(2, limit=32), rule, keys_from_seeds(jnp.arange(2)))
    state = shapes(decoder, params, batch)
    loop = functools.partial(run, decoder, params)
    on_tpu = lowered(loop, state, platform="tpu")
    calls = re.findall(r"@tpu_custom_call\((.*?)\) .*kernel_name = \"(\w+)\"", on_tpu)
    # `Evidence.stats` may be read twice; XLA merges equal calls into one kernel (tests/tpu/test_kernels.py).
    assert len(calls) == on_tpu.count("tpu_custom_call") and len(set(calls)) == 1
    assert calls[0][1] == kernel
    for platform in ("cpu", "cuda"):
        assert "tpu_custom_call" not in lowered(loop, state, platform=platform)


def test_where_xla_partitions_the_vocabulary_there_is_no_kernel_and_the_same_verdict():
    (logits, tokens, _, _, rows), _ = accept_case(4, 5, 4, 3, 512, chain=True)
    controls = make_rows(5, limit=9, **rows._asdict())
    rule, keys = judge(verify.mars()), keys_from_seeds(jnp.arange(5))
    expected = jax.jit(rule)(keys, chain(tokens), logits, controls)
    spread = jax.device_put(logits, NamedSharding(mesh_of(model=2), P(None, None, "model")))
    arguments = (keys, chain(tokens), spread, controls)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(rule)(*arguments), expected)
    assert "tpu_custom_call" not in lowered(rule, *arguments, platform="tpu")
