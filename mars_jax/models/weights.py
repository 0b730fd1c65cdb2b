"""Table of a model's weights, with the path in params, the checkpoint name and the shape of each weight.

Initialisation, loading and saving use this table, and so does the report of tensors that are missing or have the wrong
shape. Matrices are [out, in], as in the checkpoints; see `layers.dense`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from mars_jax.core.types import PyTree
from mars_jax.models.config import Latent, ModelConfig

_DType = TypeVar("_DType", bound=DTypeLike)


class Weight(NamedTuple):
    """One row of the table: a weight of the model."""

    # ("layers", 3, "q") stands for params["layers"][3]["q"]; see `leaves` for experts
    path: tuple[str | int, ...]
    name: str  # tensor name in a Hugging Face checkpoint
    shape: tuple[int, ...]
    init: str  # initial values: "normal", "zeros" or "ones"

    def below(self, path: tuple[str | int, ...], name: str) -> Weight:
        """Return a copy of this row with `path` prepended to its path, and `name` and a dot prepended to its name."""
        return self._replace(path=(*path, *self.path), name=f"{name}.{self.name}")


_EXPERTS = {"mixtral": ("block_sparse_moe", "w1", "w3", "w2")}
"""Checkpoint names of a layer's experts, and of their gate, up and down projections, by model family. Other families
use the names of Qwen."""

STACKED = ("gpt_oss",)
"""Families whose experts have biases, and whose files store all experts of a layer in one tensor
(`hub.stacked_experts`)."""

_NORMS = {
    "gemma2": ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    "glm4": ("post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
}
"""Checkpoint names of the norms after attention, before the MLP and after the MLP, by model family, for models with
`post_norms`. Other families use the names of Gemma 2."""


def _matrix(key: str, name: str, out: int, inner: int, bias: bool) -> list[Weight]:
    rows = [Weight((key,), f"{name}.weight", (out, inner), "normal")]
    if bias:
        rows.append(Weight((f"{key}_bias",), f"{name}.bias", (out,), "zeros"))
    return rows


def _experts(config: ModelConfig) -> list[Weight]:
    """Return the table rows of a layer's router and experts."""
    c, size = config, config.expert_size or config.intermediate_size
    if c.family in STACKED:
        rows = _matrix("router", "mlp.router", c.num_experts, c.hidden_size, True)
        for key in ("gate", "up", "down"):
            outputs, inputs = (c.hidden_size, size) if key == "down" else (size, c.hidden_size)
            name = f"mlp.experts.{key}_proj"
            rows.append(Weight((f"expert_{key}",), name, (c.num_experts, outputs, inputs), "normal"))
            rows.append(Weight((f"expert_{key}_bias",), f"{name}_bias", (c.num_experts, outputs), "zeros"))
        return rows
    block, *names = _EXPERTS.get(c.family, ("mlp", "gate_proj", "up_proj", "down_proj"))
    rows = [Weight(("router",), f"{block}.gate.weight", (c.num_experts, c.hidden_size), "normal")]
    if c.sigmoid_router:
        rows.append(
            Weight(("score_bias",), f"{block}.gate.e_score_correction_bias", (c.num_experts,), "zeros")
        )
    for key, name in zip(("gate", "up", "down"), names, strict=True):
        shape = (c.hidden_size, size) if key == "down" else (size, c.hidden_size)
        for i in range(c.num_experts):
            rows.append(Weight((f"expert_{key}", i), f"{block}.experts.{i}.{name}.weight", shape, "normal"))
    if size := c.shared_expert_size:
        shared = f"{block}.shared_expert"
        if c.sigmoid_router:
            shared += "s"
        else:
            rows += _matrix("shared_router", f"{shared}_gate", 1, c.hidden_size, False)
        rows += _matrix("shared_gate", f"{shared}.gate_proj", size, c.hidden_size, False)
        rows += _matrix("shared_up", f"{shared}.up_proj", size, c.hidden_size, False)
        rows += _matrix("shared_down", f"{shared}.down_proj", c.hidden_size, size, False)
    return rows


def _latent_attention(config: ModelConfig, latent: Latent) -> list[Weight]:
    """Return the table rows of a layer with latent attention."""

    def norm(key: str, name: str, size: int) -> Weight:
        return Weight((key,), f"self_attn.{name}.weight", (size,), "ones")

    e, heads, rank = config.hidden_size, config.num_heads, latent.rank
    rows, query_name, query_size = [], "q_proj", e
    if latent.query_rank:
        query_name, query_size = "q_b_proj", latent.query_rank
        rows += _matrix("q_a", "self_attn.q_a_proj", query_size, e, False)
        rows.append(norm("q_a_norm", "q_a_layernorm", query_size))
    width = latent.plain + latent.rotary
    rows += _matrix("q", f"self_attn.{query_name}", heads * width, query_size, False)
    rows += _matrix("kv_a", "self_attn.kv_a_proj_with_mqa", rank + latent.rotary, e, False)
    rows.append(norm("kv_a_norm", "kv_a_layernorm", rank))
    rows += _matrix("kv_b", "self_attn.kv_b_proj", heads * (latent.plain + latent.value), rank, False)
    return rows + _matrix("o", "self_attn.o_proj", e, heads * latent.value, False)


def _delta(config: ModelConfig) -> list[Weight]:
    """Return the table rows of a gated DeltaNet layer.

    Qwen3-Next, unlike Qwen3.5, stores all projections of a key head in one tensor.
    """
    delta, size = config.delta, config.hidden_size
    assert delta is not None
    keys, values = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim
    rows: list[Weight] = []
    if config.family == "qwen3_next":
        rows += _matrix("delta_qkvz", "linear_attn.in_proj_qkvz", 2 * keys + 2 * values, size, False)
        rows += _matrix("delta_ba", "linear_attn.in_proj_ba", 2 * delta.value_heads, size, False)
    else:
        for name, outputs in (("q", keys), ("k", keys), ("v", values), ("z", values)):
            rows += _matrix(f"delta_{name}", f"linear_attn.in_proj_{name}", outputs, size, False)
        for name in "ba":
            rows += _matrix(f"delta_{name}", f"linear_attn.in_proj_{name}", delta.value_heads, size, False)
    for name, outputs in (("q", keys), ("k", keys), ("v", values)):
        shape = (outputs, 1, delta.taps)
        rows.append(Weight((f"delta_{name}_conv",), f"linear_attn.conv1d_{name}.weight", shape, "normal"))
    for key, name in (("delta_log_rate", "A_log"), ("delta_bias", "dt_bias")):
        rows.append(Weight((key,), f"linear_attn.{name}", (delta.value_heads,), "zeros"))
    rows.append(Weight(("delta_norm",), "linear_attn.norm.weight", (delta.value_dim,), "ones"))
    return rows + _matrix("delta_o", "linear_attn.out_proj", size, values, False)


def layer_rows(config: ModelConfig, index: int = 0, *, width: int | None = None) -> list[Weight]:
    """Return the table rows of one layer, with paths and names relative to the layer.

    Args:
      config: the model's config.
      index: index of the layer.
      width: number of inputs of the query, key and value projections; default: `config.hidden_size`.
    """
    c = config
    width = width or c.hidden_size
    q, kv = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    unit = "zeros" if c.norm_plus_one else "ones"

    def norm(key: str, name: str, size: int = c.hidden_size) -> list[Weight]:
        return [Weight((key,), f"{name}.weight", (size,), unit)]

    rows: list[Weight] = []
    if c.pre_norms:
        rows += norm("attention_norm", "input_layernorm")
    if c.delta is not None and index in c.delta.layers:
        rows += _delta(c)
    elif c.latent is not None:
        rows += _latent_attention(c, c.latent)
    else:
        rows += _matrix("q", "self_attn.q_proj", q * (1 + c.attention_gate), width, c.qkv_bias)
        rows += _matrix("k", "self_attn.k_proj", kv, width, c.qkv_bias)
        rows += _matrix("v", "self_attn.v_proj", kv, width, c.qkv_bias)
        rows += _matrix("o", "self_attn.o_proj", c.hidden_size, q, c.o_bias)
        if c.attention_sinks:
            rows.append(Weight(("sinks",), "self_attn.sinks", (c.num_heads,), "normal"))
        if c.whole_qk_norm:
            rows += norm("q_norm", "self_attn.q_norm", q) + norm("k_norm", "self_attn.k_norm", kv)
        elif c.qk_norm:
            rows += norm("q_norm", "self_attn.q_norm", c.head_dim)
            rows += norm("k_norm", "self_attn.k_norm", c.head_dim)
    post_norm, mlp_norm, mlp_post_norm = _NORMS.get(c.family, _NORMS["gemma2"])
    if not c.post_norms:
        rows += norm("mlp_norm", "post_attention_layernorm")
    else:
        rows += norm("attention_post_norm", post_norm)
        if c.pre_norms:
            rows += norm("mlp_norm", mlp_norm)
        rows += norm("mlp_post_norm", mlp_post_norm)
    if c.num_experts and index not in c.dense_layers:
        return rows + _experts(c)
    rows += _matrix("gate", "mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
    rows += _matrix("up", "mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias)
    rows += _matrix("down", "mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias)
    return rows


def weights(config: ModelConfig) -> tuple[Weight, ...]:
    """Return the table of all weights of a model, in the order in which a forward pass uses them.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> weights(config)[2].path, weights(config)[2].name, weights(config)[2].shape
    (('layers', 0, 'q'), 'model.layers.0.self_attn.q_proj.weight', (16, 16))
    """
    embedding_shape = (config.vocab_size, config.hidden_size)
    rows = [Weight(("embed",), "model.embed_tokens.weight", embedding_shape, "normal")]
    for i in range(config.num_layers):
        rows += [row.below(("layers", i), f"model.layers.{i}") for row in layer_rows(config, i)]
    unit = "zeros" if config.norm_plus_one else "ones"
    rows.append(Weight(("norm",), "model.norm.weight", (config.hidden_size,), unit))
    if not config.tie_embeddings:
        rows.append(Weight(("unembed",), "lm_head.weight", embedding_shape, "normal"))
    return tuple(rows)


_QKV = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj")
_GATE_UP = dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj")
_CONV = dict.fromkeys(("conv1d_q", "conv1d_k", "conv1d_v"), "conv1d")
_DELTA = _CONV | dict.fromkeys(("in_proj_q", "in_proj_k", "in_proj_v"), "in_proj_qkv")
_FUSED = {
    "phi3": _QKV | _GATE_UP,
    "glm": _GATE_UP,
    "glm4": _GATE_UP,
    "qwen3_next": _CONV,
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
}
"""For families that fuse matrices: maps the name of each matrix to the name of the tensor that contains it."""


def stored_tensors(config: ModelConfig) -> dict[Weight, tuple[Weight, ...]]:
    """Map each tensor of a checkpoint to the table rows that it contains, concatenated along the output dimension.

    Each key is a `Weight` with the name and shape of the stored tensor, and the path of its first row.

    >>> config = ModelConfig(family="phi3", vocab_size=9, hidden_size=4, intermediate_size=6, num_layers=1, num_heads=1)
    >>> [(tensor.name, tensor.shape) for tensor, rows in stored_tensors(config).items() if len(rows) == 2]
    [('model.layers.0.mlp.gate_up_proj.weight', (12, 4))]
    """
    fused, rows_by_name = _FUSED.get(config.family, {}), {}
    for row in weights(config):
        *parents, module, kind = row.name.split(".")
        name = ".".join((*parents, fused.get(module, module), kind))
        rows_by_name.setdefault(name, []).append(row)
    tensors: dict[Weight, tuple[Weight, ...]] = {}
    for name, rows in rows_by_name.items():
        outputs = sum(row.shape[0] for row in rows)
        tensors[rows[0]._replace(name=name, shape=(outputs, *rows[0].shape[1:]))] = tuple(rows)
    return tensors


def leaves(config: ModelConfig) -> dict[Weight, tuple[Weight, ...]]:
    """Map each array of params to the table rows that it contains: a single weight, or a stack of experts.

    Rows whose path ends in a number are stacked. For example, `("layers", 3, "expert_up", 5)` stands for
    `params["layers"][3]["expert_up"][5]`, in an array [experts, out, in] that can be sharded over its first axis. The
    key of a stack is a `Weight` with the path and shape of the array, and the name of its first row.

    >>> config = ModelConfig(vocab_size=9, hidden_size=4, intermediate_size=6, num_layers=1, num_heads=1,
    ...                      num_experts=3, experts_per_token=2)
    >>> [(leaf.path[-1], leaf.shape, len(rows)) for leaf, rows in leaves(config).items()][9]
    ('expert_up', (3, 6, 4), 3)
    """
    return stacked(weights(config))


def stacked(table: Iterable[Weight]) -> dict[Weight, tuple[Weight, ...]]:
    """Map each array of params to its rows in any table of weights; see `leaves`."""
    stacks: dict[tuple[str | int, ...], list[Weight]] = {}
    for row in table:
        path = row.path
        if isinstance(path[-1], int):
            path = path[:-1]
        stacks.setdefault(path, []).append(row)
    rows_by_leaf: dict[Weight, tuple[Weight, ...]] = {}
    for path, rows in stacks.items():
        shape = rows[0].shape
        if rows[0].path != path:
            shape = (len(rows), *shape)
        rows_by_leaf[rows[0]._replace(path=path, shape=shape)] = tuple(rows)
    return rows_by_leaf


def build(config: ModelConfig, make: Callable[[Weight], Array]) -> PyTree:
    """Build the params of a model by calling `make(row)` for each row of its table of weights.

    The result has the structure `{"embed": ..., "layers": ({"q": ...}, ...), "norm": ...}`.

    >>> config = ModelConfig(vocab_size=9, hidden_size=4, intermediate_size=6, num_layers=1, num_heads=1,
    ...                      num_experts=3, experts_per_token=2)
    >>> build(config, lambda row: jnp.zeros(row.shape))["layers"][0]["expert_up"].shape
    (3, 6, 4)
    """
    table = leaves(config)

    def leaf(row: Weight) -> Array:
        rows = table[row]
        if rows == (row,):
            return make(row)
        return jnp.stack([make(expert) for expert in rows])

    return build_rows(table, leaf)


def dtype_of(row: Weight, dtype: _DType) -> _DType | str:
    """Return the dtype of a weight in a model of this dtype.

    `score_bias` is always float32, because rounding it could change which experts are chosen. All other weights use
    `dtype`.

    >>> dtype_of(Weight(("layers", 0, "score_bias"), "", (8,), "zeros"), "bfloat16")
    'float32'
    """
    if row.path[-1] == "score_bias":
        return "float32"
    return dtype


def random_rows(
    rows: Iterable[Weight], key: Array, dtype: DTypeLike, scale: float
) -> Callable[[Weight], Array]:
    """Return a function for `build` that makes random weights: normal matrices with standard deviation `scale`."""
    rows = tuple(rows)
    keys = dict(zip(rows, jax.random.split(key, len(rows)), strict=True))

    def make(row: Weight) -> Array:
        if row.init != "normal":
            return jnp.full(row.shape, int(row.init == "ones"), dtype_of(row, dtype))
        # Sample in float32, so that narrower dtypes get the same numbers, rounded.
        return (jax.random.normal(keys[row], row.shape, jnp.float32) * scale).astype(dtype)

    return make


def build_rows(rows: Iterable[Weight], make: Callable[[Weight], PyTree]) -> PyTree:
    """Build params for any table of weights by calling `make(row)` for each row.

    Names in paths become keys of dicts, and numbers become indices of tuples.
    """
    # Build nested dicts first, even where the keys are numbers, because the rows may be in any order.
    params: dict[str | int, PyTree] = {}
    for row in rows:
        *parents, last = row.path
        params_node = params
        for key in parents:
            params_node = params_node.setdefault(key, {})
        params_node[last] = make(row)

    def tuples(tree: PyTree) -> PyTree:
        if not isinstance(tree, dict):
            return tree
        children = {key: tuples(value) for key, value in tree.items()}
        if 0 in children:
            return tuple(children[i] for i in range(len(children)))
        return children

    return tuples(params)


def get(params: PyTree, path: tuple[str | int, ...]) -> PyTree:
    """Return the entry of params at the path of a table row.

    Raises:
      KeyError, IndexError: there is no such entry.
    """
    for key in path:
        params = params[key]
    return params
