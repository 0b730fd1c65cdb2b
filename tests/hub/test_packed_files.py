"""Checkpoints packed in 4 bits by AWQ, GPTQ and compressed-tensors.

Oracle: `packed_by_others.npz`, the output of these packages for random matrices [32, 64] in groups of 32: AutoAWQ
0.2.9 (`dequantize_gemm` of random bits), AutoGPTQ 0.7.1 (`QuantLinear.pack`) and compressed-tensors 0.20.0
(`pack_to_int32`).
"""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.hub.files import Tensor
from mars_jax.hub.quantized_files import packing, unpacked_tensors
from mars_jax.models.quantize import Int4
from mars_jax.utils.errors import MarsError
from tests.helpers.checkpoint_files import message
from tests.helpers.packed_files import HOW


def on_disk(array):
    return Tensor(array.shape, lambda first, last: array[first:last] if array.ndim else array)


def reference_matrix(method):
    with np.load(Path(__file__).parent / "packed_by_others.npz") as file:
        stored = {name.split("/")[1]: file[name] for name in file if name.startswith(f"{method}/")}
    weight = stored.pop("weight")
    return {f"model.up.{piece}": on_disk(array) for piece, array in stored.items()}, weight


def read(pieces, method, **settings):
    *_, tensors = unpacked_tensors(Path("here"), [pieces], HOW[method] | settings)
    return tensors["model.up.weight"]


@pytest.mark.parametrize("method", HOW)
def test_the_weights_are_those_that_the_packages_mean(method):
    pieces, weight = reference_matrix(method)
    tensor = read(pieces, method)
    assert (tensor.shape, tensor.group) == ((32, 64), 32)
    np.testing.assert_array_equal(tensor.read(), weight)
    np.testing.assert_array_equal(tensor.rows(5, 9), weight[5:9])
    packed = Int4(*map(jnp.asarray, tensor.blocks(0, 32)), dtype=jnp.dtype("float32"))
    np.testing.assert_allclose(packed.astype("float32"), weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("key", ["checkpoint_format", "format"])
def test_the_second_version_of_gptq_keeps_its_zeros(key):
    pieces, weight = reference_matrix("gptq")
    scale = pieces["model.up.scales"].read().astype(np.float32).T.repeat(32, axis=1)
    second = read(pieces, "gptq", **{key: "gptq_v2"})
    np.testing.assert_allclose(second.read() - weight, scale, rtol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"bits": 8},
        {"version": "gemv"},
        {"quant_method": "compressed-tensors", "format": "marlin-24"},
        HOW["compressed-tensors"] | {"config_groups": {"all": {"weights": {"num_bits": 4, "type": "float"}}}},
        {"quant_method": "gptq", "checkpoint_format": "marlin"},
    ],
)
def test_other_forms_are_refused(tmp_path, change):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": HOW["awq"] | change}))
    with pytest.raises(MarsError, match=r"is quantised by \S+ in a form that is not supported: use one in 4"):
        packing(tmp_path)


@pytest.mark.parametrize("method", HOW)
def test_pieces_of_no_one_matrix_are_refused(method):
    """Cut, empty or flatten each piece. The error is raised when the piece is found or when it is read."""
    pieces, weight = reference_matrix(method)
    for cut in (lambda x: x[:1], lambda x: x[:0], lambda x: x.reshape(-1), lambda x: x[..., :1]):
        for name in pieces:
            array = cut(pieces[name].read())
            # The shape is not needed to read the weights.
            if name.endswith("weight_shape") or array.shape == pieces[name].shape:
                continue
            try:
                tensor = read(pieces | {name: on_disk(array)}, method)
                if tensor.shape == weight.shape:  # a wrong shape is refused later, by the table of weights
                    tensor.read()
                    raise AssertionError((name, array.shape))
            except MarsError as error:
                assert "has pieces of model.up of the wrong kind" in str(error)


def test_a_missing_piece_is_named():
    pieces, _ = reference_matrix("awq")
    del pieces["model.up.scales"]
    text = message(read, pieces, "awq")
    assert "'here' has pieces of model.up of the wrong kind ('scales'): download" in text
