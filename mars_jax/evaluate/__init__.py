"""Evaluation: tasks with scores, arms with controls, figures with intervals; `python -m mars_jax.benchmark`."""

from mars_jax.evaluate.arms import Arm, low_margin_sampling, make_arms
from mars_jax.evaluate.problems import Problem
from mars_jax.evaluate.run import evaluate
from mars_jax.evaluate.tasks import TASKS, read

__all__ = ["TASKS", "Arm", "Problem", "evaluate", "low_margin_sampling", "make_arms", "read"]
