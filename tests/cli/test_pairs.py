"""The commands `mars-jax models` and `mars-jax pairs`."""

import json

import pytest

from mars_jax.cli import commands
from mars_jax.utils import assets
from mars_jax.utils.catalogue import MODELS, pairs
from tests.helpers.gguf_files import write


@pytest.fixture
def stdout_of(capsys):
    """Return a function that calls a command, asserts that it succeeds, and returns its stdout."""

    def call(*argv):
        capsys.readouterr()
        assert commands.main(list(argv)) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return captured.out

    return call


def test_every_model_is_listed_with_its_place(stdout_of, monkeypatch):
    monkeypatch.setattr("mars_jax.hub.is_here", lambda name: name == "qwen3-8b")
    header, *lines = stdout_of("models").splitlines()
    place = {line.split()[0]: line[header.index("where") :].split()[0] for line in lines}
    assert list(place) == list(MODELS)
    assert place["tiny/target"] == "embedded" and place["qwen3-8b"] == "cached"
    assert place["smollm2"] == place["qwen3-0.6b"] == "obtainable"
    assert lines[0].endswith("Apache-2.0      model:tiny/draft and 2 more")
    rows = {row["name"]: row for row in json.loads(stdout_of("models", "--json"))}
    assert {name: row["where"] for name, row in rows.items()} == place
    assert rows["qwen3-8b"]["drafts"] == list(MODELS["qwen3-8b"].drafts)
    monkeypatch.setattr("mars_jax.hub.is_here", lambda name: True)
    assert [row["where"] for row in json.loads(stdout_of("models", "--json"))[2:4]] == ["installed", "cached"]


def test_pairs_are_those_of_a_target_or_all(stdout_of):
    header, *lines = stdout_of("pairs", "/data/Llama-3.1-8B-Instruct").splitlines()
    assert header.split() == ["target", "draft", "layout", "vocabulary", "loads", "figure", "test"]
    assert [line.split()[1] for line in lines] == list(MODELS["llama-3.1-8b"].drafts)
    assert len(stdout_of("pairs").splitlines()) == 1 + len(pairs())
    assert len({pair.target for pair in pairs()}) >= 20
    [only] = json.loads(stdout_of("pairs", "smollm2", "--json"))
    assert only["draft"] == "eagle:smollm2/eagle3" and only["loads"] == "runs"


@pytest.mark.parametrize(
    "fields",
    [
        {"basename": "Llama-3.1", "size_label": "8B", "finetune": "Instruct"},
        {"name": "Llama 3.1 8B Instruct"},
        {"basename": "unknown", "name": "Llama 3.1 8B Instruct"},
    ],
)
def test_a_gguf_file_with_another_name_is_known_by_its_metadata(stdout_of, tmp_path, fields):
    path = write(
        tmp_path / "mine.gguf", "llama", values={f"general.{key}": value for key, value in fields.items()}
    )
    assert stdout_of("pairs", str(path)) == stdout_of("pairs", "llama-3.1-8b")


def test_a_gguf_file_whose_finetune_names_a_training_run_is_known_by_its_size(stdout_of, tmp_path):
    fields = {"basename": "smollm2", "size_label": "135M", "finetune": "8k-lc100k-mix1-ep2"}
    values = {f"general.{key}": value for key, value in fields.items()}
    path = write(tmp_path / "mine.gguf", "llama", values=values)
    assert stdout_of("pairs", str(path)) == stdout_of("pairs", "smollm2")


def test_a_head_that_the_wheel_leaves_out_is_not_listed(stdout_of, monkeypatch, tmp_path):
    path, left_out = assets.path, tmp_path / "none"
    monkeypatch.setattr(assets, "path", lambda name: left_out if name == assets.DFLASH else path(name))
    drafts = ["model:tiny/draft", "eagle:tiny/eagle3"]
    assert [pair["draft"] for pair in json.loads(stdout_of("pairs", "tiny/target", "--json"))] == drafts
    assert json.loads(stdout_of("models", "--json"))[0]["drafts"] == drafts


@pytest.mark.parametrize(("name", "hint"), [("qwen3-8", " (did you mean qwen3-8b?)"), ("qwen3-0.6b", "")])
def test_a_target_that_nothing_drafts_for_is_one_sentence(capsys, name, hint):
    assert commands.main(["pairs", name]) == 2
    expected = (
        f"error: no head and no small model is known for '{name}'{hint}: draft with ngram, self or a small "
        "model with its tokenizer, or train one with mars-jax distill.\n"
    )
    assert capsys.readouterr() == ("", expected)
