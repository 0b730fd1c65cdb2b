"""The target that --target, --dtype, --mesh and --no-check name, with its weights."""

from __future__ import annotations

import argparse

from mars_jax import hub
from mars_jax.cli.mesh_flags import open_mesh
from mars_jax.core.errors import MarsError
from mars_jax.hub.converted import is_converted
from mars_jax.hub.pretrained import Pretrained


def open_target(args: argparse.Namespace, sketch: Pretrained) -> Pretrained:
    """Load the weights of a target whose outline is known.

    Raises:
      MarsError: as `hub.load` and `open_mesh`; or --no-check was given, and there is nothing to check.
    """
    if args.no_check and not is_converted(sketch.path):
        raise MarsError(
            f"--no-check does not apply to '{args.target}', which is no conversion and holds no checksums: leave it "
            "out."
        )
    mesh = open_mesh(args.mesh, sketch.config)
    return hub.load(
        args.target,
        dtype=args.dtype,
        mesh=mesh,
        check=not args.no_check,
        cache_dtype=args.cache_dtype,
        attention=args.attention or "xla",
        prefill_chunk=args.prefill_chunk,
    )
