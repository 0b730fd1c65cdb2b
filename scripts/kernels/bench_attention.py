"""Time the attention of one layer of Llama-3.1-8B on this GPU: XLA over all slots, XLA over blocks of slots, and cuDNN.

    python -m scripts.kernels.bench_attention --output scripts/results/bench_attention_h100.json

The arrays are in bfloat16, and 4,160 of 4,736 slots are live. Each implementation is called in a loop on the device.
Times are per call, from the faster of two loops. "off" is the largest difference from the output of the first
implementation. The choice of `FLASH_QUERIES` in `models/attention.py` is based on these measurements.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from mars_jax.lab.commands.check.large import looped, seconds_of
from mars_jax.models import attention
from scripts import common

HEADS, GROUP, DIM, SLOTS, LIVE = 8, 4, 128, 4736, 4160
SHAPES = ((1, 1), (8, 1), (32, 1), (1, 6), (1, 60), (8, 10), (32, 60), (1, 512))
"""(number of rows, number of nodes per row)."""
TURN = 1024
TIMES = 30
FORMS = {
    "all": attention.attend_all,
    "turns": lambda q, k, v, mask, live: attention._attend_blocks(q, k, v, mask, None, block=TURN),
    "cudnn": functools.partial(attention._flash, scale=None),
}


def measure(batch: int, nodes: int) -> dict[str, Any]:
    """Return the milliseconds of each implementation."""
    shapes = (batch, nodes, HEADS, GROUP, DIM), (batch, SLOTS, HEADS, DIM), (batch, SLOTS, HEADS, DIM)
    q, k, v = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    visible = jnp.arange(SLOTS) <= (LIVE - nodes + jnp.arange(nodes))[:, None]
    operands = q, k, v, jnp.broadcast_to(visible, (batch, nodes, SLOTS)), jnp.int32(LIVE)
    row: dict[str, Any] = {"rows": batch, "nodes": nodes, "bytes": 2 * batch * LIVE * HEADS * DIM * 2}
    first = None
    for name, form in FORMS.items():
        run = looped(form, TIMES, operands)
        output = run().astype(jnp.float32)
        first = output if first is None else first
        seconds = min(seconds_of(run, 2)) / TIMES
        row[name] = {"milliseconds": 1e3 * seconds, "off": float(jnp.max(jnp.abs(output - first)))}
    return row


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--output", type=Path, help="write the raw JSON here")
    args = parser.parse_args()
    rows = []
    for shape in SHAPES:
        rows.append(measure(*shape))
        print(rows[-1], flush=True)
    machine = common.provenance() | {"device": jax.devices()[0].device_kind}
    common.write(args.output, {"jax": jax.__version__, "machine": machine, "rows": rows})


if __name__ == "__main__":
    main()
