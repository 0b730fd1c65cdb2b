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
from mars_jax.core.types import DecodeState, LanguageModel, Params, Prompts, PyTree, keys_from_seeds
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
    """A lowered loop of `STEPS` steps, its arguments, and the least work of one step."""

    lowered: Any
    params: Params
    start: Callable[[], DecodeState]
    bytes: int  # read by one step at least
    flops: int  # of the target's products in one step


class Pair(NamedTuple):
    """A target and an EAGLE-3 head of its size, with random weights on the device."""

    config: ModelConfig
    model: LanguageModel
    plain: Params
    drafted: Params
    context: int

    def steps(self, arm: Arm, batch: int) -> Program:
        """Lower the decode loop of `batch` rows, each with `context` tokens."""
        head, dtype = EagleConfig.outline(self.config), self.drafted.draft["unembed"].dtype.name
        draft = draft_of("none") if arm.options is None else draft_of(head, dtype=dtype, **arm.options)
        params = self.plain if arm.options is None else self.drafted
        drafter = draft.make(self.model)
        rule = contrib.simulated(arm.tau)
        decoder = decode.speculative_decoder(self.model, drafter, rule)
        # The buffer has room for the warm-up round and the timed ones.
        width = self.context + (1 + ROUNDS) * STEPS * (1 + drafter.max_depth)
        prompts = _prompts(self.config.vocab_size, rule, batch, self.context, width)
        shapes = decode.shapes(decoder, params, prompts)
        cache, draft_cache = (_live_bytes(part, self.context) for part in (shapes.cache, shapes.draft))
        return Program(
            lowered=decode.run.lower(decoder, params, shapes, max_steps=jnp.asarray(STEPS, jnp.int32)),
            params=params,
            start=lambda: begun(decoder.checked(prompts), drawn(shapes.cache), drawn(shapes.draft)),
            bytes=step_bytes(
                self.config, draft, drafter, params, batch=batch, cache=cache, drafted=draft_cache
            ),
            flops=2 * self.num_weights * batch * drafter.num_nodes,
        )

    def prompt(self) -> tuple[Any, Prompts]:
        """Lower the prefill of one prompt of `context` tokens; return it with the prompt."""
        rule = contrib.simulated(PLAIN.tau)
        decoder = decode.speculative_decoder(self.model, draft_of("none").make(self.model), rule)
        prompts = _prompts(self.config.vocab_size, rule, 1, self.context, self.context)
        return jax.jit(decoder.init).lower(self.plain, prompts), prompts

    @property
    def num_weights(self) -> int:
        """Weights that take part in a product."""
        rows = leaves(self.config)
        return sum(
            math.prod(row.shape) for row in rows if row.path != ("embed",) or self.config.tie_embeddings
        )


def random_pair(config: ModelConfig, dtype: str, context: int, **options: Any) -> Pair:
    """Return a `Pair` with weights drawn on the device.

    Args:
      config: of the target.
      dtype: of the target's weights, one of `specs.DTYPES`; the head's stay wide.
      context: tokens in each row before its first step, and of the prompt.
      options: of `transformer.language_model`.
    """
    wide = "bfloat16" if dtype in BITS else dtype
    model = transformer.language_model(config, dtype=wide, **options)
    plain = Params(target=drawn(shardings.abstract_params(config, wide, bits=BITS.get(dtype))))
    head = drawn(shardings.abstract_params(EagleConfig.outline(config), wide))
    # Scale logits to a standard deviation of `PEAK`, as in a trained head: otherwise trees stay shallow.
    head["unembed"] *= PEAK / (0.02 * config.hidden_size**0.5)
    return Pair(config, model, plain, plain._replace(draft=head), context)


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
    pair = random_pair(config, dtype, context)
    tick("a copy and a product")
    report: dict[str, Any] = {
        "dtype": dtype,
        "context": context,
        "copy_bytes_per_second": copy_rate(COPIED),
        "product_flops": product_rate(SIDE),
    }
    # Compile in parallel, except on a GPU, where XLA times kernels while it compiles. Measure when all are compiled.
    with ThreadPoolExecutor(1 if jax.default_backend() == "gpu" else os.cpu_count()) as pool:
        tick("compiling")
        began = time.perf_counter()
        lowered, prompts = pair.prompt()
        prefill = pool.submit(lowered.compile)
        programs = []
        for arm, batch in ((PLAIN, 1), (CHAIN, 1), (TREE, 1), (PLAIN, rows), (TREE, rows)):
            program = pair.steps(arm, batch)
            programs.append((arm, batch, program, pool.submit(program.lowered.compile)))
    report["compile_seconds"] = round(time.perf_counter() - began, 1)
    tick("a prompt")
    report["prompt"] = {"tokens": context, "flops": 2 * pair.num_weights * context} | attempt(
        lambda: prompt_times(prefill.result(), pair.plain, prompts)
    )
    report["steps"] = []
    for arm, batch, program, compiled in programs:
        tick(f"{arm.name}, {batch} rows")
        row = {"arm": arm.name, "rows": batch, "bytes": program.bytes, "flops": program.flops}
        report["steps"].append(row | attempt(functools.partial(_timed, program, compiled)))
    return report


def _timed(program: Program, compiled: Future[Any]) -> dict[str, Any]:
    return step_times(program, compiled.result())


def _live_bytes(part: PyTree, context: int) -> int:
    """Bytes of a context in caches of a slot for each token and more."""
    caches = [x for x in jax.tree.leaves(part) if x.ndim > 2 and x.shape[1] > context]
    return sum(num_bytes(x) * context // x.shape[1] for x in caches)


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the figures of `measure`, or why it failed, so that one program without memory does not end the report."""
    try:
        return measure()
    except Exception as error:  # whatever a compiler or a driver raises belongs in the report
        return {"failed": f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:300]}"}


def step_times(program: Program, compiled: Any) -> dict[str, Any]:
    """Time a step in `ROUNDS` loops of `STEPS` steps, after one loop that is not counted."""
    state, most = program.start(), jnp.asarray(STEPS, jnp.int32)
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


def prompt_times(compiled: Any, params: Params, prompts: Prompts) -> dict[str, Any]:
    """Time a prefill in `ROUNDS` calls, after one that is not counted."""
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
