"""`lm_head_margin_stats` against a matmul and numpy: one class of cases that every implementation
inherits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import GpuHeadBlocks, TpuHeadBlocks, lm_head, lm_head_margin_stats
from tests.kernels.implementations import assert_no_races, compiled
from tests.kernels.oracles import top_two


class Cases:
    """Hidden states and weights are small integers: the logits are exact in any order and full of ties."""

    name: str

    @functools.cached_property
    def stats(self):
        return compiled(lm_head_margin_stats, self.name, ("logsumexp", "blocks"))

    def check(self, lead, width, vocab, *, dtype=jnp.float32, logsumexp=True, shift=0, **options):
        rng = np.random.default_rng(width + vocab)
        hidden = rng.integers(-2, 3, (*lead, width))
        weight = rng.integers(-2, 3, (vocab, width))
        hidden[..., 0], weight[:, 0] = 1, shift
        got = self.stats(
            jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), logsumexp=logsumexp, **options
        )
        want = top_two(np.einsum("...e,ve->...v", hidden, weight))
        for value, expected in zip(got[:4], want[:4], strict=True):
            np.testing.assert_array_equal(value, expected)
        if logsumexp:
            np.testing.assert_allclose(got.logsumexp, want[4], rtol=1e-6, atol=1e-5)
        else:
            assert got.logsumexp is None
        if self.name == "mosaic_simulated":
            assert_no_races()

    @pytest.mark.parametrize(("vocab", "dtype"), [(1, jnp.float32), (129, jnp.bfloat16), (1300, jnp.float32)])
    def test_vocabularies(self, vocab, dtype):
        self.check((2, 3), 32, vocab, dtype=dtype)

    @pytest.mark.parametrize("lead", [(), (40,), (3, 7)])
    def test_every_shape_in_front_of_the_width(self, lead):
        self.check(lead, 256, 600)

    def test_widths_that_are_no_multiple_of_a_block(self):
        self.check((5,), 100, 300)
        self.check((5,), 8, 300)

    def test_all_negative_logits(self):
        self.check((5,), 16, 300, shift=-200)

    def test_without_the_logsumexp(self):
        self.check((5,), 64, 300, logsumexp=False)


class TestReference(Cases):
    name = "reference"


class TestXla(Cases):
    name = "xla"

    @pytest.mark.parametrize("vocab", [3072, 3100])
    def test_large_logits_are_folded_chunk_by_chunk(self, vocab, monkeypatch):
        monkeypatch.setattr(lm_head, "CHUNK_BYTES", 40 * 1024 * 4)
        self.check((40,), 16, vocab)


class TestPartitioned(Cases):
    name = "partitioned"


class TestMosaic(Cases):
    name = "mosaic"

    @pytest.mark.parametrize("blocks", [TpuHeadBlocks(16, 128, 128), TpuHeadBlocks(40, 256, 512)])
    def test_every_legal_block_gives_the_same(self, blocks):
        self.check((40,), 512, 700, blocks=blocks)


class TestTriton(Cases):
    name = "triton"

    @pytest.mark.parametrize("blocks", [GpuHeadBlocks(16, 1), GpuHeadBlocks(32, 4, tokens=64, depth=32)])
    def test_every_legal_block_gives_the_same(self, blocks):
        self.check((40,), 100, 700, blocks=blocks)


@pytest.mark.slow
class TestMosaicSimulated(Cases):
    name = "mosaic_simulated"


def test_the_simulated_kernel_has_no_race():
    """The short form of the slow class above."""
    TestMosaicSimulated().check((16,), 256, 300, blocks=TpuHeadBlocks(8, 128, 128))


def test_the_logits_of_a_wide_tree_are_never_written():
    """64 trees of 64 nodes: a matmul would write 2 GiB; the program holds one chunk of it."""
    hidden, weight = (
        jax.ShapeDtypeStruct((64, 64, 16), jnp.float32),
        jax.ShapeDtypeStruct((128256, 16), jnp.float32),
    )
    program = jax.jit(lm_head_margin_stats).lower(hidden, weight).compile()
    assert program.memory_analysis().temp_size_in_bytes < 3 * lm_head.CHUNK_BYTES


def test_arguments_that_do_not_fit_together_are_named():
    with pytest.raises(ValueError, match=r"hidden \(2, 3\) and weight \(5, 4\): expected"):
        lm_head_margin_stats(jnp.zeros((2, 3)), jnp.zeros((5, 4)))
    with pytest.raises(ValueError, match="hidden is float32 and weight bfloat16: expected one dtype"):
        lm_head_margin_stats(jnp.zeros((2, 3)), jnp.zeros((5, 3), jnp.bfloat16))
