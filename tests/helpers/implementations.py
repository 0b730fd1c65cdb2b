"""The ways to run each operation, which the suites inherit."""

from __future__ import annotations

import functools

import jax
from jax.experimental.pallas import tpu as pltpu

RACES = pltpu.InterpretParams(detect_races=True)
"""Simulates TPU memory and looks for races. Hundreds of times slower than `interpret=True`."""

IMPLEMENTATIONS = {
    "default": {},
    "reference": {"implementation": "reference"},
    "xla": {"implementation": "xla"},
    "partitioned": {"implementation": "partitioned"},
    "mosaic": {"implementation": "pallas_tpu", "interpret": True},
    "mosaic_simulated": {"implementation": "pallas_tpu", "interpret": RACES},
}


def compiled(operation, name, static):
    """The jitted operation as that implementation. Interpreters are compiled in a hurry: they run once a shape."""
    options = IMPLEMENTATIONS[name]
    quick = {"xla_backend_optimization_level": 0} if "interpret" in options else None
    return jax.jit(functools.partial(operation, **options), static_argnames=static, compiler_options=quick)


def assert_no_races():
    # The only door to the race detector's findings in jax 0.10 is this private module.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found
