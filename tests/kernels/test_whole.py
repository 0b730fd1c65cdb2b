"""`whole_or_partitioned` picks the form by XLA's partitioning: the only code that reads a private part of jax."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import margin_stats
from kernels_pallas.dispatch import is_partitioned, whole_or_partitioned
from tests.helpers.meshes import mesh_of

WHOLE, PARTITIONED = 1.0, 2.0


def form_of(x):
    """Add the number of the form that runs to every element."""
    return whole_or_partitioned(lambda x: x + WHOLE, lambda x: x + PARTITIONED)(x)


def check(function, x, form):
    np.testing.assert_array_equal(function(x), jnp.full(x.shape, form))


ZEROS = jnp.zeros((8, 4))


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.vmap, lambda f: jax.jit(jax.vmap(f))])
def test_on_one_device_it_is_whole(wrap):
    check(wrap(form_of), ZEROS, WHOLE)


@pytest.mark.parametrize("spec", [P("data"), P()], ids=["divided", "copied"])
def test_over_the_devices_of_a_mesh_it_is_partitioned(spec):
    check(jax.jit(form_of), jax.device_put(ZEROS, NamedSharding(mesh_of(data=8), spec)), PARTITIONED)


@pytest.mark.parametrize(
    ("spec", "options", "form"),
    [
        (P("data", "model"), {}, WHOLE),
        # Under `shard_map` over one of two axes, XLA still partitions the other.
        (P("data"), {"axis_names": {"data"}, "check_vma": False}, PARTITIONED),
        (P("data"), {"check_vma": True}, WHOLE),
    ],
)
def test_inside_shard_map(spec, options, form):
    mesh = mesh_of(data=2, model=4)
    check(jax.jit(jax.shard_map(form_of, mesh=mesh, in_specs=spec, out_specs=spec, **options)), ZEROS, form)


@pytest.mark.parametrize("spec", [P("data", "model"), P()])
def test_a_kernel_runs_in_a_shard_map_that_checks_over_which_axes_results_vary(spec):
    spread = jax.shard_map(
        margin_stats, mesh=mesh_of(data=2, model=4), in_specs=spec, out_specs=spec, check_vma=True
    )
    logits = jax.ShapeDtypeStruct((8, 16, 512), "float32")
    lowered = jax.jit(spread).trace(logits).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") == 1


def test_one_shard_map_inside_another_over_the_axes_that_it_left_is_whole():
    def outer(x):
        inner = jax.shard_map(
            form_of, in_specs=P(None, "model"), out_specs=P(None, "model"), axis_names={"model"}
        )
        return inner(x)

    with jax.set_mesh(mesh_of(data=2, model=4)):
        spread = jax.shard_map(outer, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
        # There, jax before 0.10.2 sees only the inner axes, and refuses a Mosaic call.
        check(jax.jit(spread), ZEROS, PARTITIONED if jax.__version_info__ < (0, 10, 2) else WHOLE)


@pytest.mark.parametrize("ctx", [SimpleNamespace(), SimpleNamespace(module_context=SimpleNamespace())])
def test_if_jax_moves_its_context_the_partitioned_form_is_used(ctx):
    assert is_partitioned(ctx)
