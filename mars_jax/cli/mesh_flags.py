"""The flag --mesh."""

from __future__ import annotations

import sys

from jax.sharding import Mesh

from mars_jax.models import ModelConfig
from mars_jax.placement import hosts
from mars_jax.placement.shardings import parse_mesh, whole


def open_mesh(text: str | None, config: ModelConfig) -> Mesh | None:
    """The mesh that --mesh names, and a line on stderr for whatever of the model does not divide over it.

    Raises:
      MarsError: as `parse_mesh` and `hosts.check_mesh`.
    """
    if text is None:
        return None
    mesh = parse_mesh(text)
    hosts.check_mesh(mesh)
    for sentence in whole(config, mesh):
        print(f"note: {sentence}", file=sys.stderr)
    return mesh
