"""The kernels for TPU."""
