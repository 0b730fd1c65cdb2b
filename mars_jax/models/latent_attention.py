"""Multi-head latent attention (MLA), in which all heads compute their keys and values from one latent per token.

The matrix that computes keys from latents is applied to the queries instead, and the matrix that computes values is
applied to the outputs. Attention therefore has a single key-value head. A cache row consists of the latent and the
rotated key, and serves as both key and value.

Source: DeepSeek-V2, arXiv 2405.04434, section 2.1. Tested against `DeepseekV3Attention` of transformers
(tests/models/test_families.py).

Dimensions: B batch, N tokens, H heads, R rank of the latent, D = R + number of rotary dimensions.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from mars_jax.models.config import Latent, ModelConfig
from mars_jax.models.layers import dense, rms_norm
from mars_jax.models.rope import Rotation, rotate

_EPS = 1e-6
"""Epsilon of the latents' norms. As in transformers, these norms ignore `norm_eps`."""


def _up(config: ModelConfig, latent: Latent, layer: dict) -> tuple[Array, Array]:
    """Return the matrices that compute keys [H, plain, R] and values [H, value, R] from a latent."""
    # `kv_b_proj` in transformers. For each head, the rows for the key precede those for the value.
    up = layer["kv_b"].reshape(config.num_heads, -1, latent.rank)
    return up[:, : latent.plain], up[:, latent.plain :]


def project(
    config: ModelConfig, latent: Latent, layer: dict, x: Array, rotation: Rotation
) -> tuple[Array, Array, Array]:
    """Return queries [B, N, 1, H, D] of x [B, N, E], and keys and values [B, N, 1, D], which are the same array."""
    queries = x
    # In transformers: `q_a_proj`, then `q_b_proj`; without a latent for queries (`q_lora_rank`), only `q_proj`.
    if latent.query_rank:
        queries = rms_norm(dense(x, layer["q_a"]), layer["q_a_norm"], _EPS)
    queries = dense(queries, layer["q"], outputs=("heads", config.num_heads))
    queries = queries.reshape(*x.shape[:2], config.num_heads, -1)
    plain, rotary = jnp.split(queries, [latent.plain], axis=-1)
    # `kv_a_proj_with_mqa` has `kv_lora_rank` + `qk_rope_head_dim` outputs. The cache holds the compressed latent and
    # one rotary key, which all heads share.
    row, key = jnp.split(dense(x, layer["kv_a"]), [latent.rank], axis=-1)
    row = rms_norm(row, layer["kv_a_norm"], _EPS)
    rotary, key = (
        rotate(y, rotation.cos, rotation.sin, config.rope.interleaved) for y in (rotary, key[:, :, None])
    )
    # An attention score is q . (W latent), which equals (q W) . latent.
    key_up, _ = _up(config, latent, layer)
    plain = jnp.einsum("bnhd,hdr->bnhr", plain, key_up, preferred_element_type=jnp.float32).astype(x.dtype)
    row = jnp.concatenate([row[:, :, None], key], axis=-1)
    return jnp.concatenate([plain, rotary], axis=-1)[:, :, None], row, row


def out(config: ModelConfig, latent: Latent, layer: dict, mixed: Array) -> Array:
    """Compute the layer's output [B, N, E] from the weighted sums of cache rows [B, N, 1, H, D]."""
    _, value_up = _up(config, latent, layer)
    latents = mixed[:, :, 0, :, : latent.rank]
    values = jnp.einsum("bnhr,hvr->bnhv", latents, value_up, preferred_element_type=jnp.float32)
    values = values.astype(mixed.dtype).reshape(*mixed.shape[:2], -1)
    return dense(values, layer["o"], inputs=("heads", config.num_heads))
