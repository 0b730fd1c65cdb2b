"""`mars-jax check` from the command line."""
