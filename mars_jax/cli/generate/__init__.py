"""Parts of `python -m mars_jax.generate`."""
