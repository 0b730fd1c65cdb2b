"""Plugins: modules that register rules and drafters when they are imported.

Each plugin is an entry point in the group `mars_jax.plugins`; `contrib` is one of them.
"""

from __future__ import annotations

import functools
import importlib.metadata

GROUP = "mars_jax.plugins"
"""Group of the entry points."""


@functools.cache
def load_plugins() -> None:
    """Import all plugins, once."""
    for plugin in importlib.metadata.entry_points(group=GROUP):
        plugin.load()
