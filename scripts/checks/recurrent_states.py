"""Compare two ways to undo rejected tokens in recurrent layers: store a draft's inputs, or the state after each node.

    python -m scripts.checks.recurrent_states --output scripts/results/recurrent_states.json

`models.delta` stores the inputs. Sizes are in bytes, for one row's cache without keys and values, with float32 states
and bfloat16 inputs. Times are for the recurrence of one layer without its projections, at the published sizes and batch
1. Half of the previous draft is assumed to have been accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mars_jax.models import ModelConfig, language_model
from mars_jax.models.config import Delta
from mars_jax.models.delta import delta_rule
from scripts import common

HEADS = {"key_heads": 16, "value_heads": 32, "key_dim": 128, "value_dim": 128}
PUBLISHED = {"Qwen3.5-9B": 32, "Qwen3-Next-80B-A3B": 48}
"""Number of layers of published models. Every fourth is an attention layer; the others are recurrent, with `HEADS`."""
NODES, TURNS = (1, 4, 8, 16), 21


def bytes_per_row(layers: int, nodes: int) -> dict[str, int]:
    """Return the sizes in bytes of the states, of a draft's inputs, and of one copy of the states per node."""
    delta = Delta(layers=tuple(i for i in range(layers) if (i + 1) % 4), **HEADS)
    config = ModelConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_layers=layers, num_heads=1, delta=delta
    )
    model = language_model(config, dtype="bfloat16")
    assert model.for_chains is not None
    chains = model.for_chains(nodes, 1)
    cache = jax.eval_shape(lambda: chains.init_cache(1, 1))
    rows = cache.delta.values()
    states = sum(row.state.size * 4 for row in rows)
    inputs = sum(row.inputs.size * 2 + row.gates.size * 4 for row in rows)
    return {"states": states, "inputs": inputs, "all_states": nodes * states}


def arms(nodes: int) -> dict[str, Callable[[], Any]]:
    """Return two functions, keyed by name; each runs a step of one layer in one of the two ways."""
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 16, nodes, 128)) * 128**-0.5
    v = jax.random.normal(jax.random.key(1), (1, 16, 2, nodes, 128))
    log_decay, rate = jnp.full((1, 16, 2, nodes), -0.1), jnp.full((1, 16, 2, nodes), 0.5)
    state = jax.random.normal(jax.random.key(2), (1, 16, 2, 128, 128))
    accepted = jnp.int32(nodes // 2)

    @jax.jit
    def keep_inputs(state, accepted):
        is_read = jnp.arange(nodes) < accepted
        state, _ = delta_rule(
            state, q, k, v, jnp.where(is_read, log_decay, 0.0), jnp.where(is_read, rate, 0.0)
        )
        return state, delta_rule(state, q, k, v, log_decay, rate)[1]

    @jax.jit
    def keep_states(states, accepted):
        def token(state, i):
            one = [lax.dynamic_slice_in_dim(x, i, 1, axis) for x, axis in ((q, 2), (k, 2), (v, 3))]
            gates = [lax.dynamic_slice_in_dim(x, i, 1, 3) for x in (log_decay, rate)]
            state, output = delta_rule(state, *one, *gates)
            return state, (state, output)

        return lax.scan(token, states[accepted], jnp.arange(nodes))[1]

    states = jnp.stack([state] * nodes)
    return {
        "inputs": lambda: keep_inputs(state, accepted),
        "all_states": lambda: keep_states(states, accepted),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    rows = []
    for nodes in NODES:
        seconds = common.in_turns(arms(nodes), TURNS)
        sizes = {name: bytes_per_row(layers, nodes) for name, layers in PUBLISHED.items()}
        time = common.ratio(seconds["all_states"], seconds["inputs"])
        rows.append({"nodes": nodes, "bytes": sizes, "time_ratio": time})
        print(rows[-1], flush=True)
    common.write(args.output, {"environment": common.provenance(), "rows": rows})


if __name__ == "__main__":
    main()
