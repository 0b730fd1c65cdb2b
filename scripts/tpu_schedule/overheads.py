"""The table of overheads that `mars-jax plan` uses for its estimates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mars_jax.lab.planning import estimate
from mars_jax.lab.planning.chips import topology
from mars_jax.lab.planning.fit import count_work
from mars_jax.lab.planning.pair_programs import Programs
from scripts import common
from scripts.tpu_schedule.compile_step import Case, measure, prepare
from scripts.tpu_schedule.step import StepCost

SLICES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
DTYPES = ("bfloat16", "int8", "int4")
LAYERS = 4
"""Number of layers of Llama-3.1-8B in the measured programs. Few suffice, since each layer costs the same."""
DRAFTS = {"none": "none", "chain": "chain-5", "tree": "tree", "ngram": "ngram-5"}
LAYER_PARTS = ("target", "target/attention", "target/mlp")


def write_table(folder: Path, names: Sequence[str]) -> None:
    """Measure rows such as "v5e-int8", and write them to the table. If `names` is empty, measure all rows.

    The rows for bfloat16 and the costs of drafting are measured on a whole slice, and the rows for int8 and int4 on one
    of its devices. Rows that are not measured stay unchanged.
    """
    table: dict[str, Any] = {"chips": {}}
    if estimate.TABLE.exists():
        table = json.loads(estimate.TABLE.read_text())
    for name in names or [f"{generation}-{dtype}" for generation in SLICES for dtype in DTYPES]:
        generation, dtype = name.split("-")
        slice_ = SLICES[generation]
        chip = table["chips"].setdefault(generation, {"layers": {}, "drafts": {}})
        rows = {}
        for draft, kind in DRAFTS.items():
            full_slice = dtype == "bfloat16"
            if draft == "ngram" and not full_slice:
                continue
            case = Case(kind, slice_, dtype, layers=LAYERS, devices=None if full_slice else 1)
            cost = measure(case, folder / f"{name}-{kind}")
            tokens, layer, step_overheads = overheads_of(
                cost, prepare(case), topology(slice_).device.bandwidth
            )
            rows.setdefault(str(tokens), layer)
            if full_slice:
                chip["drafts"][draft] = step_overheads
            print(name, kind, layer, step_overheads, flush=True)
        chip["layers"][dtype] = rows
        table["model"] = f"llama-3.1-8b, {LAYERS} layers, context 4096"
        table["measured"] = common.provenance("jaxlib", "libtpu")
        estimate.TABLE.write_text(json.dumps(table, indent=1) + "\n")
    estimate.overheads.cache_clear()


def overheads_of(
    cost: StepCost, pair: Programs, bandwidth: float
) -> tuple[int, dict[str, float], dict[str, float]]:
    """Return the number of tokens in a step, the overheads of a layer, and the overheads of the rest of the step.

    `stretch` is the time of the layers, divided by the time to read the bytes that `count_work` counts for them.
    `pass_seconds` is the time that one pass of the draft takes, and `step_seconds` the time that the rest of the step
    takes. Both exclude the time to read the bytes that `count_work` counts for them.
    """
    work = count_work(pair)
    layers = _Total.of(cost, [part for part in cost.parts if part in LAYER_PARTS])
    drafting = _Total.of(cost, [part for part in cost.parts if part.startswith(("draft", "update"))])
    step = _Total.of(cost, list(cost.parts)).minus(layers)
    layer = {
        "stretch": max(1.0, layers.seconds / (work.bytes.layers / bandwidth)),
        "launches": layers.launches / work.num_layers,
    }
    step_overheads = {}
    if work.passes:
        step = step.minus(drafting)
        beyond = max(0.0, drafting.seconds - work.bytes.draft / bandwidth)
        step_overheads["pass_seconds"] = beyond / work.passes
        step_overheads["pass_launches"] = drafting.launches / work.passes
        step_overheads["pass_collectives"] = drafting.collectives / work.passes
    else:
        step_overheads |= {"pass_seconds": 0.0, "pass_launches": 0.0, "pass_collectives": 0.0}
    step_overheads["step_seconds"] = max(0.0, step.seconds - work.bytes.unembed / bandwidth)
    step_overheads["step_launches"] = step.launches
    step_overheads["step_collectives"] = step.collectives
    return work.tokens, _rounded(layer), _rounded(step_overheads)


class _Total(NamedTuple):
    """Totals over several parts. The seconds exclude collectives."""

    seconds: float
    launches: float
    collectives: float

    @classmethod
    def of(cls, cost: StepCost, parts: list[str]) -> _Total:
        rows = [cost.parts[part] for part in parts]
        seconds = sum(cost.seconds[part] for part in parts) - sum(row.collective_seconds for row in rows)
        return cls(seconds, sum(row.launches for row in rows), sum(row.collectives for row in rows))

    def minus(self, part: _Total) -> _Total:
        return _Total(*(a - b for a, b in zip(self, part, strict=True)))


def _rounded(row: dict[str, float]) -> dict[str, float]:
    return {name: float(f"{value:.3g}") for name, value in row.items()}
