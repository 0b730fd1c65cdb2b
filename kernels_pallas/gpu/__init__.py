"""The kernels for GPU."""
