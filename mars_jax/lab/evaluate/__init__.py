"""Evaluation: tasks with scores, arms with controls, figures with intervals; `mars-jax benchmark`."""
