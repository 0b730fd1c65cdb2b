"""Which slice a model needs: the decode step compiled ahead of time for TPUs, without a TPU and without weights."""

from mars_jax.lab.planning.fit import Plan, make_plan

__all__ = ["Plan", "make_plan"]
