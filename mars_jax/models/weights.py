"""The one table of a model's weights: where each lives in params, its checkpoint name and its shape.

Initialisation, loading, saving and the report of missing or mis-shaped tensors all read this table. Matrices
are [out, in], as in the checkpoints: see `layers.dense`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mars_jax.models.config import ModelConfig
from mars_jax.types import PyTree


class Weight(NamedTuple):
    """One row of the table."""

    path: tuple[str | int, ...]  # ("layers", 3, "q") is params["layers"][3]["q"]
    name: str  # of the tensor in a Hugging Face checkpoint
    shape: tuple[int, ...]
    init: str  # "normal", "zeros" or "ones"


def _matrix(
    key: str, name: str, out: int, inner: int, bias: bool
) -> list[tuple[str, str, tuple[int, ...], str]]:
    rows = [(key, f"{name}.weight", (out, inner), "normal")]
    return [*rows, (f"{key}_bias", f"{name}.bias", (out,), "zeros")] if bias else rows


def _layer(config: ModelConfig) -> list[tuple[str, str, tuple[int, ...], str]]:
    """Rows of one layer: (key, name below the layer's prefix, shape, init)."""
    c = config
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    rows = [("attention_norm", "input_layernorm.weight", (c.hidden_size,), "ones")]
    rows += _matrix("q", "self_attn.q_proj", q, c.hidden_size, c.qkv_bias)
    rows += _matrix("k", "self_attn.k_proj", kv, c.hidden_size, c.qkv_bias)
    rows += _matrix("v", "self_attn.v_proj", kv, c.hidden_size, c.qkv_bias)
    rows += _matrix("o", "self_attn.o_proj", c.hidden_size, q, c.o_bias)
    if c.qk_norm:
        rows += [("q_norm", "self_attn.q_norm.weight", (c.head_dim,), "ones")]
        rows += [("k_norm", "self_attn.k_norm.weight", (c.head_dim,), "ones")]
    rows += [("mlp_norm", "post_attention_layernorm.weight", (c.hidden_size,), "ones")]
    rows += _matrix("gate", "mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
    rows += _matrix("up", "mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
    rows += _matrix("down", "mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias)
    return rows


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """The table of a config, in the order of the computation.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> weights(config)[2].path, weights(config)[2].name, weights(config)[2].shape
    (('layers', 0, 'q'), 'model.layers.0.self_attn.q_proj.weight', (16, 16))
    """
    table = (config.vocab_size, config.hidden_size)
    rows = [Weight(("embed",), "model.embed_tokens.weight", table, "normal")]
    for i in range(config.num_layers):
        for key, name, shape, init in _layer(config):
            rows.append(Weight(("layers", i, key), f"model.layers.{i}.{name}", shape, init))
    rows.append(Weight(("norm",), "model.norm.weight", (config.hidden_size,), "ones"))
    if not config.tie_embeddings:
        rows.append(Weight(("unembed",), "lm_head.weight", table, "normal"))
    return tuple(rows)


def build(config: ModelConfig, make: Callable[[Weight], Any]) -> PyTree:
    """Params with `make(row)` at each row's path: `{"embed", "layers": ({"q", ...}, ...), "norm", ...}`."""
    params: dict[str, Any] = {"layers": tuple({} for _ in range(config.num_layers))}
    for row in weights(config):
        *parents, last = row.path
        place: Any = params
        for key in parents:
            place = place[key]
        place[last] = make(row)
    return params


def get(params: PyTree, path: tuple[str | int, ...]) -> Any:
    """The leaf of params at a row's path; KeyError or IndexError where there is none."""
    for key in path:
        params = params[key]
    return params
