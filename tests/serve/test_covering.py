"""Two hundred uneven prompts through sixteen rows, by every drafter and every rule: the tokens of one by one.

A covering array: each rule is paired with the next drafter that it takes, until each of both has had its turn. All on
one small random target, whose drafts are copies of it with noise, so that they are accepted often.

One row and sixteen are other programs, whose sums round otherwise: a number that is drawn where two tokens meet may
fall to either. So of texts that differ the first token that does is looked at by numbers in float64: see `rounds`.

So it is on the embedded family, where one of 200 texts differed with Medusa heads: the number drawn at its 13th token
was 0.99128473, and there in float64 the share of token 1213, 8e-8 wide, ends 1.2e-7 after it, two units in the last
place of float32. One row said 1213 and sixteen 1214.
"""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import contrib, drafters, specs, verify
from mars_jax.contrib.models import medusa_layers
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.contrib.models.dflash_head import init_params as dflash_params
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.core import sampling
from mars_jax.core.controls import make_controls
from mars_jax.core.rule import LoadedRule
from mars_jax.core.types import Visible, keys_from_seeds
from mars_jax.models import ModelConfig, eagle_head, init_params, language_model
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.serve.prepare import prepared
from mars_jax.serve.queue import Queue, Shares, longest_first

PROMPTS, ROWS, VOCAB = 200, 16, 64
CONFIG = ModelConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2)
MODEL = language_model(CONFIG)
PARAMS = init_params(CONFIG, jax.random.key(0), scale=0.4)
NOISY = jax.tree.map(
    lambda x, key: x + 0.04 * jax.random.normal(key, x.shape),
    PARAMS,
    jax.tree.unflatten(
        jax.tree.structure(PARAMS),
        list(jax.random.split(jax.random.key(1), len(jax.tree.leaves(PARAMS)))),
    ),
)
HEAD = EagleConfig(
    version=3,
    layer=ModelConfig(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2),
    target_hidden_size=32,
    draft_vocab_size=VOCAB,
    feature_layers=(0, 1),
)
BLOCK = DFlashConfig(
    layer=ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=1,
        num_heads=2,
        family="qwen3",
        qk_norm=True,
    ),
    target_hidden_size=32,
    feature_layers=(0, 1),
    block_size=4,
    mask_token=0,
    draft_vocab_size=VOCAB,
)
MEDUSA = MedusaConfig(num_heads=2, num_layers=1, hidden_size=32, vocab_size=VOCAB)
SHAPE = drafters.Dynamic(top_k=3, depth=3, nodes=8)

GREEDY = {
    "none": lambda: (drafters.none(), ()),
    "ngram": lambda: (drafters.ngram(8), ()),
    "chain": lambda: (drafters.language_model(MODEL, 3), NOISY),
    "tree": lambda: (drafters.language_model(MODEL, tree=(2, 2, 1)), NOISY),
    "dynamic tree": lambda: (drafters.language_model(MODEL, tree=SHAPE), NOISY),
    "eagle": lambda: (drafters.eagle(HEAD, MODEL, 3), eagle_head.init_params(HEAD, jax.random.key(2))),
    "eagle tree": lambda: (
        drafters.eagle(HEAD, MODEL, tree=SHAPE),
        eagle_head.init_params(HEAD, jax.random.key(2)),
    ),
    "medusa": lambda: (
        contrib.medusa(MEDUSA, MODEL, tree=(2, 1)),
        medusa_layers.init_params(MEDUSA, jax.random.key(3)),
    ),
    "replay": lambda: (contrib.replay(8), contrib.corpus([list(range(40)), [5, 6, 7] * 9], 256)),
    "dflash": lambda: (contrib.dflash(BLOCK, MODEL), dflash_params(BLOCK, jax.random.key(4))),
    # Costs by which it drafts now all, now half, now nothing.
    "as long as pays": lambda: drafters.sized(
        drafters.LoadedDrafter(drafters.language_model(MODEL, 4), NOISY), costs=[1.0, 1.5, 2.2]
    ),
}
SAMPLED = {
    "sampled chain": lambda: (drafters.language_model(MODEL, 3, sample=True), NOISY),
    "sampled tree": lambda: (drafters.language_model(MODEL, tree=(2, 1), sample=True), NOISY),
    "sampled eagle": lambda: (
        drafters.eagle(HEAD, MODEL, 3, sample=True),
        eagle_head.init_params(HEAD, jax.random.key(2)),
    ),
}
RULES = [name for name, row in specs.RULES.items() if not {"weights", "long"} & set(row.needs)]
"""Without those that want a head, and `simulated`, whose text means nothing."""


def pairs():
    """(rule, drafter) of every rule, and then of every drafter that had no turn."""
    alike = [name for name in GREEDY if name not in ("none", "as long as pays")]
    greedy, sampled = itertools.cycle(alike), itertools.cycle(SAMPLED)
    chains = [name for name in SAMPLED if "tree" not in name]
    made = []
    for rule in RULES:
        needs = specs.RULES[rule].needs
        if rule == "fly":  # whose window of six does not fit into a shorter draft
            made.append((rule, "ngram"))
        elif "chain" in needs:
            made.append((rule, chains[0]))
        else:
            made.append((rule, next(sampled if "q" in needs else greedy)))
    had = {drafter for _, drafter in made}
    made += [("exact", name) for name in GREEDY if name not in had]
    return [*made, *[("rejection", name) for name in SAMPLED if name not in had]]


@pytest.fixture(scope="module")
def target():
    return mj.Pretrained.from_parts(MODEL, PARAMS, max_positions=256)


@pytest.fixture(scope="module")
def requests(target):
    """Prompts of 1 to 40 tokens, limits of 1 to 14 and a few of 40, every other one at a temperature."""
    ids = np.random.default_rng(0).integers(0, VOCAB, 80).tolist()
    return mj.make_requests(
        target,
        [ids[i % 23 : i % 23 + 1 + 7 * i % 40] for i in range(PROMPTS)],
        max_new_tokens=[40 if i % 25 == 0 else 1 + 5 * i % 14 for i in range(PROMPTS)],
        temperature=[0.9 * (i % 2) for i in range(PROMPTS)],
        top_p=[1.0 if i % 3 else 0.9 for i in range(PROMPTS)],
        seed=11,
    )


def test_every_rule_and_every_drafter_has_its_turn():
    assert {rule for rule, _ in pairs()} == set(RULES)
    assert {drafter for _, drafter in pairs()} == set(GREEDY | SAMPLED)


def rounds(request, tokens):
    """How far the token after `tokens` is from being another one, as a share of what is drawn from: at temperature 0
    the best logit from the second, else the number that is drawn from where the next token's share begins."""
    ids = jnp.asarray([[*request.prompt_tokens, *tokens]], jnp.int32)
    count = ids.shape[1]
    visible = Visible.causal(jnp.zeros((1,), jnp.int32), count)
    output = MODEL.forward(PARAMS, ids, visible, MODEL.init_cache(1, count))
    logits = MODEL.unembed(PARAMS, output.hidden[:, -1:])
    if request.temperature == 0:
        second, best = np.sort(np.asarray(logits, np.float64)[0, 0])[-2:]
        return best - second
    controls = make_controls(1, limit=256, temperature=request.temperature, top_p=request.top_p)
    weights = np.exp(np.asarray(sampling.process(logits, controls), np.float64))[0, 0]
    keys = keys_from_seeds(jnp.asarray([request.seed], jnp.uint32))
    drawn = sampling.node_uniforms(
        jax.vmap(jax.random.split)(keys)[:, 1], jnp.asarray([[count - 1]], jnp.int32)
    )
    return np.min(np.abs(np.cumsum(weights) / weights.sum() - float(drawn[0, 0])))


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "drafter"), pairs(), ids=[", ".join(pair) for pair in pairs()])
def test_two_hundred_uneven_prompts_get_what_each_would_get_alone(target, requests, rule, drafter):
    chosen = LoadedRule(verify.load(rule, target).rule)
    made = prepared(target, drafters.LoadedDrafter(*(GREEDY | SAMPLED)[drafter]()), requests, verify=chosen)
    queue = Queue(made, ROWS, order=longest_first(requests), shared=Shares.NOTHING)
    together = {index: completion.tokens for index, completion in queue}
    alone = {index: completion.tokens for index, completion in Queue(made, 1, shared=Shares.NOTHING)}
    assert len(alone) == PROMPTS and queue.forwards < sum(map(len, alone.values())) / 4
    differing = [index for index in alone if together[index] != alone[index]]
    apart = {}
    for index in differing:
        pair = zip(together[index], alone[index], strict=False)
        first = next(place for place, (a, b) in enumerate(pair) if a != b)
        apart[index] = float(rounds(requests[index], alone[index][:first]))
    print(rule, drafter, apart)
    assert all(distance < 1e-5 for distance in apart.values()), apart
