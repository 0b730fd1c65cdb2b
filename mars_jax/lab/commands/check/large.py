"""Timing of an 8B model on this device: decoding steps with one row and with a batch, and the prefill of a prompt.

For comparison, a memory copy and a matrix product are also timed. Weights and caches are random, and acceptance is
simulated at a published tau. No files are read. The times are the same as for a real model, though the generated text
is meaningless. B batch.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from mars_jax import contrib
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.given import begun
from mars_jax.core.rule import Rule, for_rows
from mars_jax.core.types import DecodeState, LanguageModel, Params, Prompts, PyTree, keys_from_seeds
from mars_jax.lab.planning.fit import product_weights, step_bytes
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.lab.planning.pair_programs import draft_of, wide_dtype
from mars_jax.models import shardings, transformer
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.quantize import num_bytes
from mars_jax.utils import activity
from mars_jax.utils.settings import BITS
from mars_jax.utils.types import JsonObject

TARGET = "llama-3.1-8b"
GIB = 2**30
SIZES = {56: ("bfloat16", 32), 24: ("bfloat16", 8), 12: ("int4", 8)}
"""Dtype of the weights and number of rows, keyed by the minimum memory of a device in GiB, in descending order."""
CONTEXT = 4096
STEPS, ROUNDS = 16, 3
PEAK = 8.0
"""Standard deviation of the random head's logits, in nats."""
COPIED, SIDE, REPEATS = GIB, 8192, 16
"""Bytes in the copied array, rows of the square matrices, and number of copies or products per timed call."""


class TimedArm(NamedTuple):
    """A draft shape to measure with an EAGLE-3 head, or decoding without a draft."""

    name: str
    options: dict[str, Any] | None  # options of `draft_of`; None: no draft
    tau: float = 1.0


PLAIN = TimedArm("plain", None)
CHAIN = TimedArm("chain of 5", {"num_draft_tokens": 5}, 3.5)
# 6.61 tokens per step is the published tau of an 8B model with EAGLE-3 and MARS (2601.15498, table 1).
TREE = TimedArm("tree 10-7-60", {}, 6.61)


class Program(NamedTuple):
    """A lowered loop of `STEPS` steps, its arguments, and the minimum work of one step."""

    lowered: jax.stages.Lowered
    params: Params
    start: Callable[[], DecodeState]
    bytes: int  # minimum bytes that one step reads
    flops: int  # floating-point operations in the target's matrix products in one step


class RandomPair(NamedTuple):
    """A target and an EAGLE-3 head of matching size, with random weights on the device."""

    config: ModelConfig
    model: LanguageModel
    plain: Params
    drafted: Params
    context: int

    def steps(self, arm: TimedArm, batch: int) -> Program:
        """Lower the decode loop for `batch` rows of `context` tokens each."""
        params, draft = self.plain, draft_of("none")
        if arm.options is not None:
            params, dtype = self.drafted, self.drafted.draft["unembed"].dtype.name
            draft = draft_of(EagleConfig.outline(self.config), dtype=dtype, **arm.options)
        drafter = draft.make(self.model)
        rule = contrib.simulated(arm.tau)
        decoder = decode.speculative_decoder(self.model, drafter, rule)
        # Allocate room for the warm-up round and the timed rounds.
        row_slots = self.context + (1 + ROUNDS) * STEPS * (1 + drafter.max_depth)
        prompts = _prompts(self.config.vocab_size, rule, batch, self.context, row_slots)
        shapes = decode.shapes(decoder, params, prompts)
        cache_bytes = (_live_bytes(part, self.context) for part in (shapes.cache, shapes.draft))
        return Program(
            lowered=decode.run.lower(decoder, params, shapes, max_steps=jnp.asarray(STEPS, jnp.int32)),
            params=params,
            start=lambda: begun(decoder.checked(prompts), drawn(shapes.cache), drawn(shapes.draft)),
            bytes=step_bytes(self.config, draft, drafter, params, batch, *cache_bytes).total,
            flops=2 * product_weights(self.config) * batch * drafter.num_nodes,
        )

    def prompt(self) -> tuple[jax.stages.Lowered, Prompts]:
        """Lower the prefill of one prompt of `context` tokens, and return it with the prompt."""
        rule = contrib.simulated(PLAIN.tau)
        decoder = decode.speculative_decoder(self.model, draft_of("none").make(self.model), rule)
        prompts = _prompts(self.config.vocab_size, rule, 1, self.context, self.context)
        return jax.jit(decoder.init).lower(self.plain, prompts), prompts


def random_pair(config: ModelConfig, dtype: str, context: int, **options: Any) -> RandomPair:
    """Return a `RandomPair` with weights drawn on the device.

    Args:
      config: config of the target.
      dtype: dtype of the target's weights, one of `settings.DTYPES`. The head is not quantised.
      context: tokens in each row before its first step, and in the prompt.
      options: options of `transformer.language_model`.
    """
    model_dtype = wide_dtype(dtype)
    model = transformer.language_model(config, dtype=model_dtype, **options)
    params = Params(target=drawn(shardings.abstract_params(config, model_dtype, bits=BITS.get(dtype))))
    head_params = drawn(shardings.abstract_params(EagleConfig.outline(config), model_dtype))
    # Scale logits to a standard deviation of `PEAK`, as in a trained head: otherwise trees stay shallow.
    head_params["unembed"] *= PEAK / (0.02 * config.hidden_size**0.5)
    return RandomPair(config, model, params, params._replace(draft=head_params), context)


def check_large() -> JsonObject:
    """Return the report of `measure` for `TARGET` on this device, or the reason why `TARGET` cannot be measured."""
    memory_bytes = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    for least, (dtype, rows) in SIZES.items():
        if memory_bytes >= least * GIB and jax.default_backend() != "cpu":
            return {"target": TARGET} | measure(CONFIGS[TARGET], dtype, rows=rows, context=CONTEXT)
    return {"missing": f"an accelerator with {min(SIZES)} GiB of memory is needed"}


def measure(config: ModelConfig, dtype: str, *, rows: int, context: int) -> JsonObject:
    """Return the times, in milliseconds, of a step with one row, a step with `rows` rows, and the prefill of a prompt.

    Args:
      config: config of the target.
      dtype: dtype of the target's weights, one of `settings.DTYPES`. The EAGLE-3 head of matching size is not
        quantised.
      rows: number of rows in the batch, B.
      context: tokens in each row before its first step, and in the prompt.
    """
    pair = random_pair(config, dtype, context)
    report: JsonObject = {
        "dtype": dtype,
        "context": context,
        "copy_bytes_per_second": copy_rate(COPIED),
        "product_flops": product_rate(SIDE),
    }
    lowered_prefill, prompts = pair.prompt()
    with activity.doing("a prompt"):
        prompt_row = attempt(lambda: prompt_times(lowered_prefill.compile(), pair.plain, prompts))
    report["prompt"] = {"tokens": context, "flops": 2 * product_weights(config) * context} | prompt_row
    report["steps"] = []
    for arm, batch in ((PLAIN, 1), (CHAIN, 1), (TREE, 1), (PLAIN, rows), (TREE, rows)):
        with activity.doing(f"{arm.name}, {batch} rows"):
            program = pair.steps(arm, batch)
            times = attempt(lambda program=program: step_times(program, program.lowered.compile()))
        row = {"arm": arm.name, "rows": batch, "bytes": program.bytes, "flops": program.flops}
        report["steps"].append(row | times)
    return report


def _live_bytes(part: PyTree, context: int) -> int:
    """Return the bytes that `context` tokens occupy in the caches: all arrays with more than `context` slots."""
    caches = [x for x in jax.tree.leaves(part) if x.ndim > 2 and x.shape[1] > context]
    return sum(num_bytes(x) * context // x.shape[1] for x in caches)


def error_summary(error: Exception) -> str:
    """Return the type of an error and the first line of its message."""
    message_lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {message_lines[0][:500]}"


def attempt(measure: Callable[[], JsonObject]) -> JsonObject:
    """Return the result of `measure`, or its error, so that running out of memory does not abort the report."""
    try:
        return measure()
    except Exception as error:  # compilers and drivers raise errors of many types
        return {"failed": error_summary(error)}


def seconds_of(call: Callable[[], PyTree], rounds: int) -> list[float]:
    """Return the time of each of `rounds` calls in seconds, after a warm-up call."""
    seconds = []
    for _ in range(1 + rounds):
        start_time = time.perf_counter()
        jax.block_until_ready(call())
        seconds.append(time.perf_counter() - start_time)
    return seconds[1:]


def looped(call: Callable[..., PyTree], times: int, operands: tuple[PyTree, ...]) -> Callable[[], PyTree]:
    """Return a function that calls `call(*operands)` `times` times in one loop on the device.

    For a short operation, dispatching each call from the host would take longer than the operation itself.

    >>> looped(lambda x: x + 1, 3, (jnp.ones(2),))().tolist()
    [2.0, 2.0]
    """

    @functools.partial(jax.jit, static_argnums=0)
    def run(times: int, operands: tuple[PyTree, ...]) -> PyTree:
        # The carry holds the operands and the result of the preceding call.
        def body(_: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            # Without a barrier, XLA would hoist the call out of the loop.
            operands, _ = lax.optimization_barrier(carry)
            return operands, call(*operands)

        result_shapes = jax.eval_shape(call, *operands)
        zero_result = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), result_shapes)
        return lax.fori_loop(0, times, body, (operands, zero_result))[1]

    return functools.partial(run, times, operands)


def step_times(program: Program, compiled: jax.stages.Compiled) -> JsonObject:
    """Time a step in `ROUNDS` loops of `STEPS` steps, after a warm-up loop."""
    state, max_steps = program.start(), jnp.asarray(STEPS, jnp.int32)
    times, num_tokens = [], 0
    # All loops continue the same rows, so each reads a slightly longer context than the one before.
    for i in range(1 + ROUNDS):
        start_time = time.perf_counter()
        state, stats = jax.block_until_ready(compiled(program.params, state, max_steps=max_steps))
        if i:
            times.append(1e3 * (time.perf_counter() - start_time) / STEPS)
            num_tokens += int(stats.emitted.sum())
    median, batch = statistics.median(times), stats.emitted.shape[0]
    tau = num_tokens / (ROUNDS * STEPS * batch)
    return {"milliseconds": median, "all": times, "tau": tau, "tokens_per_second": 1e3 * tau * batch / median}


def prompt_times(compiled: jax.stages.Compiled, params: Params, prompts: Prompts) -> JsonObject:
    """Time a prefill in `ROUNDS` calls, after a warm-up call."""
    milliseconds = [1e3 * seconds for seconds in seconds_of(lambda: compiled(params, prompts), ROUNDS)]
    return {"milliseconds": statistics.median(milliseconds), "all": milliseconds}


def copy_rate(size: int) -> float:
    """Return the rate of copying an array of `size` bytes, in bytes per second. Reads and writes both count."""
    # Add 1, so that XLA cannot elide the copy. Each number takes 4 bytes.
    repeated_copy = looped(lambda x: (x + 1,), REPEATS, (jnp.zeros(size // 4, jnp.uint32),))
    return 2 * size * REPEATS / min(seconds_of(repeated_copy, ROUNDS))


def product_rate(side: int) -> float:
    """Return the rate of multiplying square bfloat16 matrices, in floating-point operations per second."""
    operands = tuple(jax.random.normal(jax.random.key(i), (side, side), jnp.bfloat16) for i in range(2))
    return 2 * side**3 * REPEATS / min(seconds_of(looped(jnp.matmul, REPEATS, operands), ROUNDS))


def drawn(shapes: PyTree) -> PyTree:
    """Return arrays of these shapes: random floats on the scale of weights, and random bits for 4- and 8-bit integers.

    Float vectors are filled with ones, because they are scales of norms. i32 vectors contain consecutive ids, and other
    i32 arrays contain zeros.
    """
    leaves, tree = jax.tree.flatten(shapes)
    return jax.tree.unflatten(tree, [_drawn(x.shape, jnp.dtype(x.dtype), i) for i, x in enumerate(leaves)])


@functools.partial(jax.jit, static_argnums=(0, 1))
def _drawn(shape: tuple[int, ...], dtype: np.dtype, seed: int) -> Array:
    if jnp.issubdtype(dtype, jnp.floating):
        if len(shape) == 1:
            return jnp.ones(shape, dtype)
        return (0.02 * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)).astype(dtype)
    if dtype == jnp.int32 and len(shape) == 1:
        return jnp.arange(shape[0], dtype=dtype)
    if dtype == jnp.int32:
        return jnp.zeros(shape, dtype)
    # Integers of 4 or 8 bits are quantised weights or caches, for which every bit pattern is valid.
    bits = jax.random.bits(jax.random.key(seed), shape, jnp.uint8)
    return lax.bitcast_convert_type(bits, jnp.int8).astype(dtype)


def _prompts(vocab_size: int, rule: Rule, batch: int, context: int, width: int) -> Prompts:
    return Prompts(
        tokens=jax.random.randint(jax.random.key(0), (batch, width), 0, vocab_size, jnp.int32),
        length=jnp.full((batch,), context, jnp.int32),
        controls=make_controls(batch, limit=width),
        rule=for_rows(rule, batch),
        keys=keys_from_seeds(jnp.arange(batch, dtype=jnp.uint32)),
    )
