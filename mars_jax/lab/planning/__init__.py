"""Planning of TPU slices: compile the decode step ahead of time, without a TPU and without weights."""

from mars_jax.lab.planning.fit import Plan, make_plan

__all__ = ["Plan", "make_plan"]
