"""Trained heads of rules on disk."""

import types

import jax
import numpy as np

from mars_jax import contrib, verify
from mars_jax.contrib.models import indicator
from mars_jax.contrib.rules.head_files import read_weights
from tests.helpers.checkpoint_files import message


def test_weights_come_back_as_they_were_saved(tmp_path):
    params = indicator.init_params(8, jax.random.key(0), width=4)
    folder = contrib.save(tmp_path / "new" / "head", params)
    loaded = verify.load(f"learned:{folder}", theta=0.2)
    assert loaded.rule.name == contrib.learned().name
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), loaded.params, params))
    assert "holds weights already" in message(contrib.save, folder, params)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    folder = contrib.save(tmp_path / "head", indicator.init_params(8, jax.random.key(0)))
    target = types.SimpleNamespace(config=types.SimpleNamespace(hidden_size=16), name="t", mesh=None)
    assert "are for a hidden size of 8, and 't' has 16" in message(verify.load, f"learned:{folder}", target)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    assert "holds no weights of a rule (its model_type is llama)" in message(read_weights, folder)
    (folder / "config.json").write_text('{"model_type": "mars_jax_indicator", "hidden_size": 9, "width": 64}')
    assert "do not have the shapes that config.json says" in message(read_weights, folder)
    (folder / "config.json").write_text('{"model_type": "mars_jax_indicator", "hidden_size": 8, "width": 64}')
    (folder / "model.safetensors").write_bytes(b"x")
    assert "model.safetensors' is truncated or corrupt" in message(read_weights, folder)
    broken = indicator.init_params(8, jax.random.key(0)) | {"bias": np.float32(np.nan)}
    assert "are not finite" in message(read_weights, contrib.save(tmp_path / "other", broken))
