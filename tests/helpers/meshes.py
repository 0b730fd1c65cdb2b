"""Meshes of the CPU devices of a test."""

import jax
import numpy as np
from jax.sharding import AxisType


def mesh_of(**axes):
    return jax.make_mesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        devices=jax.devices()[: int(np.prod(list(axes.values())))],
    )
