"""Evaluation: tasks with scores, arms with controls, figures with intervals; `python -m mars_jax.benchmark`."""

from mars_jax.evaluate.benchmark.arms import Arm, low_margin_sampling, make_arms
from mars_jax.evaluate.benchmark.run import evaluate
from mars_jax.evaluate.tasks.catalogue import TASKS, read
from mars_jax.evaluate.tasks.problems import Problem

__all__ = ["TASKS", "Arm", "Problem", "evaluate", "low_margin_sampling", "make_arms", "read"]
