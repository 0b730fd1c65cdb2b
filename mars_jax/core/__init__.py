"""The decoding step and its dependencies: the part users embed. Imports only jax, numpy and kernels_pallas."""
