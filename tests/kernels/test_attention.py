"""`tree_attention`, compared with softmax in numpy float64: every implementation runs the same cases."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import AttentionBlocks, BlockError, NewRows, tree_attention, write_and_attend
from tests.helpers import slow_but
from tests.helpers.implementations import IMPLEMENTATIONS, assert_no_races

DIM = 128
SMALL = AttentionBlocks(16, 4, 3)
"""Blocks that divide even a small case into many blocks and tiles."""


class Case(NamedTuple):
    q: Any
    k: Any
    v: Any
    first: Any
    options: dict[str, Any]


def random_tree(rng, n):
    """Return the mask bool[N, N] of a random tree, whose nodes see themselves and their ancestors, and its depths."""
    mask, depth = np.eye(n, dtype=bool), np.zeros(n, int)
    for i in range(1, n):
        parent = rng.integers(0, i)
        mask[i] |= mask[parent]
        depth[i] = depth[parent] + 1
    return mask, depth


def make(
    seed, *, b=3, n=6, k=2, g=2, d=DIM, s=53, dtype="float32", tree=True, int8=False, sinks=False, **options
):
    """Return ragged rows, with large numbers in the unwritten slots, which no query may see."""
    rng = np.random.default_rng(seed)
    first = rng.integers(0, s - n + 1, b)
    first[0], first[-1] = 0, s - n  # an empty row and a full one
    q = jnp.asarray(rng.normal(size=(b, n, k, g, d)), jnp.bfloat16 if int8 else dtype)
    cache = rng.normal(size=(2, b, s, k, d))
    for row, end in enumerate(first + n):
        cache[:, row, end:] = 50
    if int8:
        keys, values = (jnp.asarray(np.clip(np.round(x * 40), -127, 127), jnp.int8) for x in cache)
        for name in ("k_scale", "v_scale"):
            options[name] = jnp.asarray(rng.uniform(0.01, 0.04, (b, s, k)), jnp.float32)
    else:
        keys, values = (jnp.asarray(x, dtype) for x in cache)
    if tree:
        trees = [random_tree(rng, n) for _ in range(b)]
        options["seen"] = jnp.asarray(np.stack([mask for mask, _ in trees]))
        options["positions"] = jnp.asarray(first[:, None] + np.stack([x for _, x in trees]), jnp.int32)
    if sinks:
        options["sinks"] = jnp.asarray(rng.normal(size=(k, g)) + 3, jnp.float32)
    return Case(q, keys, values, jnp.asarray(first, jnp.int32), options)


def visible(case: Case) -> np.ndarray:
    """Return bool[B, N, S], computed slot by slot."""
    (b, n), s, first = case.q.shape[:2], case.k.shape[1], np.asarray(case.first)
    extra = {name: np.asarray(x) for name, x in case.options.items() if hasattr(x, "shape")}
    positions = extra.get("positions", first[:, None] + np.arange(n))
    rows, mask = extra.get("seen_positions", positions), extra.get("seen", np.tril(np.ones((b, n, n), bool)))
    window, out = case.options.get("window"), np.zeros((b, n, s), bool)
    for i, j, slot in np.ndindex(out.shape):
        row = slot - first[i]
        if row < mask.shape[2]:
            key = slot if row < 0 else rows[i, row]
            out[i, j, slot] = (row < 0 or mask[i, j, row]) and (
                window is None or key > positions[i, j] - window
            )
    return out


def softmax(case: Case) -> np.ndarray:
    """Return the attention output in float64."""
    q, k, v = (np.asarray(x.astype(jnp.float32), np.float64) for x in case[:3])
    if "k_scale" in case.options:
        k, v = (x * np.asarray(case.options[f"{y}_scale"])[..., None] for x, y in ((k, "k"), (v, "v")))
    scores = np.einsum("bnkgd,bskd->bnkgs", q, k) * case.options.get("scale", q.shape[-1] ** -0.5)
    if cap := case.options.get("cap"):
        scores = cap * np.tanh(scores / cap)
    scores = np.where(visible(case)[:, :, None, None], scores, -np.inf)
    if "sinks" in case.options:
        sinks = np.broadcast_to(np.asarray(case.options["sinks"])[..., None], (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, sinks], axis=-1)
    top = np.maximum(scores.max(-1, keepdims=True), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bnkgs,bskd->bnkgd", weights[..., : k.shape[1]] / np.where(total == 0, 1, total), v)


def run(name, case, blocks=None, new=None):
    options = IMPLEMENTATIONS[name]
    if "interpret" in options:
        options = options | {"blocks": blocks or SMALL}
    static = {name: x for name, x in case.options.items() if not hasattr(x, "shape")}
    arrays = {name: x for name, x in case.options.items() if hasattr(x, "shape")}

    def call(q, k, v, first, arrays, new):
        if new is not None:
            return write_and_attend(q, k, v, new, first, **arrays, **static, **options)
        return tree_attention(q, k, v, first, **arrays, **static, **options)

    quick = {"xla_backend_optimization_level": 0} if "interpret" in options else None
    return jax.jit(call, compiler_options=quick)(case.q, case.k, case.v, case.first, arrays, new)


def check(implementation, case, blocks=None):
    output = run(implementation, case, blocks)
    assert output.shape == case.q.shape and output.dtype == case.q.dtype
    # The weights are rounded to the dtype of the values before the sum, and the result after it: two roundings of
    # 2^-9 each.
    exact = output.dtype == jnp.float32 and case.k.dtype == jnp.float32
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if exact else {"atol": 2**-6, "rtol": 2**-7}
    np.testing.assert_allclose(output.astype(jnp.float32), softmax(case), **tolerance)
    if implementation == "mosaic_simulated":
        assert_no_races()


def region_with_positions_of_its_own():
    case = make(8, s=60, window=4)
    rng = np.random.default_rng(8)
    first = np.minimum(np.asarray(case.first), 60 - 9)
    options = case.options | {
        "seen": jnp.asarray(rng.random((3, 6, 9)) < 0.6),
        "seen_positions": jnp.asarray(first[:, None] + rng.integers(0, 5, (3, 9)), jnp.int32),
    }
    return case._replace(first=jnp.asarray(first, jnp.int32), options=options)


def query_that_sees_nothing(**options):
    """Return a case whose first row has no token before its tree, so that the result of a blind query is zeros."""
    case = make(9, b=2, **options)
    mask = np.asarray(case.options["seen"]).copy()
    mask[0, 3] = False
    return case._replace(options=case.options | {"seen": jnp.asarray(mask)})


CASES = {
    "trees in float32": lambda: make(0),
    "trees with a window in float32": lambda: make(0, window=5),
    "chunk of a prompt": lambda: make(1, b=4, n=11, tree=False, dtype="bfloat16"),
    "chunk with a window of one": lambda: make(1, b=4, n=11, tree=False, window=1, dtype="bfloat16"),
    "soft cap and scale": lambda: make(2, cap=2.0, scale=0.5),
    "sinks, a window and a soft cap": lambda: make(2, g=3, window=5, cap=2.0, sinks=True),
    "sinks of a chunk": lambda: make(1, b=4, n=11, tree=False, window=7, dtype="bfloat16", sinks=True),
    "sinks of int8 rows": lambda: make(6, b=2, k=4, s=256, int8=True, sinks=True),
    "one query and many heads": lambda: make(3, b=2, n=1, k=16, g=1, tree=False, dtype="bfloat16"),
    "wide heads": lambda: make(4, b=2, d=256, dtype="bfloat16"),
    "one narrow head": lambda: make(5, k=1, g=4, s=64, dtype="bfloat16"),
    "int8 with a scale per token and head": lambda: make(6, b=2, k=4, s=256, int8=True),
    "trees of more nodes than a word has bits": lambda: make(7, b=2, n=70, s=150, g=1),
    "region with positions of its own": region_with_positions_of_its_own,
    "query that sees nothing": query_that_sees_nothing,
    "query that sees only its sink": lambda: query_that_sees_nothing(sinks=True),
}
BLOCKS = {
    "sinks of int8 rows": AttentionBlocks(128, 4),
    "int8 with a scale per token and head": AttentionBlocks(128, 4),
    "trees of more nodes than a word has bits": AttentionBlocks(32, 70),
}
SIMULATED = [("mosaic_simulated", case) for case in CASES]
LIKE_ANOTHER = (
    "trees in float32", "chunk with a window of one", "sinks of a chunk", "one query and many heads",
    "int8 with a scale per token and head",
)  # fmt: skip
"""Cases that differ from another in one option. They are slow."""
PAIRS = [(name, case) for name in ("reference", "xla", "mosaic") for case in CASES]


@pytest.mark.parametrize(
    ("implementation", "case"),
    [
        *slow_but(PAIRS, *[pair for pair in PAIRS if pair[1] not in LIKE_ANOTHER]),
        *slow_but(SIMULATED, ("mosaic_simulated", "trees with a window in float32")),
    ],
)
def test_attention_is_softmax_in_float64(implementation, case):
    check(implementation, CASES[case](), BLOCKS.get(case))


WRITTEN = {
    "one row": ({"b": 1}, 0),
    "a window": ({"b": 4, "dtype": "bfloat16", "window": 5}, 0),
    "sinks and a window": ({"b": 3, "sinks": True, "window": 5}, 0),
    "after other rows of the region": ({"b": 3, "n": 9, "dtype": "bfloat16"}, 3),
    "one narrow head": ({"b": 2, "k": 1, "g": 4, "s": 64, "dtype": "bfloat16"}, 0),
}
"""Cases of new rows: the arguments of `make`, and the number of rows of the region before the new ones."""


@pytest.mark.parametrize("name", slow_but(WRITTEN, "after other rows of the region"))
@pytest.mark.parametrize("implementation", slow_but(["xla", "mosaic", "mosaic_simulated"], "xla", "mosaic"))
def test_new_rows_are_written_and_seen(implementation, name):
    """The result equals that over a cache with the new rows, which are cast from float32 to the cache's dtype."""
    options, offset = WRITTEN[name]
    case = make(12, **options)
    row, n = np.arange(case.q.shape[0])[:, None], case.q.shape[1]
    slot = case.first + offset
    slots = np.asarray(slot)[:, None] + np.arange(n - offset)
    new = NewRows(*(x[row, slots].astype(jnp.float32) for x in (case.k, case.v)), slot)
    empty = case._replace(k=case.k.at[row, slots].set(40), v=case.v.at[row, slots].set(40))
    output, k, v = run(implementation, empty, new=new)
    np.testing.assert_array_equal(output, run(implementation, case))
    np.testing.assert_array_equal(k, case.k)
    np.testing.assert_array_equal(v, case.v)
    if implementation == "mosaic_simulated":
        assert_no_races()


@pytest.mark.parametrize(
    ("shape", "dtype", "blocks", "sentence"),
    [
        ((1, 32, 3, 128), "bfloat16", None, "3 heads of bfloat16 on a device: the kernel takes 2 times 1, 2, 4"),
        ((1, 33, 1, 128), "bfloat16", None, "33 slots: this kernel reads a multiple of 16, so allocate 48"),
        ((1, 32, 2, 192), "bfloat16", None, "heads are 192 wide: the kernel takes multiples of 128"),
        ((1, 32, 2, 128), "float32", AttentionBlocks(0, 1), r"blocks\.slots is 0: expected a positive multiple of 1"),
        ((1, 32, 2, 128), "float32", AttentionBlocks(16, 1, 1), "1 queries and 1 buffers"),
    ],
)  # fmt: skip
def test_shapes_and_blocks_that_the_kernel_does_not_take_are_refused(shape, dtype, blocks, sentence):
    k, first = jnp.zeros(shape, dtype), jnp.zeros(1, jnp.int32)
    with pytest.raises(BlockError, match=sentence):
        tree_attention(k[:, :1, :, None], k, k, first, implementation="pallas_tpu", blocks=blocks)


@pytest.mark.parametrize(
    ("dtype", "options", "sentence"),
    [
        ("float32", {"implementation": "cuda"}, "implementation is 'cuda': expected None or one of"),
        ("float32", {"interpret": True}, "blocks and interpret belong to a kernel"),
        ("float32", {"k_scale": jnp.ones((1, 32, 2))}, "only one of k_scale and v_scale is given"),
        ("int8", {}, "keys are int8 without scales"),
    ],
)
def test_options_that_exclude_each_other_are_refused(dtype, options, sentence):
    k, first = jnp.zeros((1, 32, 2, 128)), jnp.zeros(1, jnp.int32)
    with pytest.raises(ValueError, match=sentence):
        tree_attention(k[:, :1, :, None], k.astype(dtype), k.astype(dtype), first, **options)


def with_nan(case, first, hidden):
    """Return the case with rows that begin at `first` and NaN in the hidden slots, one slice per row."""
    k, v = np.asarray(case.k).copy(), np.asarray(case.v).copy()
    for row, slots in enumerate(hidden):
        k[row, slots] = v[row, slots] = np.nan
    return case._replace(k=jnp.asarray(k), v=jnp.asarray(v), first=jnp.asarray(first, jnp.int32))


def test_the_kernel_reads_no_block_after_the_end_of_a_row():
    """Fill the blocks after the last one of each row with NaN, which would show in any product."""
    case = make(10, b=4, s=96)
    first = jnp.asarray([0, 10, 26, 58], jnp.int32)
    options = case.options | {"positions": first[:, None] + jnp.arange(6, dtype=jnp.int32)[None]}
    # The trees end at slots 6, 16, 32 and 64.
    hidden = [slice(16, None), slice(16, None), slice(32, None), slice(64, None)]
    output = run("mosaic", with_nan(case._replace(options=options), first, hidden), SMALL)
    assert np.isfinite(output).all()


def test_the_kernel_reads_no_slot_before_a_window():
    case = make(11, b=2, s=96, window=8, tree=False)
    # The first query sees 7 slots before it.
    broken = with_nan(case, [60, 80], [slice(53), slice(73)])
    assert np.isfinite(run("mosaic", broken, AttentionBlocks(16, 6))).all()


def test_a_tile_of_a_prompt_reads_no_block_after_its_last_query():
    """The second of two tiles of 8 queries sees 8 more slots."""
    broken = with_nan(make(12, b=1, n=16, k=1, s=96, tree=False), [16], [slice(24, None)])
    output = run("mosaic", broken, AttentionBlocks(8, 8))
    assert np.isfinite(output[:, :8]).all() and not np.isfinite(output[:, 8:]).any()
