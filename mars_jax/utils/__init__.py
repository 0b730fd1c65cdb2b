"""Utilities shared by all packages: errors, limits, settings, paths, user code.

Only `compilations` and `hosts` import jax.
"""
