"""Streamed loading: shards equal those of a whole read, and only rows that local devices need are read."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from mars_jax import hub
from mars_jax.core import axes as mesh
from mars_jax.hub import stream
from mars_jax.hub.files import Tensor
from mars_jax.models import init_params
from mars_jax.models import shardings as sharding
from mars_jax.models.quantize import Int8, quantize, quantize_4
from tests.helpers.checkpoint_files import MIXTRAL as CONFIG


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    params = init_params(CONFIG, jax.random.key(0), scale=1.0)
    return hub.save(tmp_path_factory.mktemp("checkpoint") / "model", CONFIG, params)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("axes", ["data=2,model=4", "expert=2,model=2"])
def test_shards_equal_those_of_the_model_read_whole(saved, monkeypatch, dtype, axes):
    monkeypatch.setattr(stream, "BLOCK", 3 * 4 * 32)  # three rows of the hidden size
    shardings = sharding.params_shardings(CONFIG, mesh.parse_mesh(axes))
    sharded = hub.load(saved, dtype=dtype, shardings=shardings).params
    expected = hub.load(saved, dtype=dtype).params
    assert jax.tree.structure(sharded) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, sharded, expected)

    def check_placed(array, placement):
        values = array.values if isinstance(array, Int8) else array
        assert values.sharding == placement and len(values.sharding.device_set) == placement.mesh.size
        if isinstance(array, Int8):
            spec = (*placement.spec, *[None] * (values.ndim - len(placement.spec)))
            scale_sharding = NamedSharding(placement.mesh, P(*spec[:-1]))
            assert array.scale.sharding.is_equivalent_to(scale_sharding, values.ndim - 1)

    jax.tree.map(check_placed, sharded, shardings, is_leaf=lambda x: isinstance(x, Int8))


def test_without_shardings_params_stay_where_jit_puts_them(saved):
    """Params committed to one device could not be combined with arrays on a mesh."""
    assert not hub.load(saved).params["embed"]._committed
    device = SingleDeviceSharding(jax.devices()[3])
    shardings = jax.tree.map(lambda _: device, hub.load(saved).params)
    assert hub.load(saved, shardings=shardings).params["norm"].devices() == {jax.devices()[3]}


class PartialSharding:
    """A sharding with only some parts on this host."""

    def __init__(self, *indices):
        self.indices = indices

    def addressable_devices_indices_map(self, shape):
        return dict(enumerate(self.indices))


def leaves(shape, placement, group):
    channels = PartialSharding(*[index[:-1] for index in placement.indices])
    return [(shape, "int8", placement), (shape[:-1], "float32", channels)]


@pytest.mark.parametrize("bits", [None, 8])
def test_only_the_rows_that_devices_here_hold_are_read(monkeypatch, bits):
    monkeypatch.setattr(stream, "BLOCK", 4 * 4 * 2)  # two rows
    monkeypatch.setattr(Int8, "leaves", staticmethod(leaves))
    stacked = np.random.default_rng(0).standard_normal((3, 10, 4)).astype(np.float32)
    reads = []

    def tensor(number):
        def rows(first, last):
            reads.append((number, first, last))
            return stacked[number, first:last]

        return Tensor((10, 4), rows)

    parts = [(f"expert {i}", tensor(i)) for i in range(3)]
    index = slice(1, 2), slice(3, 8), slice(2, 4)
    arrays = stream.read_array(parts, (3, 10, 4), "float32", sharding=PartialSharding(index), bits=bits)
    assert reads == [(1, 3, 5), (1, 5, 7), (1, 7, 8)]
    # The scale of a channel covers all its weights, including those stored on other hosts.
    quantized = quantize(stacked)
    expected = [quantized.values[index], quantized.scale[index[:-1]]] if bits else [stacked[index]]
    for array, expected_part in zip(arrays, expected, strict=True):
        [part] = array.parts.values()
        np.testing.assert_array_equal(part, expected_part)


def test_in_4_bits_the_rows_of_devices_here_are_read(monkeypatch):
    monkeypatch.setattr(stream, "BLOCK", 4 * 64 * 2)  # two rows
    matrix = np.random.default_rng(0).standard_normal((10, 64)).astype(np.float32)
    reads = []

    def rows(first, last):
        reads.append((first, last))
        return matrix[first:last]

    place = NamedSharding(mesh.parse_mesh("model=2", jax.devices()[:2]), P("model"))
    parts = [("up", Tensor((10, 64), rows))]
    array = stream.read_array(parts, (10, 64), "float32", sharding=place, bits=4)
    weights = stream.to_params(array, "float32")
    assert reads == [(i, i + 2) for i in range(0, 10, 2)]
    jax.tree.map(np.testing.assert_array_equal, weights, quantize_4(matrix))
    assert weights.values.sharding.spec == P(None, None, "model")
