"""The size of a block drafter's tree follows what its nodes win and what they cost."""

import dataclasses
from typing import Any

import jax
import pytest

from mars_jax import drafters, verify
from mars_jax.core import fake
from mars_jax.core.errors import MarsError
from mars_jax.drafters.best_first import best_first
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.planning import tree_budget
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.models import ModelConfig, init_params, language_model
from mars_jax.models import dflash_head as head
from mars_jax.models.dflash_head import DFlashConfig
from mars_jax.placement.shardings import abstract_params
from mars_jax.serve.generation import generate_requests
from mars_jax.serve.requests import make_requests

SIZES: dict[str, Any] = {"vocab_size": 12, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2}
CONFIG = ModelConfig(num_layers=2, max_positions=96, **SIZES)
HEAD = DFlashConfig(
    layer=ModelConfig(num_layers=1, **SIZES),
    target_hidden_size=16,
    feature_layers=(0, 1),
    block_size=5,
    mask_token=0,
    draft_vocab_size=12,
)


@pytest.fixture(scope="module")
def target():
    params = init_params(CONFIG, jax.random.key(0), scale=0.4)
    return Pretrained.from_parts(language_model(CONFIG), params, config=CONFIG)


@pytest.fixture(scope="module")
def load(target):
    params = head.init_params(HEAD, jax.random.key(1), scale=0.3)
    return lambda tree: drafters.LoadedDrafter(drafters.dflash(HEAD, target.model, tree=tree), params)


@pytest.mark.slow
def test_it_is_chosen_by_what_nodes_win_and_cost(target, load, monkeypatch):
    requests = make_requests(target, [[1], [2, 3, 4], [5, 6]], max_new_tokens=80, ignore_eos=True)
    rule, options = verify.mars(theta=[0.9, 0.5, 0.9]), {"rows": 2, "depth": 4}
    monkeypatch.setattr(tree_budget, "by_figures", lambda target, tokens: 1.0)
    free = tree_budget.choose(target, load, requests, rule=rule, **options)
    assert free.nodes == max(free.tau, key=lambda size: free.tau[size]) > 30 and not free.measured
    assert list(free.tau.values()) == sorted(free.tau.values())
    monkeypatch.setattr(tree_budget, "by_figures", lambda target, tokens: float(tokens))
    dear = tree_budget.choose(target, load, requests, rule=rule, **options)
    assert dear.nodes == 30 and dear.tau == free.tau
    # Of the largest tree it is what a decode of as many steps gives.
    largest, two = load(drafters.Dynamic(10, 4, 256)), verify.mars(theta=[0.9, 0.5])
    whole = generate_requests(target, largest, requests[:2], verify=two)
    assert abs(whole.metrics.tau - free.tau[256]) < 0.35 * whole.metrics.tau
    monkeypatch.setattr(tree_budget, "by_figures", lambda target, tokens: None)
    measured = tree_budget.choose(target, load, requests, rule=rule, **options)
    assert measured.measured and min(measured.seconds.values()) > 0


def test_a_smaller_tree_is_the_beginning_of_a_larger_one():
    logits = jax.random.normal(jax.random.key(2), (3, 4, 12)) * 2
    root, alive = jax.numpy.ones((3, 1), "int32"), jax.numpy.ones((3, 4), bool)
    small, large = (best_first(drafters.Dynamic(10, 4, n), root, logits, alive) for n in (30, 128))
    for name in ("tokens", "parents", "depths"):
        assert (getattr(small, name) == getattr(large, name)[:, :30]).all(), name


def test_the_figures_are_those_of_the_chip():
    """Llama-3.1-8B on a v5e: 15.0 GB are read, whose 7.5e9 numbers take 2 operations each for every token."""
    config = CONFIGS["llama-3.1-8b"]
    params = abstract_params(config, "bfloat16")
    made = Pretrained.from_parts(fake.hash_model(vocab_size=8), params, config=config)
    assert tree_budget.by_figures(made, 60, "TPU v5 lite") == pytest.approx(15.01e9 / 819e9, rel=1e-3)
    assert tree_budget.by_figures(made, 2000, "TPU v5 lite") == pytest.approx(
        15.01e9 * 2000 / 197e12, rel=1e-3
    )
    assert tree_budget.by_figures(made, 60, "cpu") is None


def test_trees_whose_tokens_depend_on_each_other_are_refused(target):
    config = dataclasses.replace(HEAD, markov_rank=2)
    params = head.init_params(config, jax.random.key(1))

    def load(tree):
        return drafters.LoadedDrafter(drafters.dflash(config, target.model, tree=tree), params)

    requests = make_requests(target, [[1]], max_new_tokens=4)
    with pytest.raises(MarsError, match=r"dspark\(.* depend on each other"):
        tree_budget.choose(target, load, requests, rule=verify.exact(), rows=1, depth=4)
