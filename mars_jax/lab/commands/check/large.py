"""Times of a model of 8 billion weights on this device: steps, a prompt and a batch, beside a copy and a product.

Weights and caches are drawn at random, and how much of a draft is accepted by chance, with a tau that was published.
So nothing is read from disk, the times are those of a real model, and the text means nothing. B batch.
"""

from __future__ import annotations

import functools
import math
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mars_jax import contrib
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.given import begun
from mars_jax.core.rule import Rule, for_rows
from mars_jax.core.types import DecodeState, Params, Prompts, PyTree, keys_from_seeds
from mars_jax.lab.commands.check.timing import looped, taken
from mars_jax.lab.planning.fit import draft_of, step_bytes
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.models import transformer
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.quantize import num_bytes
from mars_jax.models.weights import leaves
from mars_jax.placement import shardings
from mars_jax.specs import BITS

TARGET = "llama-3.1-8b"
GIB = 2**30
KEPT = ((24 * GIB, "bfloat16"), (12 * GIB, "int4"))
"""From how much memory of a device on weights are kept so."""
ROWS = ((56 * GIB, 32), (12 * GIB, 8))
"""The same for the rows of a batch."""
CONTEXT = 4096
STEPS, ROUNDS = 16, 3
PEAK = 8.0
"""Nats."""
COPIED, SIDE = GIB, 8192
"""Bytes that are copied, and the side of the matrices that are multiplied."""


class Arm(NamedTuple):
    """Draft of an EAGLE-3 head."""

    name: str
    options: dict[str, Any] | None  # of `draft_of`; None drafts nothing
    tau: float = 1.0


PLAIN = Arm("plain", None)
CHAIN = Arm("chain of 5", {"num_draft_tokens": 5}, 3.5)
# Tokens a step of an 8B with EAGLE-3 and MARS: 2601.15498, table 1.
TREE = Arm("tree 10-7-60", {}, 6.61)


class Program(NamedTuple):
    """A loop of steps that is being compiled, and what it runs on."""

    compiled: Future[Any]
    params: Params
    start: Callable[[], DecodeState]
    bytes: int  # that a step reads at least
    flops: int  # of the target's products


def check_large(tick: Callable[[str], None] = lambda what: None) -> dict[str, Any]:
    """Times of `TARGET` on the device that is there, as `measured` gives them, or why there are none."""
    memory = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    dtype = next((dtype for least, dtype in KEPT if memory >= least), None)
    if jax.default_backend() == "cpu" or dtype is None:
        return {"missing": f"an accelerator with {KEPT[-1][0] // GIB} GiB of memory is needed"}
    many = next(rows for least, rows in ROWS if memory >= least)
    return {"target": TARGET} | measured(CONFIGS[TARGET], dtype, rows=many, context=CONTEXT, tick=tick)


def measured(
    config: ModelConfig,
    dtype: str,
    *,
    rows: int,
    context: int,
    tick: Callable[[str], None] = lambda what: None,
) -> dict[str, Any]:
    """Milliseconds of steps, of one row and of many, and of a prompt.

    Args:
      config: of the target.
      dtype: of its weights, as `specs.DTYPES` has them; the EAGLE-3 head of its size is not kept in fewer bits.
      rows: B of the batch.
      context: tokens of each text before its first step, and of the prompt.
      tick: told what is being done.
    """
    tick("weights")
    wide = "bfloat16" if dtype in BITS else dtype
    model, head = transformer.language_model(config, dtype=wide), EagleConfig.outline(config)
    alone = Params(target=drawn(shardings.abstract_params(config, wide, bits=BITS.get(dtype))))
    weights = sum(
        math.prod(row.shape) for row in leaves(config) if row.path != ("embed",) or config.tie_embeddings
    )
    drafted = alone._replace(draft=drawn(shardings.abstract_params(head, wide)))
    # Logits of a standard deviation of `PEAK`, as sure of a token as a head that was trained: its trees are deep.
    drafted.draft["unembed"] *= PEAK / (0.02 * config.hidden_size**0.5)
    tick("a copy and a product")
    found: dict[str, Any] = {
        "dtype": dtype,
        "context": context,
        "copy_bytes_per_second": copy_rate(COPIED),
        "product_flops": product_rate(SIDE),
    }

    def program(arm: Arm, batch: int) -> Program:
        draft = draft_of("none") if arm.options is None else draft_of(head, dtype=wide, **arm.options)
        params = alone if arm.options is None else drafted
        drafter = draft.make(model)
        rule = contrib.simulated(arm.tau)
        decoder = decode.speculative_decoder(model, drafter, rule)
        # The first round is not counted; each may add so much.
        width = context + (1 + ROUNDS) * STEPS * (1 + drafter.max_depth)
        prompts = _prompts(config.vocab_size, rule, batch, context, width)
        shapes = decode.shapes(decoder, params, prompts)
        cache, own = (_live_bytes(part, context) for part in (shapes.cache, shapes.draft))
        lowered = decode.run.lower(decoder, params, shapes, max_steps=jnp.asarray(STEPS, jnp.int32))
        return Program(
            compiled=pool.submit(lowered.compile),
            params=params,
            start=lambda: begun(decoder.checked(prompts), drawn(shapes.cache), drawn(shapes.draft)),
            bytes=step_bytes(config, draft, drafter, params, batch=batch, cache=cache, drafted=own),
            flops=2 * weights * batch * drafter.num_nodes,
        )

    # Compilers run beside one another, but where they time kernels on the device. Measuring begins when all are done.
    with ThreadPoolExecutor(1 if jax.default_backend() == "gpu" else os.cpu_count()) as pool:
        tick("compiling")
        began = time.perf_counter()
        rule = contrib.simulated(PLAIN.tau)
        decoder = decode.speculative_decoder(model, draft_of("none").make(model), rule)
        prompt = _prompts(config.vocab_size, rule, 1, context, context)
        reading = pool.submit(jax.jit(decoder.init).lower(alone, prompt).compile)
        programs = [
            (arm, batch, program(arm, batch))
            for arm, batch in ((PLAIN, 1), (CHAIN, 1), (TREE, 1), (PLAIN, rows), (TREE, rows))
        ]
    found["compile_seconds"] = round(time.perf_counter() - began, 1)
    tick("a prompt")
    found["prompt"] = {"tokens": context, "flops": 2 * weights * context} | _tried(
        lambda: _prompt_times(reading.result(), alone, prompt)
    )
    found["steps"] = []
    for arm, batch, made in programs:
        tick(f"{arm.name}, {batch} rows")
        row = {"arm": arm.name, "rows": batch, "bytes": made.bytes, "flops": made.flops}
        found["steps"].append(row | _tried(lambda made=made: _step_times(made)))
    return found


def _live_bytes(part: PyTree, context: int) -> int:
    """Bytes of a context in caches of a slot for each token and more."""
    caches = [x for x in jax.tree.leaves(part) if x.ndim > 2 and x.shape[1] > context]
    return sum(num_bytes(x) * context // x.shape[1] for x in caches)


def _tried(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Figures, or why there are none: a batch that does not fit leaves the rest."""
    try:
        return measure()
    except Exception as error:  # whatever a compiler or a driver raises is what the report is about
        return {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"}


def _step_times(program: Program) -> dict[str, Any]:
    compiled, state = program.compiled.result(), program.start()
    most = jnp.asarray(STEPS, jnp.int32)
    times, tokens = [], 0
    for i in range(1 + ROUNDS):
        began = time.perf_counter()
        state, stats = jax.block_until_ready(compiled(program.params, state, max_steps=most))
        if i:
            times.append(1e3 * (time.perf_counter() - began) / STEPS)
            tokens += int(stats.emitted.sum())
    step, rows = statistics.median(times), stats.emitted.shape[0]
    tau = tokens / (ROUNDS * STEPS * rows)
    return {"milliseconds": step, "all": times, "tau": tau, "tokens_per_second": 1e3 * tau * rows / step}


def _prompt_times(compiled: Any, params: Params, prompts: Prompts) -> dict[str, Any]:
    times = [1e3 * seconds for seconds in taken(lambda: compiled(params, prompts), ROUNDS)]
    return {"milliseconds": statistics.median(times), "all": times}


def copy_rate(size: int, times: int = 16) -> float:
    """Bytes a second that an array of so many bytes is read and written with."""
    call = looped(lambda x: (x + 1,), times, (jnp.zeros(size // 4, jnp.uint32),))
    return 2 * size * times / min(taken(call, ROUNDS))


def product_rate(side: int, times: int = 8) -> float:
    """Floating-point operations a second of a product of bfloat16 matrices of so many rows and columns."""
    operands = tuple(jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    return 2 * side**3 * times / min(taken(looped(jnp.matmul, times, operands), ROUNDS))


def drawn(shapes: PyTree) -> PyTree:
    """Arrays of these shapes: numbers about 0 of a size that weights have, ones for what is a scale of a norm, whole
    numbers of all their bits, and ids in order."""
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [_drawn(x.shape, jnp.dtype(x.dtype), i) for i, x in enumerate(leaves)])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _drawn(shape: tuple[int, ...], dtype: Any, seed: int) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.floating):
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return (0.02 * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)).astype(dtype)
    if dtype == jnp.int32:
        return jnp.arange(shape[0], dtype=dtype) if len(shape) == 1 else jnp.zeros(shape, dtype)
    bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint8)
    return jax.lax.bitcast_convert_type(bits, jnp.int8).astype(dtype)


def _prompts(vocab_size: int, rule: Rule, batch: int, context: int, width: int) -> Prompts:
    tokens = jax.random.randint(jax.random.key(0), (batch, width), 0, vocab_size, jnp.int32)
    lengths, keys = (
        jnp.full((batch,), context, jnp.int32),
        keys_from_seeds(jnp.arange(batch, dtype=jnp.uint32)),
    )
    return Prompts(tokens, lengths, make_controls(batch, limit=width), for_rows(rule, batch), keys)
