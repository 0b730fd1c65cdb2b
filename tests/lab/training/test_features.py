"""Tests of features on disk: they give the same loss as a forward pass of the target, and form batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.contrib.teaching import Batch
from mars_jax.lab.training import eagle_training, features
from mars_jax.lab.training.distillation import tau
from mars_jax.models import eagle_head as head
from mars_jax.utils.errors import MarsError
from tests.helpers.training_heads import EAGLE3, FEATURES, IDS, WEIGHTS


@pytest.mark.slow
def test_a_record_teaches_what_the_target_teaches(tmp_path):
    """The record keeps more tokens per position than the vocabulary has, so it is complete."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 16, n).tolist() for n in (13, 9, 20, 7)]
    tokens, segments = features.pack_documents(texts, 24)
    record = features.reader(FEATURES)(WEIGHTS, jnp.asarray(tokens), jnp.asarray(segments))
    features.write_shard(tmp_path / "00000", record)
    restored = features.read_shard(tmp_path / "00000")
    jax.tree.map(np.testing.assert_array_equal, restored, jax.tree.map(np.asarray, record))

    params = head.init_params(EAGLE3, jax.random.key(1), scale=0.4)
    params.pop("ids")
    loss = jax.jit(eagle_training.eagle3(EAGLE3, FEATURES, ids=IDS, steps=3, dtype="float32"))
    # The loss does not read the token after a row, and ignores padding.
    ended = np.pad(np.where(segments < 0, 99 + np.arange(24), segments), ((0, 0), (0, 1)))
    text = Batch(np.pad(tokens, ((0, 0), (0, 1))), ended)
    forward, recorded = loss(params, text, WEIGHTS), loss(params, restored, WEIGHTS)
    # The record holds features in bfloat16 and log-probabilities in float16.
    np.testing.assert_allclose(recorded[0], forward[0], rtol=0.01)
    for name, figure in forward[1].items():
        np.testing.assert_allclose(recorded[1][name], figure, atol=0.03, err_msg=name)


def shard(folder, number):
    rows, length = 4, 8
    tokens = np.full((rows, length), number, np.int32) + 100 * np.arange(rows, dtype=np.int32)[:, None]
    hidden, top = jnp.zeros((rows, length, 6), jnp.bfloat16), np.zeros((rows, length, 2), np.int32)
    record = features.Recorded(tokens, np.zeros_like(tokens), hidden, top, top.astype(np.float16))
    features.write_shard(folder / f"{number:05d}", record)


def test_an_epoch_has_every_row_but_those_held_out(tmp_path):
    for number in range(3):
        shard(tmp_path, number)
    batches, held_out, size = features.dump_batches([tmp_path], step_tokens=16, seed=0)
    assert size == 16 and batches[0].tokens.shape == (2, 8)
    epoch = sorted(first for i in range(4) for first in batches[i].tokens[:, 0])
    assert epoch == [1, 2, 101, 102, 201, 202, 301, 302]
    assert [batch.tokens[0, 0] for batch in held_out] == [0, 200]
    by_row, _, size = features.dump_batches([tmp_path], step_tokens=8, seed=0)
    assert size == 8 and by_row[0].tokens.shape == (1, 8)


def test_too_few_features_are_a_sentence(tmp_path):
    shard(tmp_path, 0)
    with pytest.raises(MarsError, match="too few features to train on: give it two shards at least"):
        features.dump_batches([tmp_path], step_tokens=16, seed=0)


@pytest.mark.parametrize("size", [0, 40, 150])
def test_a_shard_that_was_cut_short_is_a_sentence(tmp_path, size):
    shard(tmp_path, 0)
    path = tmp_path / "00000" / "top.npy"
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(MarsError, match=r"is no shard .*: remove it, or write it again"):
        features.read_shard(tmp_path / "00000")


def test_the_steps_ahead_count_in_their_order():
    figures = {f"accept_{i}": 1.0 for i in range(1, 12)} | {"accept_2": 0.5, "accept_12": 0.0, "loss_1": 7.0}
    assert tau(figures) == 1 + 1 + 10 * 0.5
