"""The step and everything under it: what somebody embeds. Imports jax, numpy and kernels_pallas only."""
