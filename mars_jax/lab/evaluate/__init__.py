"""Evaluation for `mars-jax benchmark`: scored tasks, arms and their controls, and figures with confidence intervals."""
