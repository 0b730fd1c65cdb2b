"""The step and everything under it: what somebody embeds. Imports jax, numpy, flax.struct and kernels_pallas only."""
