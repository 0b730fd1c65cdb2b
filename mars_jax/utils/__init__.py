"""Helpers of all packages: errors, limits, settings, paths, code of users. Only `compilations` imports jax."""
