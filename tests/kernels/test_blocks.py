"""Illegal block sizes are refused with this package's messages, and every default is legal."""

import itertools
import re

import jax.numpy as jnp
import pytest

from kernels_pallas import BlockError, TpuBlocks, margin_stats
from kernels_pallas.blocks import tpu_blocks
from kernels_pallas.shapes import DRAFTS, VOCABULARIES


@pytest.mark.parametrize(
    ("dtype", "blocks", "sentence"),
    [
        (jnp.float32, TpuBlocks(8, 100), "blocks.tokens is 100: expected a positive multiple of 128."),
        (jnp.float32, TpuBlocks(8, 0), "blocks.tokens is 0: expected a positive multiple of 128."),
        (
            jnp.float32,
            TpuBlocks(12, 128),
            "blocks.trees is 12: expected a positive multiple of 8 for float32",
        ),
        (
            jnp.bfloat16,
            TpuBlocks(8, 128),
            "blocks.trees is 8: expected a positive multiple of 16 for bfloat16",
        ),
        (
            jnp.float32,
            TpuBlocks(40, 2**20),
            "a block of 40 trees of 1 nodes by 1048576 tokens does not fit",
        ),
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
            found = tpu_blocks(None, trees=draft.batch, nodes=nodes, group=group, **options)
            assert found == tpu_blocks(found, trees=draft.batch, nodes=nodes, group=group, **options)
