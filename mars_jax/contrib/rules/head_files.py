"""Functions that read and write rules' trained heads, each in a directory with config.json and model.safetensors.

E hidden size, W width. Tested with round trips and damaged files, in tests/contrib/test_head_files.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from mars_jax.contrib.models import indicator, mixer
from mars_jax.core.types import PyTree
from mars_jax.hub.config_json import read_json
from mars_jax.hub.files import tensors
from mars_jax.hub.pretrained import Pretrained
from mars_jax.hub.save import write_directory
from mars_jax.hub.values import of_its_kind
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError
from mars_jax.utils.paths import check_path

WEIGHTS, CONFIG = "model.safetensors", "config.json"
HEADS = {
    "learned": ("mars_jax_indicator", indicator.init_params),
    "diversed": ("mars_jax_mixer", mixer.init_params),
}
"""For each rule, the `model_type` of its head, and the function that initializes the head's params."""


def save(directory: str | os.PathLike[str], params: PyTree, rule: str = "learned") -> Path:
    """Write the weights of a rule into a new directory and return its path.

    Args:
      directory: directory to write to. It is created if missing, and must not contain weights yet.
      params: params of the head, with the structure of `models.indicator.init_params` for `learned` and of
        `models.mixer.init_params` for `diversed`.
      rule: "learned" or "diversed".

    Raises:
      MarsError: the directory already contains weights or cannot be written.

    >>> import tempfile
    >>> params = indicator.init_params(8, jax.random.key(0))
    >>> read_weights(save(tempfile.mkdtemp(), params))["inner"].shape
    (64, 8)
    """
    check_path(directory)
    directory = Path(directory)
    width, hidden_size = params["inner"].shape
    sizes = {"hidden_size": hidden_size, "width": width}
    if "drafted" in params:
        sizes["draft_hidden_size"] = params["drafted"].shape[1]
    if (directory / WEIGHTS).exists():
        raise MarsError(f"'{directory}' holds weights already: name a new directory.")
    config = {"model_type": HEADS[rule][0], **sizes}
    return write_directory(directory, {name: np.asarray(leaf) for name, leaf in params.items()}, config)


def read_weights(
    directory: str | os.PathLike[str], target: Pretrained | None = None, rule: str = "learned"
) -> PyTree:
    """Read the weights that `save` wrote for a rule. "tiny/diversed" is a head included in the package.

    Raises:
      MarsError: the directory does not contain weights for this rule, or the weights are not finite, or they are for a
        target with a different hidden size.
    """
    model_type, init = HEADS[rule]
    check_path(directory)
    directory = assets.path(os.fspath(directory)) or Path(directory)
    config = read_json(directory / CONFIG)
    stored_arrays = {name: tensor.read() for part in tensors(directory) for name, tensor in part.items()}
    problem = f"its model_type is {config.get('model_type')}"
    if config.get("model_type") == model_type:
        sizes = {name: size for name, size in config.items() if name not in ("model_type", "hidden_size")}
        with of_its_kind(f"'{directory / CONFIG}' holds a value", "train the head again"):
            # Compute only shapes, so that huge sizes in a damaged config do not allocate memory.
            params = jax.eval_shape(lambda key: init(config["hidden_size"], key, **sizes), jax.random.key(0))
        problem = "its tensors do not have the shapes that config.json says"
        if {name: x.shape for name, x in stored_arrays.items()} == {
            name: x.shape for name, x in params.items()
        }:
            problem = ""
    if problem:
        raise MarsError(
            f"'{directory}' holds no weights of a rule ({problem}): name a directory that mars_jax.contrib.save wrote."
        )
    if not all(np.all(np.isfinite(leaf)) for leaf in stored_arrays.values()):
        raise MarsError(f"the weights of the rule '{directory}' are not finite: load intact ones.")
    if target is not None and config["hidden_size"] != target.config.hidden_size:
        raise MarsError(
            f"the weights of the rule '{directory}' are for a hidden size of {config['hidden_size']}, and "
            f"'{target.name}' has {target.config.hidden_size}: train them for this target."
        )
    return on_mesh({name: jnp.asarray(leaf, jnp.float32) for name, leaf in stored_arrays.items()}, target)


def on_mesh(params: PyTree, target: Pretrained | None) -> PyTree:
    """Replicate a rule's weights on all devices of the target's mesh, if it has one."""
    if target is None or target.mesh is None:
        return params
    return jax.device_put(params, NamedSharding(target.mesh, PartitionSpec()))
