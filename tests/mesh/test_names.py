"""A trainer's own mesh: axes with other names, weights divided for training, and axes without a role."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mars_jax import drafters, verify
from mars_jax.core import decode
from mars_jax.core.axes import name_axes, parse_mesh
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.models import ModelConfig, init_params, language_model, shardings
from mars_jax.utils.errors import MarsError
from tests.helpers import committed, ragged
from tests.helpers.meshes import mesh_of

CONFIG = ModelConfig(vocab_size=128, hidden_size=16, intermediate_size=48, num_layers=1, num_heads=4)
MODEL = language_model(CONFIG)
RULE = verify.mars(theta=0.5)
DECODER = decode.speculative_decoder(MODEL, drafters.ngram(2), RULE, prefill_chunk=16)


def decoded(params, mesh=None):
    prompts, lengths = ragged([1, 6, 12, 9], 32, 128)
    controls = make_controls(4, limit=32, temperature=[0.0, 0.9, 0.0, 1.3])
    batch = Prompts(prompts, lengths, controls, RULE, keys_from_seeds(jnp.arange(4)))
    state = decode.start(DECODER, Params(params), batch)
    return committed(decode.run(DECODER, Params(params), state)[0])


@pytest.mark.slow
@pytest.mark.parametrize("names", [("fsdp", "tp"), ("replica", "fsdp", "tp")])
def test_axes_of_other_names_decode_as_one_device(names):
    params = init_params(CONFIG, jax.random.key(0), scale=0.3)
    expected = decoded(params)
    name_axes(data=("replica", "fsdp"), model="tp")
    mesh = mesh_of(**dict.fromkeys(names, 2))
    # Trainers divide every matrix over both axes.
    spread = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(mesh, P("fsdp", "tp") if x.ndim == 2 else P())), params
    )
    placed = shardings.place(spread, CONFIG, mesh)
    assert placed["layers"][0]["up"].sharding.spec == P("tp", None)
    with jax.set_mesh(mesh):
        assert decoded(placed) == expected


def test_an_axis_without_a_role_is_an_error():
    mesh = mesh_of(data=2, stage=2)
    with pytest.raises(MarsError, match="'stage' of 2 devices has no role"):
        shardings.params_shardings(CONFIG, mesh)
    with jax.set_mesh(mesh), pytest.raises(MarsError, match="'stage' of 2 devices has no role"):
        decoded(init_params(CONFIG, jax.random.key(0)))
    with pytest.raises(MarsError, match="'data' cannot have the role model, because its role is data"):
        name_axes(model="data")
    with pytest.raises(MarsError, match="'rows' is not a role"):
        name_axes(rows="data")
    name_axes(model="parts")
    assert parse_mesh("data=2,parts=2").shape == {"data": 2, "parts": 2}
