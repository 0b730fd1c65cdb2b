"""Every kernel against the reference, on the device that is there: random trees, and ties on purpose.

B batch, N nodes, D depth, V vocabulary. The reference runs on the CPU where this process has one beside its device.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import AcceptControls, api, top_k, tree_attention, trial
from mars_jax.core.tree import ancestors, static_topology
from mars_jax.lab.commands.check.timing import looped, taken
from mars_jax.models import moe
from mars_jax.models.attention import attend
from mars_jax.models.layers import dense
from mars_jax.models.quantize import Int4

INTERPRETED = 1500
"""V for an interpreter, not a whole number of registers."""
COMPILED = 32000
"""V for a device."""
TIMES = 7
LOOPED = 50
"""Calls of a loop on an accelerator, of which one is shorter than its dispatch."""
ROWS = 12
"""B."""


class Form(NamedTuple):
    """A way to run an operation."""

    name: str  # of the implementation
    options: dict[str, Any]
    required: bool = True  # a failure is something wrong

    @property
    def how(self) -> str:
        return "interpreted" if self.options.get("interpret") else "compiled"


class Case(NamedTuple):
    """Operands on the host, and the operation on them."""

    operation: str
    shape: str
    dtype: str
    call: Callable[..., Any]  # (*operands, **options of a form)
    operands: Any
    without: tuple[str, ...] = ()  # implementations that it does not have


class Attended(NamedTuple):
    """The result of attention, by a name."""

    mixed: jax.Array


def forms(platform: str) -> list[Form]:
    """The forms to check on a platform: XLA's, and the kernel, compiled on a TPU and interpreted on a CPU.

    >>> [(form.name, form.how) for form in forms("tpu")][-1]
    ('pallas_tpu', 'compiled')
    """
    made = [Form(name, {"implementation": name}) for name in ("xla", "partitioned")]
    if platform == "tpu":
        made.append(Form("pallas_tpu", {"implementation": "pallas_tpu"}, required=trial.switched_on()))
    elif platform == "cpu":
        made.append(Form("pallas_tpu", {"implementation": "pallas_tpu", "interpret": True}))
    return made


def check_kernels(platform: str, tick: Callable[[str], None] = lambda what: None) -> list[dict[str, Any]]:
    """One row for each form of each operation on each of its cases: "equal", "differs" or "failed", and why.

    Args:
      platform: of the device, as `jax.default_backend()` names it.
      tick: told what is being checked.
    """
    rows = []
    for form in forms(platform):
        for case, want in _expected(INTERPRETED if form.options.get("interpret") else COMPILED):
            if form.name in case.without:
                continue
            tick(f"{case.operation}, {form.name}")
            rows.append(_row(case, form, **_compared(case, form, want)))
    products = (_experts(), _attended(), _in_4_bits(1, 128), _in_4_bits(5, 32), _in_4_bits(60, 32))
    for case, want, tolerance in products:
        tick(case.operation)
        rows.append(_product(case, want, tolerance))
    return rows


@functools.cache
def _expected(vocab: int) -> list[tuple[Case, Any]]:
    """The cases with what the reference makes of them."""
    with _on_cpu():
        calls = [(case, _compiled(case.call, implementation="reference")) for case in cases(vocab)]
        return [(case, jax.device_get(call(*case.operands))) for case, call in calls]


def _row(case: Case, form: Form, **found: Any) -> dict[str, Any]:
    return {
        "operation": case.operation,
        "implementation": form.name,
        "how": form.how,
        "shape": case.shape,
        "dtype": case.dtype,
        "required": form.required,
    } | found


def _compared(case: Case, form: Form, want: Any) -> dict[str, Any]:
    try:
        got, milliseconds = _timed(functools.partial(case.call, **form.options), case.operands)
    except Exception as error:  # whatever a compiler or a driver raises is what the report is about
        return {"status": "failed", "detail": _line(error), "milliseconds": None}
    wrong = differences(want, got)
    return {
        "status": "differs" if wrong else "equal",
        "detail": ", ".join(wrong) or None,
        "milliseconds": None if form.options.get("interpret") else milliseconds,
    }


def _compiled(call: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(call, **options))


def _timed(call: Callable[..., Any], operands: Any) -> tuple[Any, float]:
    """Return the results of a call, and its milliseconds."""
    times = 1 if jax.default_backend() == "cpu" else LOOPED
    run = looped(call, times, tuple(jax.device_put(operands)))
    return jax.device_get(run()), 1e3 * statistics.median(taken(run, TIMES)) / times


def _on_cpu() -> contextlib.AbstractContextManager:
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return contextlib.nullcontext()


_CLOSE = {"logsumexp": (1e-5, 1e-6), "mixed": (0.0, 0.03)}
"""Results that are sums, with how far they may be off, of themselves and at all; attention gives means of numbers of
about 1."""


def differences(want: Any, got: Any) -> list[str]:
    """The names of the results that differ, with how many numbers of them do.

    All are equal but the logsumexp, a sum in another order, where 1e-5 of itself is 80 roundings of float32, and what
    attention mixes, whose products are of bfloat16 on a TPU also where the numbers are not.

    >>> from kernels_pallas import MarginStats
    >>> one, two = (MarginStats(*np.full((5, 3), value, np.float32)) for value in (1, 2))
    >>> differences(one, one), differences(one, two._replace(logsumexp=one.logsumexp))[0]
    ([], 'top1 (3 of 3)')
    """
    wrong = []
    for name, a, b in _leaves(want, got):
        relative, absolute = _CLOSE.get(name, (0.0, 0.0))
        off = ~np.isclose(a, b, rtol=relative, atol=absolute) if name in _CLOSE else a != b
        if a.shape != b.shape or np.any(off):
            wrong.append(f"{name} ({np.sum(off)} of {a.size})")
    return wrong


def _leaves(want: Any, got: Any) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    for name, a, b in zip(want._fields, want, got, strict=True):
        if hasattr(a, "_fields"):
            yield from _leaves(a, b)
        elif a is not None:
            yield name, np.asarray(a), np.asarray(b)


def cases(vocab: int) -> list[Case]:
    """Chains and trees at temperature 0 and with tokens that were drawn, for each margin and both dtypes."""
    chain = np.arange(6, dtype=np.int32) - 1
    tree = static_topology((4, 2, 1))[0]
    made = []
    for dtype in ("float32", "bfloat16"):
        logits = jnp.asarray(_logits(ROWS, 8, vocab, seed=0), dtype)
        stats = functools.partial(api.margin_stats, logsumexp=True)
        made.append(Case("margin_stats", f"[{ROWS}, 8, {vocab}]", dtype, stats, (np.asarray(logits),)))
        largest = functools.partial(top_k, k=10)
        made.append(Case("top_k", f"10 of [{ROWS}, 8, {vocab}]", dtype, largest, (np.asarray(logits),)))
    for shape, parents, depth, dtype, margin, drawn in (
        ("chain", chain, 5, "float32", "ratio", False),
        ("tree", tree, 3, "bfloat16", "gap", True),
    ):
        accept = functools.partial(api.margin_accept, max_depth=depth, margin=margin, logsumexp=True)
        operands = _drafted(parents, vocab, dtype, margin, drawn=drawn)
        nodes = len(parents)
        made.append(
            Case("margin_accept", f"{shape} [{ROWS}, {nodes}, {vocab}], {margin}", dtype, accept, operands)
        )
    return [*made, *(_attention(dtype, window) for dtype, window in (("bfloat16", None), ("float32", 70)))]


def _attention(dtype: str, window: int | None) -> Case:
    """Trees of seven nodes after texts of different lengths."""
    slots, heads, group, dim = 512, 2, 4, 128
    parents, depths = static_topology((2, 2))
    nodes, draw = len(parents), np.random.default_rng(0)
    q, k, v = (
        np.asarray(jnp.asarray(draw.normal(size=shape), dtype))
        for shape in ((ROWS, nodes, heads, group, dim), (ROWS, slots, heads, dim), (ROWS, slots, heads, dim))
    )
    first = draw.integers(0, slots - nodes, ROWS).astype(np.int32)
    seen = np.asarray(ancestors(jnp.asarray(parents)[None], len(parents)))

    def call(q, k, v, first, seen, depths, **options):
        positions = first[:, None] + depths[None]
        return Attended(
            tree_attention(q, k, v, first, seen=seen, positions=positions, window=window, **options)
        )

    shape = f"[{ROWS}, {nodes}, {heads}, {group}, {dim}] over {slots}" + (
        f", window {window}" * (window is not None)
    )
    operands = (q, k, v, first, seen, depths.astype(np.int32))
    return Case("tree_attention", shape, dtype, call, operands, ("partitioned",))


def _logits(batch: int, nodes: int, vocab: int, *, seed: int) -> np.ndarray:
    """f32[B, N, V] above 0, at two nodes of three with a runner-up near the best: in bfloat16 a tie."""
    draw = np.random.default_rng(seed)
    logits = draw.gamma(2.0, size=(batch, nodes, vocab)).astype(np.float32)
    best = np.argmax(logits, axis=-1)
    near = (best + draw.integers(1, vocab, best.shape)) % vocab
    top = np.take_along_axis(logits, best[..., None], axis=-1)
    value = np.where(np.arange(nodes)[None, :, None] % 3 < 2, top * 0.9999, 0.5 * top)
    np.put_along_axis(logits, near[..., None], value, axis=-1)
    return logits


def _drafted(parents: np.ndarray, vocab: int, dtype: str, margin: str, *, drawn: bool) -> tuple[Any, ...]:
    """(logits, tokens, parents, y, controls) of rows of four kinds in turn: free, strict, with runs of one, and with a
    stop token that a near tie would relax to.

    A node says what its parent's target would, or its runner-up, or anything, or nothing.
    """
    batch, nodes = ROWS, len(parents)
    draw = np.random.default_rng(nodes)
    logits = np.asarray(jnp.asarray(_logits(batch, nodes, vocab, seed=nodes), dtype))
    order = np.argsort(-logits.astype(np.float32), axis=-1, kind="stable")[..., :2]
    y = order[..., 0].astype(np.int32)
    if drawn:
        y = np.where(draw.random(y.shape) < 0.3, order[..., 1], y).astype(np.int32)
    above = np.maximum(parents, 0)
    said = np.stack(
        [
            y[:, above],
            order[:, above, 1],
            draw.integers(0, vocab, (batch, nodes)),
            np.full((batch, nodes), -1),
        ]
    )
    kind = draw.choice(4, p=(0.3, 0.5, 0.1, 0.1), size=(batch, nodes))
    tokens = np.take_along_axis(said, kind[None], axis=0)[0].astype(np.int32)
    tokens[:, 0] = 1
    row = np.arange(batch)
    numbers: dict[str, Any] = {
        "theta": np.full(batch, 0.5 if margin == "gap" else 0.9, np.float32),
        "strict": row % 4 == 1,
        "max_relaxed_run": np.where(row % 4 == 2, 1, 8).astype(np.int32),
        "stop_tokens": np.where(row % 4 == 3, order[:, 1, 1], -1).astype(np.int32)[:, None],
    }
    controls = AcceptControls(**numbers)
    return logits, tokens, np.tile(parents.astype(np.int32), (batch, 1)), y if drawn else None, controls


def _experts() -> tuple[Case, np.ndarray, float]:
    """Products with the matrices of experts, as a mixture takes them here, and numpy's."""
    draw = np.random.default_rng(0)
    x, w = (np.asarray(jnp.asarray(draw.normal(size=s), jnp.bfloat16)) for s in ((48, 256), (4, 128, 256)))
    sizes = np.array([20, 0, 1, 27], np.int32)
    of = np.repeat(np.arange(4), sizes)
    want = np.einsum("ri,roi->ro", x.astype(np.float32), w.astype(np.float32)[of])
    case = Case("dense_by_expert", "[48, 256] by 4 experts", "bfloat16", moe.dense_by_expert, (x, w, sizes))
    # Products of bfloat16 are exact in float32; sums of 256 of them, in any order, are within 256 roundings.
    return case, want, 256 * 2**-24


def _attended() -> tuple[Case, np.ndarray, float]:
    """Attention of a batch of trees as a model takes it here, which on a GPU is cuDNN's, and numpy's."""
    draw, nodes, heads, group, dim, slots = np.random.default_rng(0), 60, 2, 4, 128, 512
    shapes = (ROWS, nodes, heads, group, dim), (ROWS, slots, heads, dim), (ROWS, slots, heads, dim)
    q, k, v = (np.asarray(jnp.asarray(draw.normal(size=shape), jnp.bfloat16)) for shape in shapes)
    live = draw.integers(nodes, slots + 1, (ROWS, 1, 1))
    mask = (draw.random((ROWS, nodes, slots)) < 0.7) & (np.arange(slots) < live)
    mask[0, 0] = False  # sees nothing, and gets zeros
    scores = np.einsum("bnkgd,bskd->bnkgs", *(x.astype(np.float32) for x in (q, k))) * dim**-0.5
    weights = np.exp(scores) * mask[:, :, None, None]
    mixed = np.einsum("bnkgs,bskd->bnkgd", weights, v.astype(np.float32))
    want = mixed / np.maximum(np.sum(weights, axis=-1), 1e-9)[..., None]
    shape = f"[{ROWS}, {nodes}, {heads}, {group}, {dim}] over {slots}"
    call = functools.partial(attend, flash=True)
    # Weights, values and results are rounded to bfloat16, by 2^-8 of numbers of about 1.
    return Case("attend", shape, "bfloat16", call, (q, k, v, mask, np.int32(slots))), want, 2.0**-7


def _in_4_bits(rows: int, size: int) -> tuple[Case, np.ndarray, float]:
    """A product in 4 bits by groups of a size, as a model takes it here, and numpy's."""
    draw, inputs, outputs = np.random.default_rng(0), 512, 256
    x = np.asarray(jnp.asarray(draw.normal(size=(rows, inputs)), jnp.bfloat16))
    w = Int4(
        values=jnp.asarray(draw.integers(-8, 8, (inputs // size, size, outputs)), jnp.int4),
        scale=jnp.asarray(draw.normal(size=(inputs // size, outputs)), jnp.float16),
        offset=jnp.asarray(draw.normal(size=(inputs // size, outputs)), jnp.float32),
        dtype=jnp.bfloat16,
    )
    want = x.astype(np.float32) @ np.asarray(w.astype(jnp.float32)).T
    call = functools.partial(dense, dtype=jnp.float32)
    # A weight may be rounded to bfloat16, by 2^-8 of it with its scale; of 512 the errors cancel in part.
    return Case("dense", f"[{rows}, {inputs}], groups of {size}", "int4", call, (x, w)), want, 2.0**-8


def _product(case: Case, want: np.ndarray, tolerance: float) -> dict[str, Any]:
    try:
        got, milliseconds = _timed(case.call, case.operands)
    except Exception as error:
        return _row(case, Form("default", {}), status="failed", detail=_line(error), milliseconds=None)
    off = float(np.max(np.abs(got - want)) / np.max(np.abs(want)))
    right = off < tolerance
    return _row(
        case,
        Form("default", {}),
        status="equal" if right else "differs",
        detail=None if right else f"off by {off:.1e} of the largest",
        milliseconds=milliseconds,
    )


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"
