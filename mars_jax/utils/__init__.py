"""Helpers for all packages: errors, limits, settings, paths, users' code. Only `compilations` and `hosts` import jax."""
