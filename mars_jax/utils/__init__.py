"""Utilities of all packages: errors, limits, settings, paths and users' code. Only `compilations` and `hosts` import jax."""
