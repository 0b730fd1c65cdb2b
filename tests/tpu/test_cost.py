"""The cost of small programs of known size, from schedules that libtpu makes on the spot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip(
    "libtpu", reason="TPU compilation needs libtpu: pip install 'mars-jax[test]' on Linux x86-64"
)

CODE = """
import json
from mars_jax.lab.planning import chips, dump
dump.dump_folder()
where = chips.topology("v5e:2x2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from mars_jax.lab.planning.constants import SPEEDS
from mars_jax.lab.planning.cost import read_step
from mars_jax.lab.planning.estimate import estimate, figures

mesh = Mesh(np.array(where.devices), ("model",))

def placed(shape, spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))

def product(x, w):
    with jax.named_scope("target"), jax.named_scope("mlp"):
        return jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P()))

lowered = jax.jit(product).lower(placed((16, 4096), P(None, "model")), placed((4096, 2048), P("model", None)))
with dump.fresh():
    module, schedule = dump.recorded(lowered.compile().as_text())
step = read_step(module, schedule, live=0)
found = figures(step, SPEEDS["v5e"], where.bandwidth)
print(json.dumps({
    "figures": found,
    "estimate": estimate(found, SPEEDS["v5e"], where.bandwidth),
}))
"""


@pytest.fixture(scope="module")
def found():
    # libtpu takes its flags when it is loaded, so that this needs a process of its own.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", CODE], env=environment, capture_output=True, text=True, timeout=600
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_sharded_product_has_the_bytes_the_products_and_the_collective_of_a_hand_count(found):
    part = found["figures"]["parts"]["target/mlp"]
    rows, inner, outer = 16, 4096 // 4, 2048
    assert part["flops"] == 2 * rows * inner * outer
    weights, inputs, outputs = 2 * inner * outer, 2 * rows * inner, 2 * rows * outer
    total = found["estimate"]["bytes"]
    # The sum may pass through HBM once more on its way into the result.
    assert weights + inputs + outputs <= total <= weights + inputs + 4 * outputs
    assert sum(found["figures"]["collectives"].values()) == part["collectives"] == 1
    (name,) = found["figures"]["collectives"]
    assert name.startswith("all-reduce") and "over 4 in target/mlp" in name
    assert found["estimate"]["ops"] <= 8


@pytest.mark.slow
def test_plan_says_what_a_step_takes_by_the_schedule(tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "mars_jax", "plan", "--target", str(tmp_path), "--draft", "ngram"]
    command += ["--num-draft-tokens", "3", "--topology", "v5e:1x1", "--context", "256", "--json"]
    ran = subprocess.run(
        command, env=os.environ | {"JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, timeout=900
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    made = json.loads(ran.stdout)
    step, alone = made["step"], made["autoregressive_step"]
    for found in (step, alone):
        assert found["high_seconds"] > found["low_seconds"] > found["bytes_seconds"] > 0
        assert found["collectives"] == 0 and "target/mlp" in found["parts"]
    assert step["ops"] > alone["ops"]
