"""A small target and heads for tests of training."""

import jax
import jax.numpy as jnp
import optax

from mars_jax import drafters, verify
from mars_jax.contrib.teaching import Batch
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.lab.training.loop import make_step
from mars_jax.models import ModelConfig, language_model
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.transformer import init_params
from tests.helpers import decode_all, draft_input, ragged

SIZES = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "num_kv_heads": 1}
CONFIG = ModelConfig(num_layers=3, **SIZES)
LAYER = ModelConfig(num_layers=1, **SIZES)
EAGLE3 = EagleConfig(
    version=3, layer=LAYER, target_hidden_size=16, draft_vocab_size=12, feature_layers=(0, 1, 2)
)
TARGET = language_model(CONFIG)
FEATURES = TARGET.with_features((0, 1, 2))
WEIGHTS = init_params(CONFIG, jax.random.key(0), scale=0.4)
IDS = jnp.asarray([0, 1, 3, 4, 5, 6, 8, 9, 10, 13, 14, 15], jnp.int32)


def target_texts(rows, length):
    """Return greedy completions of the target, from random prompts."""
    prompts, lengths = ragged([2] * rows, length, 16, seed=9)
    state, _ = decode_all(
        TARGET, drafters.none(), verify.exact(), prompts, lengths, params=Params(target=WEIGHTS)
    )
    return state.tokens


def drafted_text(drafter, params, rule, temperature, target=TARGET):
    """Return a text of 12 tokens followed by the chain that a drafter drafts after it, and that chain as a tree."""
    prompts, lengths = ragged([12], 24, 16, seed=4)
    decoder = decode.speculative_decoder(target, drafter, rule, prefill_chunk=8)
    controls = make_controls(1, limit=24, temperature=temperature)
    keys = keys_from_seeds(jnp.zeros((1,), jnp.uint32))
    state = decode.start(decoder, params, Prompts(prompts, lengths, controls, rule, keys))
    tree, _ = drafter.propose(params, state.draft, draft_input(state))
    return jnp.concatenate([prompts[:, :12], tree.tokens[:, 1:]], axis=1), tree


def scored_drafts(make_loss, params, text, weights=WEIGHTS):
    """Compute a loss over one text, and return the draft logits that its divergence received."""
    scored = []

    def divergence(labels, drafted):
        scored.append(drafted)
        return jnp.zeros(drafted.shape[:-1])

    trained = {name: value for name, value in params.items() if name != "ids"}
    tokens = jnp.pad(text, ((0, 0), (0, 1)))
    make_loss(divergence)(trained, Batch(tokens, jnp.zeros_like(tokens)), weights)
    return scored


def train(loss, params, steps):
    """Train on completions of the target; return the metrics of each step."""
    tokens = target_texts(16, 33)
    batch = Batch(tokens=tokens, segments=jnp.zeros(tokens.shape, jnp.int32))
    optimizer = optax.adam(3e-3)
    step, state, rows = make_step(loss, optimizer), optimizer.init(params), []
    with jax.numpy_dtype_promotion("standard"):  # optax's counters
        for _ in range(steps):
            params, state, figures = step(params, state, batch, WEIGHTS)
            rows.append(figures)
    return rows
