"""Decode speed, step overhead and memory on this machine, beside named alternatives timed in the same run.

    python scripts/bench_decode.py --output scripts/results/bench_decode.json

Everything that is compared is timed in turn (A B A B ...), after a warm-up of each, on the same weights with the
same number of threads; the figures are medians, and every single time is in the JSON. Weights are random: speed
does not depend on them, except for the acceptance of a draft, which is reported beside its figure. The draft of
the chain comparison is the target's own first layers with its embeddings, so that random weights agree at all.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console
from rich.table import Table
from torch_side import Transformers

import mars_jax as mj
from mars_jax import drafters, hub, verify
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, Prompts, Visible
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import init_params, language_model

SHAPES = {
    "12M": ModelConfig(
        vocab_size=4096, hidden_size=384, intermediate_size=1024, num_layers=6, num_heads=6, num_kv_heads=2,
        head_dim=64, max_positions=2048, tie_embeddings=True,
    ),
    "25M": ModelConfig(
        vocab_size=4096, hidden_size=512, intermediate_size=1408, num_layers=8, num_heads=8, num_kv_heads=4,
        head_dim=64, max_positions=2048, tie_embeddings=True,
    ),
    "100M": ModelConfig(
        vocab_size=32000, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12, num_kv_heads=4,
        head_dim=64, max_positions=2048, tie_embeddings=True,
    ),
}  # fmt: skip
PROMPT, NEW = 64, 128
KEYS = functools.partial(mj.keys_from_seeds, jnp.zeros((1,), jnp.uint32))


def in_turns(runs: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, as the JSON has them."""
    return {name: seconds.tolist() for name, seconds in common.in_turns(runs, repeats).items()}


def temp_bytes(lowered) -> int:
    """Temporary memory of a compiled program, by the compiler's own account."""
    return lowered.compile().memory_analysis().temp_size_in_bytes


def compiled() -> int:
    """Programs that the two jitted entry points hold."""
    return sum(jitted._cache_size() for jitted in (decode.run, decode._start))  # type: ignore[attr-defined]


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    """Median over the pairs of slow / fast."""
    return statistics.median(s / f for s, f in zip(seconds[slow], seconds[fast], strict=True))


def random_model(name: str):
    config = SHAPES[name]
    return config, language_model(config), init_params(config, jax.random.key(0))


def prompt(config: ModelConfig) -> np.ndarray:
    return np.random.default_rng(0).integers(3, config.vocab_size, (1, PROMPT)).astype(np.int32)


def decoding(decoder, params, config) -> Callable[[], tuple]:
    """Prefill and decode NEW tokens greedily after the prompt."""
    tokens = jnp.zeros((1, PROMPT + NEW), jnp.int32).at[:, :PROMPT].set(prompt(config))
    length, made, keys = jnp.array([PROMPT], jnp.int32), make_controls(1, limit=PROMPT + NEW), KEYS()

    def run():
        state = decode.start(decoder, params, Prompts(tokens, length, made, verify.exact(), keys))
        return jax.block_until_ready(decode.run(decoder, params, state))

    return run


def in_torch(config: ModelConfig, params, directory: Path) -> Transformers:
    """The same weights in PyTorch, by way of a saved checkpoint."""
    hub.save(directory, config, params)
    return Transformers(directory)


def torch_decoding(model: Transformers, config: ModelConfig, **how: Any) -> Callable[[], list[int]]:
    """Continue the prompt greedily by NEW tokens."""
    given = prompt(config).tolist()
    return lambda: model.generate(given, NEW, **how)[0]


def against_transformers(repeats: int, size: str) -> dict:
    config, model, params = random_model(size)
    decoder = decode.speculative_decoder(model, drafters.none(), verify.exact())
    ours = decoding(decoder, Params(params), config)
    with tempfile.TemporaryDirectory() as scratch:
        theirs = torch_decoding(in_torch(config, params, Path(scratch) / "m"), config)
        same = ours()[0].tokens[0, PROMPT:].tolist() == theirs()
        seconds = in_turns({"transformers generate": theirs, "mars-jax": ours}, repeats)
    return {
        "case": f"autoregression {size}", "bar": ">= 2", "figure": ratio(seconds, "transformers generate", "mars-jax"),
        "unit": "x tokens/s of transformers generate", "same_tokens": same, "new_tokens": NEW, "seconds": seconds,
    }  # fmt: skip


def chain_against_assisted(repeats: int, size: str, draft_layers: int, draft_tokens: int = 5) -> dict:
    config, model, params = random_model(size)
    small = ModelConfig(
        **{**vars(config), "num_layers": draft_layers, "windows": config.windows[:draft_layers]}
    )
    small_params = {**params, "layers": params["layers"][:draft_layers]}
    drafter = drafters.language_model(language_model(small), draft_tokens)
    decoder = decode.speculative_decoder(model, drafter, verify.exact())
    ours = decoding(decoder, Params(params, small_params), config)
    with tempfile.TemporaryDirectory() as scratch:
        assistant = in_torch(small, small_params, Path(scratch) / "d").assisting(draft_tokens)
        target = in_torch(config, params, Path(scratch) / "m")
        theirs = torch_decoding(target, config, assistant_model=assistant)
        same = ours()[0].tokens[0, PROMPT:].tolist() == theirs()
        seconds = in_turns({"transformers assisted": theirs, "mars-jax": ours}, repeats)
    return {
        "case": f"greedy chain of {draft_tokens}, {size} drafted by its first {draft_layers} layers", "bar": ">= 3",
        "figure": ratio(seconds, "transformers assisted", "mars-jax"),
        "unit": "x tokens/s of transformers assisted generation", "same_tokens": same,
        "tau": mj.summarize(ours()[1]).tau, "new_tokens": NEW, "seconds": seconds,
    }  # fmt: skip


def looped_forward(model, params, nodes: int, slots: int, past: int, times: int) -> Callable[[], Any]:
    """`times` forwards of `nodes` tokens with unembedding, in one device loop with the cache in place."""

    @functools.partial(jax.jit, donate_argnums=1)
    def loop(params, cache):
        visible = Visible.causal(jnp.array([past], jnp.int32), nodes)

        def body(_, carry):
            tokens, cache = carry
            output = model.forward(params, tokens, visible, cache)
            logits = model.unembed(params, output.hidden)
            return jnp.argmax(logits, axis=-1).astype(jnp.int32), output.cache

        return lax.fori_loop(0, times, body, (jnp.zeros((1, nodes), jnp.int32), cache))

    held = [model.init_cache(1, slots)]

    def run():
        tokens, held[0] = jax.block_until_ready(loop(params, held[0]))
        return tokens

    return run


def nodes_cost(repeats: int, size: str, times: int = 20) -> dict:
    _, model, params = random_model(size)
    runs = {str(n): looped_forward(model, params, n, 256, PROMPT + NEW // 2, times) for n in (1, 8)}
    seconds = in_turns(runs, repeats)
    return {
        "case": f"forward of 8 nodes, {size}", "bar": "<= 1.5", "figure": ratio(seconds, "8", "1"),
        "unit": "x a forward of 1", "forwards": times, "seconds": seconds,
    }  # fmt: skip


def step_overhead(repeats: int, size: str, draft: str, draft_tokens: int = 5, times: int = 20) -> dict:
    """One step against its forwards timed apart: N nodes of the target, 2 and then 1 at a time of the draft."""
    config, model, params = random_model(size)
    small_config, small, small_params = random_model(draft)
    slots, past = 256, PROMPT + NEW // 2
    drafter = drafters.language_model(small, draft_tokens, vocab_size=config.vocab_size)
    decoder = decode.speculative_decoder(model, drafter, verify.exact())
    weights = Params(params, small_params)

    @functools.partial(jax.jit, donate_argnums=1)
    def steps(params, state):
        return lax.fori_loop(0, times, lambda _, s: decoder.step(params, s)[0], state)

    width = slots - drafter.num_nodes
    tokens = jnp.zeros((1, width), jnp.int32).at[:, :PROMPT].set(prompt(config) % small_config.vocab_size)
    first = decode.start(
        decoder,
        weights,
        Prompts(tokens, jnp.array([past], jnp.int32), make_controls(1, limit=width), verify.exact(), KEYS()),
    )
    held = [first]

    def whole():
        # Back to the same length, so that every run decodes the same stretch.
        held[0] = dataclasses.replace(
            held[0], length=jnp.array([past], jnp.int32), done=jnp.zeros((1,), bool)
        )
        held[0] = jax.block_until_ready(steps(weights, held[0]))

    runs = {
        "step": whole,
        "target forward": looped_forward(model, params, drafter.num_nodes, slots, past, times),
        "draft forward of 2": looped_forward(small, small_params, 2, slots, past, times),
        "draft forwards of 1": looped_forward(
            small, small_params, 1, slots, past, times * (draft_tokens - 1)
        ),
    }
    seconds = in_turns(runs, repeats)
    sums = [sum(seconds[name][i] for name in runs if name != "step") for i in range(repeats)]
    temporary = temp_bytes(steps.lower(weights, held[0]))
    cache = sum(x.nbytes for x in jax.tree.leaves(held[0].cache))
    return {
        "case": f"step of a chain of {draft_tokens}, {size} drafted by {draft}", "bar": "<= 1.08",
        "figure": statistics.median(s / t for s, t in zip(seconds["step"], sums, strict=True)),
        "unit": "x the sum of its forwards", "steps": times, "seconds": seconds,
        "temp_over_cache": temporary / cache, "cache_bytes": cache, "temp_bytes": temporary,
    }  # fmt: skip


def step_memory(size: str, batch: int, slots: int) -> dict:
    """Temporary memory of the compiled step beside its cache, by the compiler's own account."""
    _, model, params = random_model(size)
    decoder = decode.speculative_decoder(model, drafters.ngram(7), verify.mars())
    shape = functools.partial(jax.ShapeDtypeStruct)
    state = jax.eval_shape(
        decoder.init, Params(params), shape((batch, slots - 8), jnp.int32), shape((batch,), jnp.int32),
        jax.eval_shape(lambda: make_controls(batch, limit=slots - 8)),
        jax.eval_shape(lambda: verify.for_rows(verify.mars(), batch)),
        jax.eval_shape(lambda: mj.keys_from_seeds(jnp.zeros((batch,), jnp.uint32))),
    )  # fmt: skip
    temporary = temp_bytes(decode.jitted_step.lower(decoder, Params(params), state))
    cache = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state.cache))
    return {
        "case": f"temporary memory of a step, {size}, batch {batch}, {slots} slots", "bar": "<= 0.2",
        "figure": temporary / cache, "unit": "x the cache", "temp_bytes": temporary, "cache_bytes": cache,
    }  # fmt: skip


def compiles(size: str) -> dict:
    """Compilations caused by values that change: prompt, its length in the bucket, controls, limit, seed."""
    config, model, params = random_model(size)
    decoder = decode.speculative_decoder(model, drafters.ngram(7), verify.mars())
    rng = np.random.default_rng(1)

    def once(length, seed, rule=verify.mars(), **chosen):  # noqa: B008
        tokens = jnp.asarray(rng.integers(3, config.vocab_size, (1, 128)), jnp.int32)
        state = decode.start(
            decoder, Params(params), Prompts(tokens, jnp.array([length], jnp.int32), make_controls(1, **chosen),
            rule, mj.keys_from_seeds(jnp.array([seed], jnp.uint32))),
        )  # fmt: skip
        decode.run(decoder, Params(params), state)

    once(10, 0, limit=40)
    before = compiled()
    once(30, 1, limit=60)
    once(9, 2, verify.mars(theta=0.5), limit=128, temperature=1.0, top_p=0.8)
    once(60, 3, verify.mars(max_relaxed_run=1), limit=100, temperature=0.5, top_k=7, min_p=0.1, strict=True)
    count = compiled() - before
    return {
        "case": "compilations after values change",
        "bar": "== 0",
        "figure": count,
        "unit": "compilations",
    }


def main() -> int:
    parser = common.parser(__doc__)
    parser.add_argument("--output", type=Path, help="write the raw JSON here")
    parser.add_argument("--repeats", type=int, default=7, help="timed runs of each (default 7)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    arguments = parser.parse_args()
    n = arguments.repeats
    cases = {
        "autoregression 12M": lambda: against_transformers(n, "12M"),
        "autoregression 100M": lambda: against_transformers(n, "100M"),
        "chain 12M": lambda: chain_against_assisted(n, "12M", draft_layers=1),
        "chain 100M": lambda: chain_against_assisted(n, "100M", draft_layers=2),
        "nodes 25M": lambda: nodes_cost(n, "25M"),
        "nodes 100M": lambda: nodes_cost(n, "100M"),
        "step 25M": lambda: step_overhead(n, "25M", "12M"),
        "step 100M": lambda: step_overhead(n, "100M", "12M"),
        "memory": lambda: step_memory("25M", 1, 512),
        "memory batch": lambda: step_memory("25M", 8, 1024),
        "compiles": lambda: compiles("12M"),
    }
    console, table = Console(stderr=True), Table("case", "figure", "unit", "bar")
    results = []
    for name, case in cases.items():
        if arguments.only not in name:
            continue
        results.append(case())
        row = results[-1]
        console.print(f"{row['case']}: {row['figure']:.3f} {row['unit']} (bar {row['bar']})")
        table.add_row(row["case"], f"{row['figure']:.2f}", row["unit"], row["bar"])
    made = common.provenance("torch", "transformers")
    machine = made | {"torch_threads": made["cores"], "backend": jax.default_backend()}
    common.write(arguments.output, {"command": made["command"], "machine": machine, "results": results})
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
