"""Tests of `ray.data`: several actors give the rows of one process, even if an actor dies."""

import contextlib
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow
import pytest

import mars_jax
from mars_jax import verify
from mars_jax.utils.errors import MarsError

ray_data = pytest.importorskip("mars_jax.integrations.ray_data")

PROMPTS = ["Once upon a time", "The cat", "Lily wanted to", "One day, a boy", "The old dog", "There was a"]
SETTINGS = {"temperature": 1.0, "max_new_tokens": 12, "log_probs": True}


@pytest.mark.slow
def test_a_row_draws_with_the_base_seed_plus_its_id_or_with_its_own_seed():
    target = mars_jax.load("tiny/target", dtype="float32")
    decode = ray_data.Generate("tiny/target", "ngram", load_options={"dtype": "float32"}, seed=7, **SETTINGS)
    rows = decode({"id": np.array([3, 1]), "prompt": np.array(PROMPTS[:2])}).to_pylist()
    by_seed = decode(pyarrow.table({"seed": [10, 8], "prompt": PROMPTS[:2]})).to_pylist()
    assert [row["tokens"] for row in by_seed] == [row["tokens"] for row in rows]
    expected = mars_jax.generate(target, "ngram", PROMPTS[:2], seed=[10, 8], **SETTINGS).completions
    assert [row["tokens"] for row in rows] == [completion.tokens for completion in expected]
    assert [row["text"] for row in rows] == [completion.text for completion in expected]
    assert [row["tau"] for row in rows] == [completion.metrics.tau for completion in expected]
    assert rows[0]["log_probs"] == pytest.approx(expected[0].log_probs.log_prob, abs=1e-6)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"prompt": ["a"]}, "no column 'id', only prompt"),
        ({"id": ["a"], "prompt": ["a"]}, "'id' holds values other than integers"),
        ({"seed": [None], "prompt": ["a"]}, "'seed' holds values other than integers"),
        ({"id": [1], "prompt": ["a"], "text": ["a"]}, "a column 'text', which is a name of a result"),
        ({"id": [1]}, "no column 'prompt', only id"),
    ],
)
def test_rows_without_a_needed_column_are_refused(columns, message):
    decode = ray_data.Generate.__new__(ray_data.Generate)
    decode.prompt, decode.seed, decode.settings, decode.rule = "prompt", 0, {}, None
    decode.target = decode.drafter = None
    with pytest.raises(MarsError, match=message):
        decode(pyarrow.table(columns))


class Mortal(ray_data.Generate):
    """`Generate` that kills one of its actors after that actor's first batch."""

    def __init__(self, marker: str, *args, **settings):
        super().__init__(*args, **settings)
        self.marker = Path(marker)

    def __call__(self, batch):
        result = super().__call__(batch)
        with contextlib.suppress(FileExistsError):
            self.marker.touch(exist_ok=False)
            os.kill(os.getpid(), signal.SIGKILL)
        return result


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_four_actors_give_the_rows_of_one_process_though_one_is_killed(tmp_path, monkeypatch):
    ray = pytest.importorskip("ray")
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    prompts = PROMPTS * 4
    rule = verify.mars(theta=0.8)
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    try:
        rows = ray.data.from_items([{"id": i, "prompt": text} for i, text in enumerate(prompts)])
        settings = {"load_options": {"dtype": "float32"}, "seed": 7, **SETTINGS}
        arguments = {"target": "tiny/target", "draft": "ngram", "verify": rule, **settings}
        arguments["marker"] = str(tmp_path / "killed")
        mapped = rows.map_batches(Mortal, fn_constructor_kwargs=arguments, concurrency=4, batch_size=3)
        decoded = sorted(mapped.take_all(), key=lambda row: row["id"])
    finally:
        ray.shutdown()
    assert (tmp_path / "killed").exists()
    target = mars_jax.load("tiny/target", dtype="float32")
    result = mars_jax.generate(target, "ngram", prompts, verify=rule, seed=7, **SETTINGS)
    assert [list(row["tokens"]) for row in decoded] == result.tokens
    assert [row["text"] for row in decoded] == result.text
    assert [row["finish_reason"] for row in decoded] == [c.finish_reason for c in result.completions]
    for row, completion in zip(decoded, result.completions, strict=True):
        np.testing.assert_allclose(row["log_probs"], completion.log_probs.log_prob, atol=1e-5)
