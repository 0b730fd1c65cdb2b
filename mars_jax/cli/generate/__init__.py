"""The parts of `python -m mars_jax.generate`."""
