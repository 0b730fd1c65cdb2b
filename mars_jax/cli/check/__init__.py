"""`python -m mars_jax.check` from the command line."""
