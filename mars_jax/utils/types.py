"""Type aliases that several packages use."""

from typing import Any

JsonObject = dict[str, Any]
"""A parsed JSON object."""
PyTree = Any
"""A JAX pytree of arrays."""
