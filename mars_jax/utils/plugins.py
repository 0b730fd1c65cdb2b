"""Plugin loading. A plugin is a module that registers rules and drafters when it is imported.

Each plugin is an entry point in the group `mars_jax.plugins`. The package `mars_jax.contrib` is itself a plugin.
"""

from __future__ import annotations

import functools
import importlib.metadata

GROUP = "mars_jax.plugins"
"""Name of the entry-point group."""


@functools.cache
def load_plugins() -> None:
    """Import all plugins, unless an earlier call has done so."""
    for plugin in importlib.metadata.entry_points(group=GROUP):
        plugin.load()
