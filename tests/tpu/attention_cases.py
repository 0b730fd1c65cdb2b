"""Functions that compile the attention kernel at the shapes of published models."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas import NewRows, tree_attention, write_and_attend
from mars_jax.core.cache import KVCache, commit_path, init_cache
from mars_jax.core.types import Visible
from mars_jax.models.attention import attending
from tests.tpu import aot


class Heads(NamedTuple):
    """The attention heads of a model on one device."""

    kv_heads: int
    group: int
    dim: int
    window: int | None = None
    cap: float | None = None


HEADS = {
    "llama-3.1-8b over 4": Heads(2, 4, 128),
    "llama-3.1-8b": Heads(8, 4, 128),
    "llama-3.3-70b over 8": Heads(1, 8, 128),
    "qwen3-32b over 4": Heads(2, 8, 128),
    "gemma3-4b": Heads(4, 2, 256, window=1024),
    "gemma2-9b": Heads(8, 2, 256, window=4096, cap=50.0),
    "gemma3-1b": Heads(1, 4, 256, window=512),
    "vicuna-7b": Heads(32, 1, 128),
}
QUERIES = {"one": 1, "chain": 6, "tree": 60, "tree of 64": 64, "chunk of 64": 64, "chunk of 512": 512}


class Case(NamedTuple):
    heads: str
    queries: str
    batch: int
    dtype: str
    slots: int = 4224
    sinks: bool = False

    def __str__(self) -> str:
        return f"{self.heads}, {self.queries}, {self.batch} rows, {self.dtype}{', sinks' * self.sinks}"


LARGEST = ("chunk of 512", "float32")
SOME = (
    Case("llama-3.1-8b over 4", "one", 1, "bfloat16"),
    Case("llama-3.1-8b over 4", "tree", 1, "bfloat16"),
    Case("llama-3.1-8b over 4", "chunk of 512", 2, "bfloat16"),
    Case("llama-3.1-8b", "chain", 32, "bfloat16", 8192 + 128),
    Case("llama-3.1-8b", "tree", 3, "int8"),
    Case("llama-3.3-70b over 8", "chain", 2, "bfloat16"),
    Case("gemma3-4b", "tree", 2, "bfloat16"),
    Case("gemma3-4b", "tree", 2, "bfloat16", sinks=True),
    Case("llama-3.1-8b", "chunk of 512", 2, "int8", sinks=True),
)
ALL = tuple(
    (Case(name, queries, 2, dtype), generation)
    for h, (name, heads) in enumerate(HEADS.items())
    for q, queries in enumerate(QUERIES)
    for d, dtype in enumerate(("bfloat16", "float32", "int8"))
    if dtype != "int8" or heads.kv_heads == 1 or heads.kv_heads % 4 == 0
    # Long chunks in float32 need the most fast memory, which differs between generations.
    for generation in (aot.TOPOLOGIES if (queries, dtype) == LARGEST else [aot.turn(h + q + d)])
)
"""The cases that need most memory on all generations, the others on one each."""


def compile_case(case: Case, generation: str, *, writes: bool = False) -> dict[str, Any]:
    """Compile the kernel, optionally the variant that also writes the rows of its queries.

    In the report, `arrays_of_logits` counts the program's copies of keys or values, and `cache_bytes` is the size of
    both.
    """
    on, n = aot.mesh(generation), QUERIES[case.queries]
    kv_heads, group, dim, window, cap = HEADS[case.heads]
    dtype, scaled = jnp.dtype(case.dtype), case.dtype == "int8"

    def array(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    operands = {
        "q": array(case.batch, n, kv_heads, group, dim, dtype=jnp.bfloat16 if scaled else dtype),
        "first": array(case.batch),
        "positions": array(case.batch, n),
    }
    for side in ("k", "v"):
        operands[side] = array(case.batch, case.slots, kv_heads, dim, dtype=dtype)
        if scaled:
            operands[f"{side}_scale"] = array(case.batch, case.slots, kv_heads, dtype=jnp.float32)
    if case.queries.startswith("tree"):
        operands["seen"] = array(case.batch, n, n, dtype=bool)
    if case.sinks:
        operands["sinks"] = array(kv_heads, group, dtype=jnp.float32)
    if writes:
        rows = array(case.batch, n, kv_heads, dim, dtype=jnp.bfloat16)
        operands["new"] = NewRows(rows, rows, array(case.batch))

    def attend(caches: dict[str, Any], operands: dict[str, Any]) -> Any:
        form = write_and_attend if writes else tree_attention
        return form(**caches, **operands, window=window, cap=cap, implementation="pallas_tpu")

    caches = {side: operands.pop(side) for side in ("k", "v")}
    elements = case.batch * case.slots * kv_heads * dim
    report = aot.compile_for(
        attend,
        *(aot.abstract(tree, on) for tree in (caches, operands)),
        watch=elements,
        donate_argnums=(0,) if writes else (),
    )
    return {"cache_bytes": 2 * elements * dtype.itemsize, **report}


def layouts_of_scales(form: str, batch: int, generation: str) -> set[str]:
    """Return the layouts of a cache's scales in a loop over steps: attention of 6 nodes, and the commit."""
    on, heads, nodes, slots = aot.mesh(generation), HEADS["llama-3.1-8b"], 6, 4224
    cache = jax.eval_shape(lambda: init_cache(1, (batch, slots, heads.kv_heads, heads.dim), "int8"))
    shape = (batch, nodes, heads.kv_heads)
    q = jax.ShapeDtypeStruct((*shape, heads.group, heads.dim), jnp.bfloat16)
    new = jax.ShapeDtypeStruct((*shape, heads.dim), jnp.bfloat16)

    def loop(cache: KVCache, q: jax.Array, new: jax.Array, start: jax.Array) -> Any:
        def step(_: Any, carried: Any) -> Any:
            cache, start, _ = carried
            attend = attending(form, Visible.causal(start, nodes), slots, None)
            out, k, v = attend(q, cache.k[0], cache.v[0], (new, new), scale=heads.dim**-0.5, cap=None)
            path = jnp.broadcast_to(jnp.asarray([0, 2, 5]), (batch, 3))
            return commit_path(cache.replace(k=(k,), v=(v,)), start, path), start + 3, out

        return lax.fori_loop(0, 10, step, (cache, start, q))

    operands = aot.abstract((cache, q, new, jax.ShapeDtypeStruct((batch,), jnp.int32)), on)
    pattern = re.compile(rf"f32\[{batch},{slots},{heads.kv_heads}\]{{([\d,]+)")
    lowered = jax.jit(loop, donate_argnums=0).lower(*operands)
    return aot.compile_program(lowered, read=lambda text: set(pattern.findall(text)))["read"]
