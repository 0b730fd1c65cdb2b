"""The command `python -m mars_jax.generate`."""
