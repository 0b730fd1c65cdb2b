"""Helpers for all packages: errors, limits, settings, paths, users' code. Only `compilations` imports jax."""
