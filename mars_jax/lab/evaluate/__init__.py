"""Evaluation: tasks with scores, arms with controls, figures with confidence intervals; `mars-jax benchmark`."""
