"""Every drafter with a target, its weights and its vocabulary, and a comparison of states."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import contrib, drafters
from mars_jax.contrib.models import medusa_layers
from mars_jax.core.controls import make_controls
from mars_jax.core.types import Params, Prompts, keys_from_seeds
from mars_jax.drafters import Dynamic
from mars_jax.models import eagle_head, init_params, language_model
from tests.helpers import NO_WEIGHTS, cascades, dflash, sprinters
from tests.helpers.fake_drafters import DRAFTERS, SMALL, TARGET, VOCAB
from tests.helpers.small_models import CONFIG, EAGLE_3, MEDUSA

ROWS, BUFFER, CHUNK = 3, 72, 16
MODEL = language_model(CONFIG)


@functools.cache
def of_model(name):
    """Return (target, drafter, params, vocabulary) of a drafter that reads a small real target."""
    if name.startswith("dflash"):
        shape = dflash.SHAPES[name.removeprefix("dflash ")]
        drafter = contrib.dflash(dflash.HEADS["dflash"], dflash.MODEL, tree=shape)
        return dflash.MODEL, drafter, dflash.weights("dflash"), dflash.VOCAB
    if name == "ngram, sinks":
        sinks = dataclasses.replace(CONFIG, windows=(None, 5), attention_sinks=True)
        params = Params(target=init_params(sinks, jax.random.key(0), scale=0.3), draft=())
        return language_model(sinks), DRAFTERS["ngram"], params, 64
    target = init_params(CONFIG, jax.random.key(0))
    if name.startswith("eagle"):
        tree = Dynamic(top_k=3, depth=3, nodes=9) if "tree" in name else None
        drafter = drafters.eagle(EAGLE_3, MODEL, 4, tree=tree)
        head = eagle_head.init_params(EAGLE_3, jax.random.key(1))
        head |= {"ids": jnp.arange(0, 64, 2, dtype=jnp.int32)}
    else:
        drafter = contrib.medusa(MEDUSA, MODEL, tree=(2, 2, 1) if "tree" in name else None)
        head = medusa_layers.init_params(MEDUSA, jax.random.key(1))
    return MODEL, drafter, Params(target=target, draft=head), 64


def in_chunks(model):
    """Prefill in chunks smaller than the buffer: one chunk as wide as the buffer would read all of a text."""
    return model._replace(prefill_chunk=CHUNK)


LITTLE = in_chunks(SMALL)
PLAIN = {
    "none": drafters.none(),
    "ngram": DRAFTERS["ngram"],
    "model chain": drafters.language_model(LITTLE, 5),
    "model, sampled chain": drafters.language_model(LITTLE, 4, sample=True),
    "model tree": drafters.language_model(LITTLE, tree=(4, 2, 2, 1)),
    "model, dynamic tree": drafters.language_model(LITTLE, tree=Dynamic(top_k=3, depth=3, nodes=9)),
}
PROXY = in_chunks(cascades.PROXY)
INNER = drafters.language_model(in_chunks(cascades.SMALL), cascades.K)
TRUSTED = {
    "cascade": (contrib.cascade(INNER, PROXY, cascades.MOST), cascades.weights(0.1)),
    "cascade of n-grams": (contrib.cascade(drafters.ngram(3), PROXY, 12), cascades.weights(0.1)),
    "sprinter": (contrib.sprinter(in_chunks(sprinters.SMALL), 6), sprinters.weights(0.5)),
}
HEADS = ["eagle chain", "eagle tree", "medusa chain", "medusa tree", "dflash chain", "dflash dynamic tree"]
NAMES = [*PLAIN, *TRUSTED, *HEADS]


def made_of(name):
    """Return (target, drafter, params, vocabulary) by name."""
    if name in PLAIN:
        return TARGET, PLAIN[name], NO_WEIGHTS, VOCAB
    if name in TRUSTED:
        drafter, params = TRUSTED[name]
        return TARGET, drafter, params, VOCAB
    return of_model(name)


def batch_of(texts, rule, *, limit=BUFFER, temperature=(0.9, 0.0, 1.3), stop_tokens=()):
    """Return prompts of the given token lists, padded to `BUFFER`; each row has its own temperature."""
    prompts = np.zeros((ROWS, BUFFER), np.int32)
    for row, text in enumerate(texts):
        prompts[row, : len(text)] = text
    lengths = np.asarray([len(text) for text in texts], np.int32)
    controls = make_controls(ROWS, limit=limit, temperature=temperature, stop_tokens=stop_tokens)
    keys = keys_from_seeds(jnp.arange(ROWS, dtype=jnp.uint32))
    return Prompts(jnp.asarray(prompts), jnp.asarray(lengths), controls, rule, keys)


def check_same(expected, actual):
    """Check that tokens and counts are equal, and floats nearly so: forwards of other widths sum in another order."""
    assert expected[0] == actual[0]
    for x, y in zip(*map(jax.tree.leaves, (actual[1], expected[1])), strict=True):
        if np.issubdtype(x.dtype, np.floating):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)
        else:
            np.testing.assert_array_equal(x, y)
