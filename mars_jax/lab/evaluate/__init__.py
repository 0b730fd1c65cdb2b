"""Evaluation: tasks with scores, arms with controls, figures with intervals; `mars-jax benchmark`."""

from mars_jax.lab.evaluate.benchmark.arms import Arm, low_margin_sampling, make_arms
from mars_jax.lab.evaluate.benchmark.run import evaluate
from mars_jax.lab.evaluate.tasks.catalogue import TASKS, read
from mars_jax.lab.evaluate.tasks.problems import Problem

__all__ = ["TASKS", "Arm", "Problem", "evaluate", "low_margin_sampling", "make_arms", "read"]
