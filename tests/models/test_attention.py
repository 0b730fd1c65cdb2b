"""Attention by blocks: equal to attention over every slot, and independent of masked slots."""

import functools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from mars_jax.models import attention
from mars_jax.models.attention import BLOCK, attend, attend_all, wide_block
from tests.helpers import transformers_oracle

wide_turns = functools.partial(attention._attend_blocks, block=64)
blocked = jax.jit(attend)  # one compilation of each shape for all tests


def case(seed, *, batch=2, n=3, slots=300, live=200, heads=2, group=2, dim=4, dtype="float32"):
    rng = np.random.default_rng(seed)
    shapes = (batch, n, heads, group, dim), (batch, slots, heads, dim), (batch, slots, heads, dim)
    q, k, v = (jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(dtype) for shape in shapes)
    mask = (rng.random((batch, n, slots)) < 0.7) & (np.arange(slots) < live)
    return q, k, v, jnp.asarray(mask), jnp.int32(live)


def numpy_attention(q, k, v, mask):
    """Compute the textbook formula in float64, one query at a time."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    out = np.zeros_like(q)
    for b, n, h, g in np.ndindex(q.shape[:4]):
        visible = np.asarray(mask[b, n])
        if visible.any():
            scores = k[b, visible, h] @ q[b, n, h, g] / np.sqrt(q.shape[-1])
            weights = np.exp(scores - scores.max())
            out[b, n, h, g] = weights @ v[b, visible, h] / weights.sum()
    return out


@pytest.mark.parametrize("slots", [1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK - 5])
@pytest.mark.parametrize("form", [attend, attend_all])
def test_both_forms_equal_the_textbook_formula(form, slots):
    for live in {1, (slots + 1) // 2, slots}:
        operands = case(slots, slots=slots, live=live)
        # 1e-5: float32 sums of at most 400 terms of size one.
        np.testing.assert_allclose(jax.jit(form)(*operands), numpy_attention(*operands[:4]), atol=1e-5)


def test_what_the_mask_hides_does_not_matter_and_a_blind_query_gets_zeros():
    q, k, v, mask, live = case(0)
    mask = mask.at[0, 1].set(False)
    hidden = ~jnp.any(mask, axis=1)[:, :, None, None]
    poisoned = [jnp.where(hidden, 1e30, x) for x in (k, v)]
    clean, dirty = blocked(q, k, v, mask, live), blocked(q, *poisoned, mask, live)
    np.testing.assert_array_equal(clean, dirty)
    np.testing.assert_array_equal(dirty[0, 1], 0.0)


@pytest.mark.parametrize(
    # 1e-5: as above. 2**-7: the weights and the result are each rounded to 8 bits.
    ("dtype", "size", "atol"),
    [("float32", 1e3, 1e-5), ("bfloat16", 1.0, 2**-7)],
    ids=["large scores", "bfloat16"],
)
def test_large_scores_and_bfloat16_inputs_give_the_textbook_formula(dtype, size, atol):
    q, k, v, mask, live = case(2, dtype=dtype)
    operands = (q * size, k * size, v, mask, live)
    out = blocked(*operands)
    assert out.dtype == dtype
    np.testing.assert_allclose(out.astype(jnp.float32), numpy_attention(*operands[:4]), atol=atol)


def test_gradients_equal_those_of_the_plain_form_also_with_a_blind_query():
    q, k, v, mask, live = case(3)
    mask = mask.at[0, 1].set(False)

    def loss(form):
        return lambda q, k, v: jnp.sum(jnp.sin(form(q, k, v, mask, live)))

    actual = jax.jit(jax.grad(loss(attend), argnums=(0, 1, 2)))(q, k, v)
    expected = jax.jit(jax.grad(loss(attend_all), argnums=(0, 1, 2)))(q, k, v)
    for a, b in zip(actual, expected, strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("form", [attend, attend_all, wide_turns], ids=["chosen", "all", "wide blocks"])
def test_sinks_have_the_output_and_the_gradient_of_gpt_oss(form):
    """Compare with transformers and PyTorch's gradient; a query that sees no slots gets zeros."""
    torch = pytest.importorskip("torch")
    with transformers_oracle.third_party():
        from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward
    q, k, v, mask, live = case(8)
    mask = mask.at[0, 1].set(False)
    sinks = jnp.asarray([[-3.0, 0.5], [2.0, 30.0]])

    def loss(q, k, v, sinks):
        out = form(q, k, v, mask, live, sinks)
        return jnp.sum(jnp.sin(out)), out

    gradients, out = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True))(q, k, v, sinks)
    inputs = [torch.tensor(np.asarray(x), requires_grad=True) for x in (q, k, v, sinks)]
    queries, keys, values, logits = inputs
    module = types.SimpleNamespace(num_key_value_groups=q.shape[3], sinks=logits, training=False)
    added = torch.tensor(np.where(np.asarray(mask), 0.0, -np.inf), dtype=torch.float32)[:, None]
    # [B, N, K, G, D] and [B, S, K, D] to [B, heads, N or S, D].
    heads = (x.flatten(2, -2).transpose(1, 2) for x in (queries, keys, values))
    expected, _ = eager_attention_forward(module, *heads, added, q.shape[-1] ** -0.5)
    torch.sin(expected).sum().backward()
    np.testing.assert_allclose(out, expected.detach().reshape(q.shape), atol=1e-6)
    np.testing.assert_array_equal(out[0, 1], 0.0)
    for actual, tensor in zip(gradients, inputs, strict=True):
        np.testing.assert_allclose(actual, tensor.grad, atol=2e-6)


def test_vmap_maps_over_ragged_live_lengths():
    cases = [case(s, live=live) for s, live in ((4, 10), (5, 290))]
    out = jax.jit(jax.vmap(attend))(*jax.tree.map(lambda *x: jnp.stack(x), *cases))
    for row, operands in zip(out, cases, strict=True):
        np.testing.assert_allclose(row, numpy_attention(*operands[:4]), atol=1e-5)


def test_the_cost_on_cpu_follows_the_live_length():
    """Blocks past `live` are not read: NaN there would spread through 0 * NaN."""
    q, k, v, mask, live = case(6, slots=4 * BLOCK, live=BLOCK)
    past = (jnp.arange(4 * BLOCK) >= BLOCK)[None, :, None, None]
    k, v = jnp.where(past, jnp.nan, k), jnp.where(past, jnp.nan, v)
    assert np.isfinite(attention._attend_blocks(q, k, v, mask, live)).all()


def lowered(platform: str, shapes, **options) -> str:
    """Return the program for a platform."""
    traced = jax.jit(lambda *args: attend(*args, **options)).trace(*shapes)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_a_tpu_reads_long_buffers_block_by_block():
    """Read a buffer of up to a block and a quarter as a whole, and a longer one in a loop."""
    block = wide_block(*jax.eval_shape(lambda: case(0, slots=8))[:2])
    for slots, count in ((block + block // 4, 0), (block + block // 4 + 1, 1)):
        shapes = jax.eval_shape(lambda slots=slots: case(0, slots=slots))
        assert lowered("tpu", shapes).count("stablehlo.while") == count


@pytest.mark.parametrize("platform", ["cuda", "rocm"])
def test_a_gpu_reads_all_slots_at_once_while_their_scores_fit(platform, monkeypatch):
    shapes = jax.eval_shape(lambda: case(0, slots=16384))
    assert lowered(platform, shapes).count("stablehlo.while") == 0
    monkeypatch.setattr(attention, "GPU_SCORE_BYTES", 8192 * 4 * math.prod(shapes[0].shape[:-1]))
    text = lowered(platform, shapes)
    assert text.count("stablehlo.while") == 1
    # A GPU would wait for the host in every iteration of a loop whose length is a number on the device.
    condition = text.split("stablehlo.while")[1].split("cond {")[1].split("stablehlo.return")[0]
    assert "stablehlo.constant dense<2>" in condition


@pytest.mark.parametrize("nodes", [1, 5, 70])
def test_attention_of_cudnn_is_asked_for_the_same(nodes):
    """Replace cuDNN with XLA's form of the same public function, for queries of a group together and separately."""
    q, k, v, mask, live = case(3, n=nodes, slots=300, live=280)
    mask = mask.at[0, 0].set(False)
    flash = jax.jit(functools.partial(attention._flash, scale=0.2, implementation="xla"))
    expected = jax.jit(functools.partial(attend_all, scale=0.2))(q, k, v, mask, live)
    np.testing.assert_allclose(flash(q, k, v, mask, live), expected, atol=2e-6)


def test_a_program_for_one_gpu_has_attention_of_cudnn(monkeypatch):
    """Patch private jax functions that query cuDNN's version and the card from a library that is absent here."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91300)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)

    def calls(batch: int) -> int:
        sizes = {"batch": batch, "n": 60, "heads": 8, "group": 4, "dim": 128}
        shapes = jax.eval_shape(lambda: case(0, dtype="bfloat16", **sizes))
        return lowered("cuda", shapes, flash=True).count("@__cudnn")

    assert calls(32) == 0, "without a GPU"
    monkeypatch.setattr(attention, "on_gpu", lambda: True)
    assert calls(32) == 1 and calls(1) == 0
    monkeypatch.setattr(attention, "current", lambda: AbstractMesh((2,), ("model",)))
    assert calls(32) == 0, "on two GPUs"
