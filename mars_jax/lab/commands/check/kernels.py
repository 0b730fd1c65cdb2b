"""Comparison of every kernel operation with its reference on this device.

B batch, N nodes, D depth, V vocabulary. The reference runs on the CPU unless JAX_PLATFORMS excludes it.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kernels_pallas import AcceptControls, dispatch, margin_accept, margin_stats, top_k, tree_attention
from mars_jax.core.tree import ancestors, static_topology
from mars_jax.core.types import PyTree
from mars_jax.lab.commands.check.large import error_summary, looped, seconds_of
from mars_jax.models import moe
from mars_jax.models.attention import attend
from mars_jax.models.layers import dense
from mars_jax.models.quantize import Int4
from mars_jax.utils import activity
from mars_jax.utils.types import JsonObject

VOCABULARIES = {"interpreted": 1500, "compiled": 32000}
"""V for interpreted and for compiled kernels. The first is not a multiple of the width of a vector register."""
ROUNDS = 7
"""Number of timed runs per compiled operation."""
LOOPED = 50
"""Number of calls per timed run on an accelerator, where dispatching a call takes longer than the call itself."""
ROWS = 12
"""Number of rows, B."""
_SUMS = ("logsumexp", "result")
"""Names of results that are sums, whose rounding depends on the order of addition. All others must be bitwise equal."""


class Case(NamedTuple):
    """An operation with its operands on the host."""

    operation: str
    shape: str
    dtype: str
    call: Callable[..., PyTree]  # called as call(*operands, **options)
    operands: tuple[PyTree, ...]
    tolerance: float = 1e-5  # tolerance of `_SUMS`, relative to the maximum absolute value
    expected: PyTree = None  # None: use the operation's own reference
    has_shards: bool = True  # whether a partitioned form exists


def forms(platform: str) -> dict[str, str]:
    """Return the implementations to check on a platform, each "compiled" or "interpreted".

    On a CPU, the TPU kernel is interpreted.

    >>> forms("gpu"), forms("cpu")["pallas_tpu"]
    ({'xla': 'compiled', 'partitioned': 'compiled'}, 'interpreted')
    """
    how_by_form = {"xla": "compiled", "partitioned": "compiled"}
    if platform == "cpu":
        how_by_form["pallas_tpu"] = "interpreted"
    elif platform == "tpu" and dispatch.switched_on():
        how_by_form["pallas_tpu"] = "compiled"
    return how_by_form


def check_kernels() -> list[JsonObject]:
    """Return one row per case and implementation, with status "equal", "differs" or "failed" and the reason."""
    rows = []
    for form, how in forms(jax.default_backend()).items():
        for case in cases(VOCABULARIES[how]):
            if case.has_shards or form != "partitioned":
                rows.append(check_case(case, form, how))
    # These operations choose their implementation for the device, and have no partitioned form.
    for case in (_experts(), _attention_of_a_model(), *map(_int4, (1, 5, 60), (128, 32, 32))):
        rows.append(check_case(case))
    return rows


def check_case(case: Case, form: str = "default", how: str = "compiled") -> JsonObject:
    """Run a case with one implementation, and return its row of the report."""
    row: JsonObject = {"operation": case.operation, "implementation": form, "how": how}
    row |= {"shape": case.shape, "dtype": case.dtype, "milliseconds": None}
    options: JsonObject = {}
    if form != "default":
        options["implementation"] = form
    if how == "interpreted":
        options["interpret"] = True
    expected = case.expected
    if expected is None:
        expected = _reference(case)
    num_calls = 1 if jax.default_backend() == "cpu" else LOOPED
    try:
        with activity.doing(f"{case.operation}, {form}"):
            call = functools.partial(case.call, **options)
            run = looped(call, num_calls, tuple(jax.device_put(case.operands)))
            actual = jax.device_get(run())
            # The speed of the interpreter is unrelated to that of the device.
            if how == "compiled":
                row["milliseconds"] = 1e3 * statistics.median(seconds_of(run, ROUNDS)) / num_calls
    except Exception as error:  # compilers and drivers raise errors of many types
        return row | {"status": "failed", "detail": error_summary(error)}
    if wrong_results := differences(expected, actual, case.tolerance):
        return row | {"status": "differs", "detail": ", ".join(wrong_results)}
    return row | {"status": "equal", "detail": None}


def _reference(case: Case) -> PyTree:
    try:
        on_cpu = jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:
        # JAX_PLATFORMS excludes the CPU.
        on_cpu = contextlib.nullcontext()
    with on_cpu:
        return jax.device_get(
            jax.jit(functools.partial(case.call, implementation="reference"))(*case.operands)
        )


def differences(expected: PyTree, result: PyTree, tolerance: float) -> list[str]:
    """Return the names of the differing results, each with its number of wrong entries.

    >>> from kernels_pallas import MarginStats
    >>> one, two = (MarginStats(*np.full((5, 3), value, np.float32)) for value in (1, 2))
    >>> differences(one, one, 0.0), differences(one, two._replace(logsumexp=one.logsumexp), 0.0)[0]
    ([], 'top1 (3 of 3)')
    """
    wrong_results = []
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(result), strict=True
    ):
        result_name = jax.tree_util.keystr(path[-1:], simple=True) or "result"
        if a.shape != b.shape:
            wrong_results.append(f"{result_name} (shape {b.shape} in place of {a.shape})")
            continue
        is_wrong = np.asarray(a != b)
        if result_name in _SUMS:
            is_wrong = ~np.isclose(a, b, rtol=0, atol=tolerance * np.max(np.abs(a)))
        if is_wrong.any():
            wrong_results.append(f"{result_name} ({is_wrong.sum()} of {is_wrong.size})")
    return wrong_results


@functools.cache
def cases(vocab: int) -> list[Case]:
    """Return the cases: chains and trees, greedy and sampled, with both margins and both dtypes."""
    stats = functools.partial(margin_stats, logsumexp=True)
    # Parents of a chain of 5 drafted tokens, and of a tree with 1 + 4 + 8 + 8 nodes.
    chain_parents, tree_parents = np.arange(6, dtype=np.int32) - 1, static_topology((4, 2, 1))[0]
    logits_cases = []
    for dtype in ("float32", "bfloat16"):
        logits = _logits(8, vocab, dtype, seed=0)
        shape = f"[{ROWS}, 8, {vocab}]"
        logits_cases.append(Case("margin_stats", shape, dtype, stats, (logits,)))
        logits_cases.append(Case("top_k", f"10 of {shape}", dtype, functools.partial(top_k, k=10), (logits,)))
    return [
        *logits_cases,
        _accept("chain", chain_parents, 5, vocab, "float32", "ratio", sampled=False),
        _accept("tree", tree_parents, 3, vocab, "bfloat16", "gap", sampled=True),
        _attention("bfloat16", None),
        _attention("float32", 70),
    ]


def _logits(nodes: int, vocab: int, dtype: str, *, seed: int) -> np.ndarray:
    """Return positive logits [B, N, V]. At two thirds of the nodes, the two best logits tie in bfloat16."""
    random = np.random.default_rng(seed)
    logits = random.gamma(2.0, size=(ROWS, nodes, vocab)).astype(np.float32)
    # Choose a random token other than the best one as the runner-up.
    best_ids = np.argmax(logits, axis=-1)
    runner_up_ids = (best_ids + random.integers(1, vocab, best_ids.shape)) % vocab
    best_logit = np.take_along_axis(logits, best_ids[..., None], axis=-1)
    second_logit = np.where(np.arange(nodes)[None, :, None] % 3 < 2, best_logit * 0.9999, 0.5 * best_logit)
    np.put_along_axis(logits, runner_up_ids[..., None], second_logit, axis=-1)
    return np.asarray(jnp.asarray(logits, dtype))


def _accept(
    name: str, parents: np.ndarray, depth: int, vocab: int, dtype: str, margin: str, *, sampled: bool
) -> Case:
    """Return a case for `margin_accept` with four kinds of rows.

    A row is unrestricted, is strict, allows only relaxed runs of length one, or has a runner-up as a stop token. The
    token of a node is one of the three best tokens at its parent; some nodes have no token.
    """
    nodes = len(parents)
    random = np.random.default_rng(nodes)
    logits = _logits(nodes, vocab, dtype, seed=nodes)
    # The best tokens of every node, i32[B, N, 3]. In a tie, the stable sort prefers the lower id, as the kernels do.
    best_ids = np.argsort(-logits.astype(np.float32), axis=-1, kind="stable").astype(np.int32)[..., :3]
    runner_up_ids = best_ids[..., 1]
    # With y=None, the argmax is used.
    y = None
    if sampled:
        y = np.where(random.random(runner_up_ids.shape) < 0.3, runner_up_ids, best_ids[..., 0])
    ranks = random.choice(3, p=(0.4, 0.5, 0.1), size=(ROWS, nodes, 1))
    tokens = np.take_along_axis(best_ids[:, np.maximum(parents, 0)], ranks, axis=-1)[..., 0]
    tokens[random.random(tokens.shape) < 0.1] = -1
    # The root is the last committed token, which is not verified, so any valid id will do.
    tokens[:, 0] = 1
    row_numbers = np.arange(ROWS)
    controls = AcceptControls(
        theta=jnp.full(ROWS, {"ratio": 0.9, "gap": 0.5}[margin], jnp.float32),
        strict=jnp.asarray(row_numbers % 4 == 1),
        max_relaxed_run=jnp.where(row_numbers % 4 == 2, 1, 8).astype(jnp.int32),
        stop_tokens=jnp.where(row_numbers % 4 == 3, runner_up_ids[:, 1], -1).astype(jnp.int32)[:, None],
    )
    call = functools.partial(margin_accept, max_depth=depth, margin=margin, logsumexp=True)
    rows_of_parents = np.tile(parents.astype(np.int32), (ROWS, 1))
    operands = (logits, tokens, rows_of_parents, y, jax.device_get(controls))
    return Case("margin_accept", f"{name} [{ROWS}, {nodes}, {vocab}], {margin}", dtype, call, operands)


def _normals(random: np.random.Generator, dtype: str, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [np.asarray(jnp.asarray(random.normal(size=shape), dtype)) for shape in shapes]


def _attention(dtype: str, window: int | None) -> Case:
    """Return a case for attention in trees of seven nodes, after contexts of different lengths."""
    slots, heads, group, dim = 512, 2, 4, 128
    parents, depths = static_topology((2, 2))
    nodes, random = len(parents), np.random.default_rng(0)
    cache = (ROWS, slots, heads, dim)
    q, k, v = _normals(random, dtype, (ROWS, nodes, heads, group, dim), cache, cache)
    # The nodes of a row are in the slots after its context.
    first = random.integers(0, slots - nodes, ROWS).astype(np.int32)
    visible = np.asarray(ancestors(jnp.asarray(parents)[None], nodes))

    def call(
        q: Array, k: Array, v: Array, first: Array, visible: Array, depths: Array, **options: Any
    ) -> Array:
        positions = first[:, None] + depths[None]
        return tree_attention(q, k, v, first, seen=visible, positions=positions, window=window, **options)

    shape = f"[{ROWS}, {nodes}, {heads}, {group}, {dim}] over {slots}"
    if window is not None:
        shape += f", window {window}"
    operands = (q, k, v, first, visible, depths.astype(np.int32))
    # A TPU multiplies in bfloat16 even if the operands are wider.
    return Case("tree_attention", shape, dtype, call, operands, tolerance=0.01, has_shards=False)


def _experts() -> Case:
    """Return a case for the matrix products in a mixture of experts. numpy computes the expected result."""
    random = np.random.default_rng(0)
    x, w = _normals(random, "bfloat16", (48, 256), (4, 128, 256))
    rows_per_expert = np.array([20, 0, 1, 27], np.int32)
    # Rows are sorted by expert, and expert 1 gets no rows.
    expert_of_row = np.repeat(np.arange(4), rows_per_expert)
    expected = np.einsum("ri,roi->ro", x.astype(np.float32), w.astype(np.float32)[expert_of_row])
    # Products of bfloat16 numbers are exact in float32, so a sum of 256 products is rounded at most 256 times.
    return Case(
        "dense_by_expert",
        "[48, 256] by 4 experts",
        "bfloat16",
        moe.dense_by_expert,
        (x, w, rows_per_expert),
        tolerance=256 * 2**-24,
        expected=expected,
    )


def _attention_of_a_model() -> Case:
    """Return a case for the transformer's attention (on a GPU, cuDNN's). numpy computes the expected result."""
    random = np.random.default_rng(0)
    nodes, heads, group, dim, slots = 60, 2, 4, 128, 512
    cache = (ROWS, slots, heads, dim)
    q, k, v = _normals(random, "bfloat16", (ROWS, nodes, heads, group, dim), cache, cache)
    # The first `num_valid` slots of each row are valid, and each node attends to about 70% of them.
    num_valid = random.integers(nodes, slots + 1, (ROWS, 1, 1))
    mask = (random.random((ROWS, nodes, slots)) < 0.7) & (np.arange(slots) < num_valid)
    # A fully masked node outputs zeros.
    mask[0, 0] = False
    scores = np.einsum("bnkgd,bskd->bnkgs", *(x.astype(np.float32) for x in (q, k))) * dim**-0.5
    # Scores have a standard deviation of about 1, so exp does not overflow even without subtracting their maximum.
    exp_scores = np.exp(scores) * mask[:, :, None, None]
    weighted_values = np.einsum("bnkgs,bskd->bnkgd", exp_scores, v.astype(np.float32))
    # Weights, values and results are rounded to bfloat16, with an error of up to 2^-8 for numbers near 1.
    return Case(
        "attend",
        f"[{ROWS}, {nodes}, {heads}, {group}, {dim}] over {slots}",
        "bfloat16",
        functools.partial(attend, flash=True),
        (q, k, v, mask, np.int32(slots)),
        tolerance=2.0**-7,
        expected=weighted_values / np.maximum(np.sum(exp_scores, axis=-1), 1e-9)[..., None],
    )


def _int4(rows: int, group: int) -> Case:
    """Return a case for products with 4-bit weights in groups of `group` inputs. numpy computes the expected result."""
    random, inputs, outputs = np.random.default_rng(0), 512, 256
    [x] = _normals(random, "bfloat16", (rows, inputs))
    # A weight is value * scale + offset. Each group of inputs has one scale and one offset per output.
    w = Int4(
        values=jnp.asarray(random.integers(-8, 8, (inputs // group, group, outputs)), jnp.int4),
        scale=jnp.asarray(random.normal(size=(inputs // group, outputs)), jnp.float16),
        offset=jnp.asarray(random.normal(size=(inputs // group, outputs)), jnp.float32),
        dtype=jnp.bfloat16,
    )
    # Rounding a weight to bfloat16 causes a relative error of up to 2^-8. In a sum over 512 inputs, the errors
    # partly cancel.
    return Case(
        "dense",
        f"[{rows}, {inputs}], groups of {group}",
        "int4",
        functools.partial(dense, dtype=jnp.float32),
        (x, w),
        tolerance=2.0**-8,
        expected=x.astype(np.float32) @ np.asarray(w.astype(jnp.float32)).T,
    )
