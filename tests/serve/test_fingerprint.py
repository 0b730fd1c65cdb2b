"""Fingerprints of weights: independent of the mesh, and different if the weights or their config differ."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mars_jax.serve.rows import fingerprint

WEIGHTS = {"bias": np.arange(8.0, dtype=np.float32), "experts": np.ones((4, 6, 8), np.float32)}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_it_does_not_depend_on_the_mesh(kind):
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind, kind))
    expected = fingerprint(WEIGHTS)
    assert fingerprint(jax.tree.map(jnp.asarray, WEIGHTS)) == expected
    for spec in ((), ("model",), (None, "data"), (None, None, "model")):
        specs = {"bias": PartitionSpec(*spec[:1]), "experts": PartitionSpec(*spec)}
        divided = {name: jax.device_put(w, NamedSharding(mesh, specs[name])) for name, w in WEIGHTS.items()}
        assert fingerprint(divided) == expected


@pytest.mark.parametrize("expert", range(4))
def test_every_one_of_a_few_experts_counts(expert):
    experts = WEIGHTS["experts"].copy()
    experts[expert] *= 1.01
    assert fingerprint(WEIGHTS | {"experts": experts}) != fingerprint(WEIGHTS)


def test_names_shapes_and_types_count():
    variants = [{"w": np.zeros((2, 3), np.float32)}, {"v": np.zeros((2, 3), np.float32)}]
    variants += [{"w": np.zeros((3, 2), np.float32)}, {"w": np.zeros((2, 3), np.int32)}, {}]
    assert len({fingerprint(weights) for weights in variants}) == len(variants)


def test_the_config_of_a_gguf_file_counts(tmp_path):
    pytest.importorskip("gguf")
    from tests.helpers.gguf_files import write

    names = [fingerprint(WEIGHTS, write(tmp_path / f"{case}.gguf", case)) for case in ("llama", "qwen2")]
    assert len({*names, fingerprint(WEIGHTS)}) == 3
    (tmp_path / "llama.gguf").rename(tmp_path / "moved.gguf")
    assert fingerprint(WEIGHTS, tmp_path / "moved.gguf") == names[0]


def test_what_the_config_says_of_them_counts(tmp_path):
    names = []
    for theta in (1e4, 1e5):
        (tmp_path / "config.json").write_text(json.dumps({"rope_theta": theta}))
        names.append(fingerprint(WEIGHTS, tmp_path))
    assert len({*names, fingerprint(WEIGHTS)}) == 3
