"""The step on meshes of eight CPU devices: the tokens of one device, with little communication.

Tokens are compared in float32. A sum over devices adds in another order, so logits differ by rounding. The logits of
random weights are some tenths apart, so no choice depends on that, and all runs here are reproducible. Batches mix
greedy and sampled rows.
"""

import collections
import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from mars_jax import contrib, drafters, verify
from mars_jax.contrib.models import dflash_head, medusa_layers
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.core import decode, sampling
from mars_jax.core.axes import by_rows
from mars_jax.core.controls import make_controls
from mars_jax.core.sampling import log_probs
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.drafters import Dynamic
from mars_jax.models import ModelConfig, eagle_head, init_params, language_model
from mars_jax.models import shardings as sharding
from mars_jax.models.config import Delta
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.heads import init_params as init_head
from mars_jax.models.mtp_head import MtpConfig
from mars_jax.utils.errors import MarsError
from tests.helpers import committed, ragged, small_models, with_numbers

VOCAB, HIDDEN, BATCH, BUFFER = 1024, 32, 8, 40
LIKELY = jnp.arange(0, VOCAB, VOCAB // 16)  # some on every device
SIZES = small_models.SIZES | {"vocab_size": VOCAB}  # two key-value heads do not divide over four devices
CONFIG = ModelConfig(num_layers=2, qk_norm=True, **SIZES)
EXPERTS = ModelConfig(
    num_layers=2, family="qwen3_moe", num_experts=4, experts_per_token=2, dense_layers=(0,), **SIZES
)
DELTA = Delta(layers=(0,), key_heads=2, value_heads=4, key_dim=8, value_dim=6)
RECURRENT = ModelConfig(
    num_layers=2, family="qwen3_5_text", delta=DELTA, attention_gate=True, norm_plus_one=True, **SIZES
)
LAYER = ModelConfig(num_layers=1, **SIZES)
EAGLE_3 = EagleConfig(
    version=3, layer=LAYER, target_hidden_size=HIDDEN, draft_vocab_size=256, feature_layers=(0, 1, 1)
)
EAGLE_1 = EagleConfig(
    version=1, layer=LAYER, target_hidden_size=HIDDEN, draft_vocab_size=VOCAB, own_unembed=False
)
DFLASH = DFlashConfig(
    layer=dataclasses.replace(CONFIG, family="qwen3"),
    target_hidden_size=HIDDEN,
    feature_layers=(0, 1),
    block_size=4,
    mask_token=1,
    draft_vocab_size=VOCAB,
)
DSPARK = dataclasses.replace(DFLASH, from_anchor=True, markov_rank=4, confidence=True, confidence_markov=True)
MEDUSA = MedusaConfig(num_heads=3, num_layers=1, hidden_size=HIDDEN, vocab_size=VOCAB)

ONE_LAYER = ModelConfig(num_layers=1, qk_norm=True, **SIZES)  # for the fast case

MODEL = language_model(CONFIG)
MTP = MtpConfig.outline(EXPERTS)
RECURRENT_MTP = MtpConfig.outline(RECURRENT)
DYNAMIC = Dynamic(top_k=3, depth=3, nodes=9)
CHAIN = drafters.language_model(MODEL, 3, sample=True)
# Target, drafter, config of the drafter's weights, rule.
CASES = {
    "none, exact": (CONFIG, drafters.none(), None, verify.exact()),
    "ngram, mars": (ONE_LAYER, drafters.ngram(3), None, verify.mars()),
    "model chain, rejection": (CONFIG, CHAIN, CONFIG, verify.rejection()),
    "model chain, mars over block": (CONFIG, CHAIN, CONFIG, verify.mars(base=verify.rejection(block=True))),
    "model tree, mars": (CONFIG, drafters.language_model(MODEL, tree=(3, 1)), CONFIG, verify.mars()),
    "model dynamic, exact": (CONFIG, drafters.language_model(MODEL, tree=DYNAMIC), CONFIG, verify.exact()),
    "eagle-3 chain": (CONFIG, drafters.eagle(EAGLE_3, MODEL, 3, sample=True), EAGLE_3, verify.rejection()),
    "eagle-3 dynamic": (CONFIG, drafters.eagle(EAGLE_3, MODEL, tree=DYNAMIC), EAGLE_3, verify.mars()),
    "eagle-1 dynamic": (CONFIG, drafters.eagle(EAGLE_1, MODEL, tree=DYNAMIC), EAGLE_1, verify.exact()),
    "medusa tree, mars": (CONFIG, contrib.medusa(MEDUSA, MODEL, tree=(2, 2, 1)), MEDUSA, verify.mars()),
    "medusa chain": (CONFIG, contrib.medusa(MEDUSA, MODEL, sample=True), MEDUSA, verify.rejection()),
    "dflash dynamic, mars": (CONFIG, contrib.dflash(DFLASH, MODEL, tree=DYNAMIC), DFLASH, verify.mars()),
    "dspark chain": (CONFIG, contrib.dflash(DSPARK, MODEL, 3, sample=True), DSPARK, verify.rejection()),
    "recurrent, model chain": (RECURRENT, CHAIN, CONFIG, verify.rejection()),
    "recurrent, mtp chain": (
        RECURRENT,
        drafters.mtp(RECURRENT_MTP, language_model(RECURRENT), 3, sample=True),
        RECURRENT_MTP,
        verify.rejection(),
    ),
    "experts, none, exact": (EXPERTS, drafters.none(), None, verify.exact()),
    "experts, mtp tree": (
        EXPERTS,
        drafters.mtp(MTP, language_model(EXPERTS), tree=(2, 1)),
        MTP,
        verify.mars(),
    ),
    "experts, model tree": (EXPERTS, drafters.language_model(MODEL, tree=(2, 1)), CONFIG, verify.mars()),
}


def compiled(function, *arguments):
    """Compile a jitted function in a quarter of the time, without optimization, since there is little to run."""
    return function.lower(*arguments).compile({"xla_backend_optimization_level": 0})


def peaked(table):
    """Return an unembedding with few likely tokens, so that drafts of random heads are sometimes right."""
    likely = jnp.zeros((table.shape[0],), bool).at[:: table.shape[0] // len(LIKELY)].set(True)
    return jnp.where(likely[:, None], table, 0.1 * table)


def weights(config):
    """Return random params."""
    if isinstance(config, MedusaConfig):
        params = medusa_layers.init_params(config, jax.random.key(2), scale=0.3)
        heads = tuple(head | {"unembed": peaked(head["unembed"])} for head in params["heads"])
        return {"heads": heads}
    if isinstance(config, DFlashConfig):
        return dflash_head.init_params(config, jax.random.key(1), scale=0.3)
    if isinstance(config, EagleConfig):
        params = eagle_head.init_params(config, jax.random.key(1), scale=0.3)
        if config.version == 3:
            params["ids"] = jnp.arange(0, VOCAB, VOCAB // config.draft_vocab_size, dtype=jnp.int32)
            params["unembed"] = peaked(params["unembed"])
        return params
    if isinstance(config, MtpConfig):
        return init_head(config, jax.random.key(1), scale=0.3)
    params = init_params(config, jax.random.key(0), scale=0.3)
    return params | {"unembed": peaked(params["unembed"])}


def params_of(target, draft):
    """Return the params of a target and its drafter. A drafting model is the target with some noise."""
    drawn = () if draft is None else weights(draft)
    if isinstance(draft, ModelConfig):
        noise = init_params(draft, jax.random.key(5), scale=0.05)
        drawn = jax.tree.map(lambda x, y: x + y if x.ndim > 1 else x, drawn, noise)
    return Params(target=weights(target), draft=drawn)


def rows(rule):
    prompts, lengths = ragged([1, 2, 17, 5, 9, 3, 7, 12], BUFFER, VOCAB)
    controls = make_controls(
        BATCH,
        limit=BUFFER - jnp.arange(BATCH) % 3,
        temperature=[0.0, 0.7, 0.0, 1.0, 0.8, 0.0, 1.2, 0.0],
        top_k=[0, 0, 0, 9, 0, 0, 0, 0],
        top_p=[1.0, 1.0, 1.0, 1.0, 0.9, 1.0, 1.0, 1.0],
    )
    # A draw of seed 6 falls within rounding of the edge between two tokens, where a mesh may round differently.
    keys = keys_from_seeds(100 + jnp.arange(BATCH, dtype=jnp.uint32))
    rule = with_numbers(rule, theta=0.8)
    return Prompts(prompts, lengths, controls, verify.for_rows(rule, BATCH), keys)


@functools.cache
def decoder_of(case):
    target, drafter, draft, rule = CASES[case]
    decoder = decode.speculative_decoder(language_model(target), drafter, rule, prefill_chunk=16)
    return decoder, compiled(jax.jit(params_of, static_argnums=(0, 1)), target, draft)()


@functools.cache
def on_one_device(case):
    decoder, params = decoder_of(case)
    batch = rows(CASES[case][3])
    state = compiled(decode.start_ready, decoder, params, batch)(params, batch)
    state, stats = compiled(decode.run, decoder, params, state)(params, state)
    return committed(state), stats


def mesh_of(text, kind=AxisType.Auto):
    mesh = sharding.parse_mesh(text)
    return jax.sharding.Mesh(mesh.devices, mesh.axis_names, axis_types=(kind,) * len(mesh.axis_names))


def on_mesh(case, mesh, *, named=True):
    """Return (tokens, counters, the compiled loop). `named`: enter the mesh with `jax.set_mesh`."""
    target, _, draft, rule = CASES[case]
    decoder, params = decoder_of(case)
    params = Params(
        target=sharding.place(params.target, target, mesh),
        draft=() if draft is None else sharding.place(params.draft, draft, mesh),
    )
    arrays = jax.device_put(rows(rule), sharding.state_shardings(rows(rule), mesh))
    with jax.set_mesh(mesh if named else None):
        state = compiled(decode.start_ready, decoder, params, arrays)(params, arrays)
        if named:
            assert_placed(state, mesh)
        program = compiled(decode.run, decoder, params, state)
        state, stats = program(params, state)
    return committed(state), stats, program.as_text()


def assert_placed(state, mesh):
    expected = sharding.state_shardings(state, mesh)
    for x, place in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert x.sharding.is_equivalent_to(place, x.ndim)


def collectives(program):
    """Count every (name, elements of the largest result) of the collectives in an HLO text."""
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter|collective-broadcast"
    matches = re.findall(rf" = (.*?) ({names})(?:-start)?\(", program)
    counter = collections.Counter()
    for result, name in matches:
        shapes = [map(int, filter(None, sizes.split(","))) for sizes in re.findall(r"\[([\d,]*)\]", result)]
        counter[name, max(map(math.prod, shapes))] += 1
    return counter


FAST = [("ngram, mars", "model=2", AxisType.Auto)]
EXPERT_AXES = ("data=2,expert=2,model=2", "data=1,expert=1,model=2")
# Only rows are divided, and only weights: key-value heads divide over two devices, and not over four.
AXES = ("data=2", "model=2")
# One row per device, and axes of one device: the same for all drafters.
MORE_AXES = ("data=8", "model=4", "data=8,model=1", "data=1,model=2")
# Every kind of layer outside the target, with rows and weights divided.
EVERY_LAYER = (
    "ngram, mars",
    "model chain, rejection",
    "eagle-3 chain",
    "medusa tree, mars",
    "dflash dynamic, mars",
)


def meshes(case):
    """Return the axes and the kind of axes of the meshes of a case."""
    if case.startswith("experts"):
        explicit, *automatic = EXPERT_AXES[0], *EXPERT_AXES
    else:
        explicit, *automatic = "data=2,model=4", *AXES
    if case == "ngram, mars":
        automatic += MORE_AXES
    if case in EVERY_LAYER:
        automatic += ["data=2,model=4"]
    return [(axes, AxisType.Auto) for axes in automatic] + [(explicit, AxisType.Explicit)]


ALL = [(case, *mesh) for case in CASES for mesh in meshes(case)]
ALL += [(f"recurrent, {kind} chain", "data=2,model=2", AxisType.Auto) for kind in ("model", "mtp")]


@pytest.mark.parametrize(
    ("case", "axes", "kind"),
    [*FAST, *[pytest.param(*case, marks=pytest.mark.slow) for case in ALL if case not in FAST]],
)
def test_tokens_are_those_of_one_device(case, axes, kind):
    mesh = mesh_of(axes, kind)
    tokens, stats, program = on_mesh(case, mesh)
    expected, expected_stats = on_one_device(case)
    assert tokens == expected
    for name in ("steps", "emitted", "accepted_exact", "accepted_relaxed"):
        np.testing.assert_array_equal(getattr(stats, name), getattr(expected_stats, name))
    transfers = collectives(program)
    if mesh.shape.get("model", 1) == mesh.shape.get("expert", 1) == 1:
        assert not transfers
        return
    assert {name for name, _ in transfers} <= {"all-gather", "all-reduce"}
    # No vocabulary, cache or weights travel: at most the output of a layer for the nodes, or the few numbers per node
    # and device that join a divided vocabulary.
    _, drafter, _, _ = CASES[case]
    nodes = BATCH // mesh.shape.get("data", 1) * max(drafter.num_nodes, 2)
    largest = max(elements for _, elements in transfers)
    if case == "ngram, mars":  # all forwards are the target's
        # One sum for the embedding, one after each attention and one after each MLP.
        assert transfers["all-reduce", nodes * HIDDEN] == 1 + 2 * ONE_LAYER.num_layers
    allowed = (math.ceil(nodes / 8) * 8) * HIDDEN
    if case == "eagle-3 chain":  # the whole draft vocabulary, one node at a time
        allowed = BATCH // mesh.shape.get("data", 1) * EAGLE_3.draft_vocab_size
    assert largest <= allowed < nodes * VOCAB / 4


def test_sampling_from_a_divided_vocabulary_sends_a_few_numbers_per_node():
    """Check each function that reads [.., V]: the same tokens and filters, and no transfer of a vocabulary's size."""
    rng = np.random.default_rng(0)
    logits = jnp.asarray(rng.integers(-9, 9, (BATCH, 3, VOCAB)), jnp.float32)  # ties on every device
    batch = rows(verify.exact())
    controls, keys = batch.controls, batch.keys
    places = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (BATCH, 3))
    tokens = jnp.asarray(rng.integers(0, VOCAB, (BATCH, 4)), jnp.int32)
    nodes = jnp.asarray(rng.integers(0, 3, (BATCH, 4)), jnp.int32)

    def everything(_, logits, controls, keys, places, nodes, tokens):
        return {
            "argmax": sampling.argmax(logits),
            "sample": sampling.sample(keys, places, logits, controls),
            "top_k": sampling.top_k_logits(logits, 5)[:2],
            "logsumexp": sampling.top_k_logits(logits, 5).logsumexp,
            "processed": sampling.process(logits, controls),
            "at_tokens": sampling.at_tokens(logits, nodes, tokens),
            "log_prob": log_probs(logits, tokens[:, :3], controls, lossless=True).log_prob,
        }

    mesh = mesh_of("data=2,model=4")
    arguments = ((), logits, controls, keys, places, nodes, tokens)
    expected = jax.jit(everything)(*arguments)
    spread = {name: P("data") for name in expected} | {"processed": P("data", None, "model")}
    with jax.set_mesh(mesh):
        placed = jax.device_put(arguments, sharding.state_shardings(arguments, mesh))
        logits = jax.device_put(logits, NamedSharding(mesh, P("data", None, "model")))
        function = jax.jit(by_rows(everything), out_shardings=spread)
        program = compiled(function, (), logits, *placed[2:])
        actual = program((), logits, *placed[2:])
    for name in ("argmax", "sample", "top_k", "at_tokens"):
        jax.tree.map(np.testing.assert_array_equal, actual[name], expected[name])
    for name in ("processed", "logsumexp", "log_prob"):
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-6)
    transfers = collectives(program.as_text())
    assert {name for name, _ in transfers} <= {"all-gather", "all-reduce"}
    # Two numbers for each of five candidates and for the sum on four devices, of 4 rows with 3 nodes.
    assert max(elements for _, elements in transfers) == 2 * 6 * 4 * 12


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_that_nobody_names(kind):
    """Use placed arrays without `jax.set_mesh`: their types hold the mesh, or XLA decides everything."""
    case = "model tree, mars"
    tokens, _, _ = on_mesh(case, mesh_of("data=2,model=4", kind), named=False)
    assert tokens == on_one_device(case)[0]


def test_what_does_not_divide_is_whole_and_said():
    mesh = sharding.parse_mesh("data=2,model=4")
    assert sharding.replication_notes(CONFIG, mesh) == [
        "2 key-value heads do not divide over model=4: every device holds all of them."
    ]
    placed = sharding.params_shardings(CONFIG, mesh)
    assert jax.tree.structure(placed) == jax.tree.structure(jax.eval_shape(lambda: weights(CONFIG)))
    layer = placed["layers"][0]
    assert layer["q"].spec == P("model", None) and layer["k"].spec == P(None, None)
    assert layer["o"].spec == P(None, "model")
    assert placed["embed"].spec == placed["unembed"].spec == P("model", None)
    assert layer["q_norm"].spec == placed["norm"].spec == P()
    with_sinks = sharding.params_shardings(dataclasses.replace(CONFIG, attention_sinks=True), mesh)
    assert with_sinks["layers"][0]["sinks"].spec == P("model")
    for config in (EAGLE_3, EAGLE_1, MEDUSA):
        placed = sharding.params_shardings(config, mesh)
        shapes = jax.eval_shape(functools.partial(weights, config))
        assert jax.tree.structure(placed) == jax.tree.structure(shapes)
        assert any("model" in x.spec for x in jax.tree.leaves(placed))


@pytest.mark.parametrize(
    ("axes", "up", "down"),
    [
        ("model=4", P("model", None, None), P("model", None, None)),
        ("expert=4", P("expert", None, None), P("expert", None, None)),
        ("expert=2,model=2", P(("expert", "model"), None, None), P(("expert", "model"), None, None)),
        ("expert=2,model=4", P("expert", "model", None), P("expert", None, "model")),
        ("model=8", P(None, "model", None), P(None, None, "model")),
    ],
)
def test_experts_are_divided_whole_before_their_hidden_units(axes, up, down):
    layer = sharding.params_shardings(EXPERTS, sharding.parse_mesh(axes))["layers"][1]
    assert (layer["expert_up"].spec, layer["expert_down"].spec, layer["router"].spec) == (up, down, P())


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("data=2,tensor=4", "expected axes among data, model, expert"),
        ("data=2,data=4", "each once"),
        ("model", "number of devices"),
        ("data=3,model=4", "needs 12 devices and there are 8"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(text, sentence):
    with pytest.raises(MarsError, match=sentence):
        sharding.parse_mesh(text)


def test_rows_and_experts_that_do_not_divide_are_refused_with_the_numbers():
    mesh = sharding.parse_mesh("data=8")
    with pytest.raises(MarsError, match="6 rows does not divide over data=8: pad it to a multiple of 8"):
        sharding.state_shardings(jnp.zeros((6, 2)), mesh)
    decoder, params = decoder_of("none, exact")
    with jax.set_mesh(mesh), pytest.raises(MarsError, match="a batch of 6 rows does not divide over data=8"):
        decoder.init(params, jax.tree.map(lambda x: x[:6], rows(verify.exact())))
    with pytest.raises(MarsError, match="4 experts do not divide over expert=3: choose a divisor of 4"):
        sharding.params_shardings(EXPERTS, sharding.parse_mesh("expert=3"))
