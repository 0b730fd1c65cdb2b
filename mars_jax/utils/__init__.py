"""Helpers of all packages: errors, limits, settings, paths, code of users. Nothing here imports jax when imported."""
