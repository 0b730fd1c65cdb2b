"""`verify.mars` lowers to the acceptance kernels."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from mars_jax import drafters, verify
from mars_jax.core import fake
from mars_jax.core.controls import make_controls
from mars_jax.core.decode import run, speculative_decoder
from mars_jax.core.tree import chain
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from tests.helpers import judge, make_rows
from tests.helpers.accept_cases import Cases as AcceptCases
from tests.helpers.lowering import lowered
from tests.helpers.meshes import mesh_of

CASES, BATCH, NODES, DEPTH, VOCAB = 8, 5, 10, 4, 1100
KEYS = keys_from_seeds(jnp.arange(BATCH, dtype=jnp.uint32))
FIELDS = ("path", "num_accepted", "next_token", "relaxed")


@pytest.mark.parametrize(
    ("rule", "kernel"),
    [(verify.mars(), "margin_accept"), (verify.mars(base=verify.rejection()), "margin_stats")],
)
def test_the_decode_loop_holds_the_tpu_kernel_once_and_no_other_elsewhere(rule, kernel):
    decoder = speculative_decoder(fake.hash_model(vocab_size=1100), drafters.ngram(4), rule)
    params = Params(target=())
    controls = make_controls(2, limit=32)
    state = jax.eval_shape(
        lambda keys: decoder.init(
            params, Prompts(jnp.ones((2, 32), jnp.int32), jnp.full((2,), 3, jnp.int32), controls, rule, keys)
        ),
        KEYS[:2],
    )
    loop = functools.partial(run, decoder, params)
    on_tpu = lowered(loop, state, platform="tpu")
    calls = re.findall(r"@tpu_custom_call\((.*?)\) .*kernel_name = \"(\w+)\"", on_tpu)
    # `Evidence.stats` may be read twice; XLA merges equal calls into one kernel (tests/tpu/test_kernels.py).
    assert len(calls) == on_tpu.count("tpu_custom_call") and len(set(calls)) == 1
    assert calls[0][1] == kernel
    for platform in ("cpu", "cuda"):
        assert "tpu_custom_call" not in lowered(loop, state, platform=platform)


def test_where_xla_partitions_the_vocabulary_there_is_no_kernel_and_the_same_verdict():
    (logits, tokens, _, _, rows), _ = AcceptCases().case(4, BATCH, 4, 3, 512, chain=True)
    controls = make_rows(BATCH, limit=9, **rows._asdict())
    rule = judge(verify.mars())
    want = jax.jit(rule)(KEYS, chain(tokens), logits, controls)
    spread = jax.device_put(logits, NamedSharding(mesh_of(model=2), P(None, None, "model")))
    arguments = (KEYS, chain(tokens), spread, controls)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(rule)(*arguments), want)
    assert "tpu_custom_call" not in lowered(rule, *arguments, platform="tpu")
