"""Implementations of each kernel operation, for the test classes that inherit the shared suites."""

import functools

import jax
from jax.experimental.pallas import tpu as pltpu

RACES = pltpu.InterpretParams(detect_races=True)
"""Simulates TPU memory and detects races. Hundreds of times slower than `interpret=True`."""

IMPLEMENTATIONS = {
    "default": {},
    "reference": {"implementation": "reference"},
    "xla": {"implementation": "xla"},
    "partitioned": {"implementation": "partitioned"},
    "mosaic": {"implementation": "pallas_tpu", "interpret": True},
    "mosaic_simulated": {"implementation": "pallas_tpu", "interpret": RACES},
}


def compiled(operation, name, static):
    """Return the jitted operation. Interpreters compile without optimization, since they run once per shape."""
    options = IMPLEMENTATIONS[name]
    quick = {"xla_backend_optimization_level": 0} if "interpret" in options else None
    return jax.jit(functools.partial(operation, **options), static_argnames=static, compiler_options=quick)


def assert_no_races():
    # In jax 0.10 the findings of the race detector are only accessible through this private module.
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found
