"""The step and everything under it: what users embed. Imports jax, numpy and kernels_pallas only."""
