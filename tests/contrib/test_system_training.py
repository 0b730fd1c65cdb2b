"""SPRINTER's labels, compared with one full forward per branch, and VIA-SD's search, compared with the slim models."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.contrib.drafters import sprinter_training, via_sd_training
from mars_jax.contrib.teaching import Batch, forward_packed, predict
from mars_jax.lab.training.loop import fit
from mars_jax.lab.training.objectives import forward_kl
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import language_model
from mars_jax.utils.errors import MarsError
from tests.helpers.small_models import random_weights

CONFIG = ModelConfig(
    vocab_size=11, hidden_size=8, intermediate_size=12, num_layers=4, num_heads=2, max_positions=32
)
MODEL, PARAMS = language_model(CONFIG), random_weights(CONFIG, scale=0.5)
OTHER = random_weights(CONFIG, scale=0.5, seed=1)
BATCH = Batch(
    np.random.default_rng(0).integers(0, 11, (2, 9)).astype(np.int32),
    np.asarray([[0] * 9, [0] * 4 + [1] * 5], np.int32),
)


@pytest.mark.slow
def test_labels_and_features_are_those_of_one_branch_at_a_time():
    examples = sprinter_training.examples(MODEL, PARAMS, MODEL, OTHER, BATCH, jax.random.key(3))
    tokens, segments = jnp.asarray(BATCH.tokens[:, :-1]), jnp.asarray(BATCH.segments[:, :-1])
    p = jax.nn.softmax(predict(MODEL, PARAMS, tokens, segments))
    q_logits = predict(MODEL, OTHER, tokens, segments)
    drawn = np.asarray(jax.random.categorical(jax.random.key(3), q_logits))
    q = jax.nn.softmax(q_logits)
    assert examples.valid[1].tolist() == [True] * 3 + [False] + [True] * 4 and examples.valid[0].all()
    examples, p, q, q_logits = jax.device_get((examples, p, q, q_logits))
    for row, place in itertools.product(range(2), range(8)):
        x = int(drawn[row, place]) if row else int(q_logits[row, place].argmax())
        begin, end = 4 if row == 1 and place >= 4 else 0, place + 1
        # Positions continue across documents, as in training. All sequences have one width.
        branch, branch_segments = np.ones((1, 9), np.int32), np.full((1, 9), 2, np.int32)
        branch[0, begin : end + 1] = [*BATCH.tokens[row, begin:end], x]
        branch_segments[0, :begin], branch_segments[0, begin : end + 1] = 0, 1
        output = forward_packed(MODEL, OTHER, jnp.asarray(branch), jnp.asarray(branch_segments))
        np.testing.assert_allclose(examples.hidden[row, place], output.hidden[0, end], atol=1e-4)
        chance = min(1.0, p[row, place, x] / q[row, place, x]) if row else p[row, place].argmax() == x
        np.testing.assert_allclose(examples.accepted[row, place], float(chance), atol=1e-4)


@pytest.mark.slow
def test_the_classifier_learns_what_its_features_say(tmp_path):
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(4096, 8)).astype(np.float32)
    accepted = (hidden[:, 2] > 0.3).astype(np.float32)
    data = sprinter_training.SprinterExamples(hidden, accepted, np.ones(4096, bool))
    with jax.numpy_dtype_promotion("standard"):  # for optax's counters
        params = fit(sprinter_training.classifier_training(data, learning_rate=2e-2), tmp_path)
    figures = sprinter_training.figures(data, params, 0.5)
    assert figures["accepted"] > 0.97 and abs(figures["trusted"] - accepted.mean()) < 0.03


@pytest.mark.slow
def test_the_search_tries_all_masks_and_measures_what_the_slim_model_says(tmp_path):
    log = tmp_path / "masks.jsonl"
    best = via_sd_training.search(MODEL, PARAMS, [BATCH], left_out=0.25, log=log)
    lines = log.read_text().splitlines()
    # Pairs of the four sublayers between the first layer and the last.
    assert len(lines) == 6
    tokens, segments = jnp.asarray(BATCH.tokens[:, :-1]), jnp.asarray(BATCH.segments[:, :-1])
    p = predict(MODEL, PARAMS, tokens, segments)
    divergences = {}
    for out in itertools.combinations([(1, 0), (1, 1), (2, 0), (2, 1)], 2):
        mask = tuple(((i, 0) not in out, (i, 1) not in out) for i in range(4))
        q = predict(MODEL.with_layers(mask), PARAMS, tokens, segments)
        divergences[mask] = float(forward_kl(p, q).mean())
    assert best.mask == min(divergences, key=divergences.__getitem__)
    assert abs(best.kl - divergences[best.mask]) < 1e-5
    # The run was killed in the middle of a write.
    log.write_text("\n".join(lines[:3]) + '\n{"mask": [[tr')
    assert via_sd_training.search(MODEL, PARAMS, [BATCH], left_out=0.25, log=log).mask == best.mask
    assert log.read_text().splitlines()[4:] == lines[3:]


def test_a_guided_search_stays_within_its_evaluations(tmp_path):
    log = tmp_path / "masks.jsonl"
    best = via_sd_training.search(MODEL, PARAMS, [BATCH], left_out=0.25, evaluations=5, log=log)
    assert len(log.read_text().splitlines()) <= 5
    assert sum(map(sum, best.mask)) == 6 and best.mask[0] == best.mask[-1] == (True, True)


def test_more_than_lies_between_the_ends_is_refused(tmp_path):
    with pytest.raises(MarsError, match="5 of 8 sublayers are to be left out, and 4 lie between"):
        via_sd_training.search(MODEL, PARAMS, [BATCH], left_out=0.6, log=tmp_path / "masks.jsonl")
