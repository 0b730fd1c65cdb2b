"""Prompt lookup, compared with a search in Python."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mars_jax import drafters, hub
from mars_jax.core.fake import hash_model
from mars_jax.drafters.ngram import lookup
from mars_jax.hub.pretrained import Pretrained
from tests.helpers.ngram_oracle import slow_lookup


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=24), st.sampled_from([(3, 1), (3, 2), (1, 1)]))
def test_lookup_is_the_latest_of_the_longest_matches(tokens, sizes):
    buffer = np.full((1, 24), 2, np.int32)  # a plausible token past the length, which must not be found
    buffer[0, : len(tokens)] = tokens
    drafts, _ = lookup(
        jnp.asarray(buffer), jnp.asarray([len(tokens)], jnp.int32), 5, max_ngram=sizes[0], min_ngram=sizes[1]
    )
    assert drafts[0].tolist() == slow_lookup(tokens, 5, *sizes)


def test_for_a_mixture_of_experts_the_usual_chain_is_short():
    dense = Pretrained.from_parts(hash_model(vocab_size=11), (), None, max_positions=32)
    config = SimpleNamespace(num_experts=8)  # the only field that is read
    mixture = dataclasses.replace(dense, config=config)  # pyright: ignore[reportArgumentType]
    assert drafters.load("ngram", mixture).drafter.num_nodes == 4
    assert drafters.load("ngram", mixture, num_draft_tokens=8).drafter.num_nodes == 9


def test_for_recurrent_layers_the_usual_draft_of_a_head_is_a_chain():
    target = hub.load()
    chains_only = target.model._replace(for_chains=lambda nodes, chunk: target.model)
    recurrent = dataclasses.replace(target, model=chains_only)
    for spec in ("eagle:tiny/eagle3", "dflash:tiny/dflash"):
        assert drafters.load(spec, recurrent).drafter.is_chain
        assert not drafters.load(spec, target).drafter.is_chain
