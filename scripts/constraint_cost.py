"""Compare a decode step with a constraint and the same step without one, with a vocabulary of 131,072 tokens.

    python scripts/constraint_cost.py --output scripts/results/constraint_cost.json
    python scripts/constraint_cost.py --tekken mistral_common/data/tekken_240911.json  # a real one, of mistral-common

The model is the 100M benchmark model with that vocabulary, on random weights; the draft is an n-gram's, of 4 tokens,
batch 1 and 8. One process compiles the programs and runs steps in turns (A B, B A, ...): autoregression of a text that
the constraint lets go on for ever. What is compared is the time of one step of 5 nodes, with every token masked, since
a draft that a constraint changes would change the number of steps. Pin it to a core where the machine is shared, as
with `taskset -c 0`; then the time of the processor is that of the step, whoever else uses the core.

The bound is the upper 95% one of a bootstrap of the median over pairs, of processor time, with wall time beside it.
And how long it takes to build the tables of some constraints, and their sizes; docs/constraints.md quotes them. The
file of a vocabulary is among the data of the package mistral-common.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("MARS_JAX_CONSTRAINTS", "")  # nothing is read from disk

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import constraints, drafters, verify
from mars_jax.constraints.compiled import compiled
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.guide import Guides
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.models import ModelConfig, init_params, language_model

VOCAB = 131_072
CONFIG = ModelConfig(
    vocab_size=VOCAB, hidden_size=768, intermediate_size=2048, num_layers=12, num_heads=12, num_kv_heads=4,
    head_dim=64, max_positions=2048, tie_embeddings=True,
)  # fmt: skip
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer"},
        "city": {"type": "string", "maxLength": 20},
    },
    "required": ["name", "age", "city"],
}
FREE = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"type": "string"}}},
    "required": ["name", "tags"],
}
TABLES = {
    "date": constraints.regex(r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"),
    "integer": constraints.regex(r"-?(0|[1-9][0-9]*)"),
    "JSON, 3 fields, strings up to 20": constraints.json_schema(PERSON),
    "JSON, free strings and an array": constraints.json_schema(FREE),
    r"(.|\n){0,40}#### -?[0-9]{1,6}": constraints.regex(r"(.|\n){0,40}#### -?[0-9]{1,6}"),
}
MEASURED = constraints.regex(r'[^"\\\x00-\x1f]+')


def words(path: Path | None) -> constraints.Vocabulary:
    """The tokens of a tekken file, or made ones: all bytes, and pieces of English and of code, as they come."""
    if path is not None:
        rows = json.loads(path.read_text())["vocab"]
        tokens = [None] * 1000 + [base64.b64decode(row["token_bytes"]) for row in rows]
        return constraints.Vocabulary(tokens=tuple((tokens + [None] * VOCAB)[:VOCAB]))
    rng = np.random.default_rng(0)
    found = [bytes([i]) for i in range(256)]
    letters = np.frombuffer(b"etaoinshrdlucmfwypvbgkjqxz    ETA01279.,-_(){}=\"'\n", np.uint8)
    seen = set(found)
    while len(found) < VOCAB:
        token = rng.choice(letters, int(rng.integers(2, 10))).tobytes()
        if token not in seen:
            seen.add(token)
            found.append(token)
    return constraints.Vocabulary(tokens=tuple(found))


def tables(vocabulary: constraints.Vocabulary) -> list[dict[str, Any]]:
    """How long each takes to build, and how large it is."""
    rows = []
    for name, one in TABLES.items():
        began = time.perf_counter()
        table = one.table(vocabulary)
        seconds = time.perf_counter() - began
        found = compiled([one], vocabulary).tables
        states, classes = table.next.shape
        row = {"constraint": name, "states": states, "token_classes": classes, "seconds": round(seconds, 2)}
        row["forced_states"] = int((table.forced >= 0).sum())
        row["device_mib"] = round(sum(x.nbytes for x in jax.tree.leaves(found)) / 2**20, 2)
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def steps(batch: int, vocabulary: constraints.Vocabulary, pairs: int, count: int) -> dict[str, Any]:
    """Seconds of `count` steps without and with the constraint, in turns."""
    model = language_model(CONFIG)
    weights = init_params(CONFIG, jax.random.key(0))
    decoder = decode.speculative_decoder(model, drafters.ngram(4), verify.mars())
    found = compiled([MEASURED], vocabulary)
    step = jax.jit(lambda params, state: decoder.step(params, state))
    # Every prompt repeats itself, so that the n-gram draft has something to propose; and may, constrained or not.
    plain = [i for i, t in enumerate(vocabulary.tokens) if t and t.isalpha()]
    prompts = jnp.asarray(np.random.default_rng(0).choice(plain, (batch, 256)), jnp.int32)
    prompts = prompts.at[:, 32:64].set(prompts[:, :32])
    lengths = jnp.full((batch,), 64, jnp.int32)
    keys = keys_from_seeds(jnp.arange(batch))

    def made(constrained: bool) -> Any:
        controls, params = make_controls(batch, limit=250), Params(target=weights)
        if constrained:
            controls = dataclasses.replace(controls, guides=Guides(constraint=found.rows([MEASURED] * batch)))
            params = params._replace(guides=Guides(constraint=found.tables))
        state = decode.start(decoder, params, Prompts(prompts, lengths, controls, verify.mars(), keys))
        return params, jax.block_until_ready(state)

    arms = {"without": made(False), "with": made(True)}

    def run(name: str) -> tuple[float, float]:
        """Seconds of the processor and of the clock, of a step."""
        params, state = arms[name]
        began = time.process_time(), time.perf_counter()
        for _ in range(count):
            _, info = step(params, state)  # from the same state, so that both do the same
            jax.block_until_ready(info)
        return (time.process_time() - began[0]) / count, (time.perf_counter() - began[1]) / count

    for name in [*arms] * 3:
        run(name)
        if int(step(*arms[name])[1].num_proposed.min()) < 4:
            raise SystemExit("a row has no draft of 4 tokens: the steps would not be alike")
    taken = np.empty((pairs, 2, 2))  # pair, arm, kind of time
    for turn in range(pairs):
        for k in (0, 1) if turn % 2 else (1, 0):
            taken[turn, k] = run(("without", "with")[k])
    ratios = taken[:, 1] / taken[:, 0]
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, pairs, (2000, pairs))
    medians = np.median(ratios[drawn], axis=1)
    upper = np.quantile(medians, 0.95, axis=0)
    return {
        "batch": batch,
        "ms_without": float(1e3 * np.median(taken[:, 0, 0])),
        "ms_with": float(1e3 * np.median(taken[:, 1, 0])),
        "ratio": float(np.median(ratios[:, 0])),
        "upper_95": float(upper[0]),
        "wall": {"ratio": float(np.median(ratios[:, 1])), "upper_95": float(upper[1])},
        "pairs": pairs,
        "steps_of_a_turn": count,
        "bar": 1.03,
        "met": bool(upper[0] <= 1.03),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tekken", type=Path, help="a tekken.json of 131,072 tokens")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=1, help="of each turn")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    vocabulary = words(asked.tekken)
    report: dict[str, Any] = {
        "vocabulary": asked.tekken.name if asked.tekken else "made up",
        "cores": len(os.sched_getaffinity(0)),
        "tables": tables(vocabulary),
        "steps": [],
    }
    for batch in asked.batches:
        report["steps"].append(steps(batch, vocabulary, asked.pairs, asked.steps))
        print(json.dumps(report["steps"][-1]), flush=True)
        if asked.output is not None:
            asked.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
