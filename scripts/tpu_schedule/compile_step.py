"""Compile the decode loop of a published model, and compute the cost of a step from the schedule.

    LIBTPU_INIT_ARGS="--xla_jf_dump_to=FOLDER ..." python -m scripts.tpu_schedule.compile_step FOLDER CASE

`CASE` is a `Case` as a JSON object. `measure` starts this module in a new process for each program, since libtpu reads
its flags only when it is loaded.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

# Select the CPU: if libtpu's flags are in the environment, JAX would otherwise look for a TPU on this machine.
os.environ["JAX_PLATFORMS"] = "cpu"

from jax.sharding import Mesh

import mars_jax as mj
from mars_jax.lab.planning.chips import topology
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.lab.planning.pair_programs import PlannedDraft, Programs, draft_of
from mars_jax.models.config import ModelConfig
from mars_jax.models.eagle_head import EagleConfig
from scripts.tpu_schedule import bundles, hlo
from scripts.tpu_schedule.step import StepCost, step_cost

ROOT = Path(__file__).resolve().parents[2]


class Case(NamedTuple):
    """A program to compile."""

    draft: str  # none, tree, chain-K or ngram-K
    topology: str = "v5e:2x2"
    dtype: str = "bfloat16"
    model: str = "llama-3.1-8b"
    layers: int | None = None  # None: all layers of the model
    devices: int | None = None  # None: all devices of the slice
    batch: int = 1
    context: int = 4096


def planned_draft(kind: str, config: ModelConfig) -> PlannedDraft:
    """Return the drafter of a case. The drafter of `tree` and `chain-K` is an EAGLE-3 head of the published shape."""
    name, _, length = kind.partition("-")
    drafter: Any = name if name in ("none", "ngram") else EagleConfig.outline(config)
    return draft_of(drafter, num_draft_tokens=int(length) if length else None)


def prepare(case: Case) -> Programs:
    """Return the programs of a case, with abstract arrays."""
    config = CONFIGS[case.model]
    if case.layers is not None:
        windows = config.windows[: case.layers]
        config = dataclasses.replace(config, num_layers=case.layers, windows=windows)
    mesh = Mesh(np.array(topology(case.topology).devices[: case.devices]), ("model",))
    draft = planned_draft(case.draft, config)
    return Programs(
        config, draft, mesh, mj.verify.mars(), batch=case.batch, context=case.context, dtype=case.dtype
    )


def measure(case: Case, folder: Path) -> StepCost:
    """Return the cost of a step. If `folder` does not contain the compiled case yet, compile it first."""
    if not (folder / "hlo.txt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        environment = os.environ | {
            "PYTHONPATH": str(ROOT),
            "LIBTPU_INIT_ARGS": bundles.LIBTPU_FLAGS.format(folder=folder.resolve()),
            # libtpu dumps no schedule for programs from JAX's compilation cache.
            "JAX_ENABLE_COMPILATION_CACHE": "false",
        }
        command = [sys.executable, "-m", "scripts.tpu_schedule.compile_step", str(folder.resolve())]
        subprocess.run([*command, json.dumps(case._asdict())], check=True, env=environment)
    place = topology(case.topology)
    return step_cost(
        hlo.parse((folder / "hlo.txt").read_text()),
        bundles.read(folder),
        generation=place.generation,
        bandwidth=place.device.bandwidth,
        live=case.context,
    )


def main(folder: str, text: str) -> None:
    pair = prepare(Case(**json.loads(text)))
    compiled = pair.lower().compile().as_text()
    assert compiled is not None
    (Path(folder) / "hlo.txt").write_text(compiled)


if __name__ == "__main__":
    main(*sys.argv[1:])
