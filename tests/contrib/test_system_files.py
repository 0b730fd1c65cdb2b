"""Directories of systems: round trips, and one-sentence errors for invalid systems."""

import json

import numpy as np
import pytest

from mars_jax.contrib.drafters.system_files import (
    System,
    load_classifier,
    load_system,
    resolve_system_model,
    save_system,
)
from mars_jax.utils.errors import MarsError

MASK = ((True, False), (False, True))
SYSTEMS = {
    "sprinter": System(name="sprinter", draft="tiny/draft", numbers={"threshold": 0.25}),
    "trispec": System(
        name="trispec", draft="ngram", draft_tokens=3, proxy="tiny/proxy", numbers={"margin": 1}
    ),
    "via_sd": System(name="via_sd", draft="tiny/draft", layers=MASK, numbers={"accept": 0.5, "escalate": 0}),
}


@pytest.mark.parametrize("kind", SYSTEMS)
def test_what_is_written_is_read(kind, tmp_path):
    arrays = {"weight": np.arange(3, dtype=np.float32), "bias": np.ones(1, np.float32)}
    path = save_system(tmp_path / "it", SYSTEMS[kind], arrays if kind == "sprinter" else None)
    system = load_system(path, kind)
    assert system.directory == path
    for field in ("name", "draft", "draft_tokens", "proxy", "layers", "numbers"):
        assert getattr(system, field) == getattr(SYSTEMS[kind], field)
    if kind == "sprinter":
        weight, bias = load_classifier(system)
        assert weight.tolist() == [0, 1, 2] and bias == 1
    else:
        assert [file.name for file in path.iterdir()] == ["config.json"]


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("via_sd", {"model_type": "llama"}, "model_type .* is 'llama': expected via_sd"),
        ("sprinter", {"draft": None}, "draft .* is None: expected the name of a checkpoint"),
        ("trispec", {"proxy": 3}, "proxy .* is 3"),
        ("trispec", {"draft_tokens": 0}, "draft_tokens .* is 0: expected a whole number from 1 to 64"),
        ("via_sd", {"layers": [[1, True]]}, "layers .* expected .attention, mlp. of every layer"),
        ("via_sd", {"layers": []}, "layers"),
        ("via_sd", {"accept": "high"}, "accept .* is 'high': expected a number"),
        ("trispec", {"margin": float("nan")}, "margin .* is nan"),
    ],
)
def test_what_none_can_be_is_refused(tmp_path, kind, change, message):
    path = save_system(tmp_path / "it", SYSTEMS[kind], {"weight": np.ones(2, np.float32)})
    config = json.loads((path / "config.json").read_text()) | change
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(MarsError, match=message):
        load_system(path, kind)


def test_a_classifier_of_other_shapes_is_refused(tmp_path):
    path = save_system(tmp_path / "it", SYSTEMS["sprinter"], {"weight": np.ones((2, 2), np.float32)})
    with pytest.raises(MarsError, match=r"expected weight .E. and bias .1. of a classifier"):
        load_classifier(load_system(path, "sprinter"))
    empty = save_system(tmp_path / "empty", SYSTEMS["sprinter"])
    with pytest.raises(MarsError, match="holds no weights"):
        load_classifier(load_system(empty, "sprinter"))


def test_models_are_named_within_the_directory_or_by_name(tmp_path):
    path = save_system(tmp_path / "it", SYSTEMS["trispec"])
    (path / "small").mkdir()
    (path / "small" / "config.json").write_text("{}")
    system = load_system(path, "trispec")
    assert resolve_system_model(system, "small") == str(path / "small")
    assert resolve_system_model(system, "tiny/draft") == "tiny/draft"
    for name in ("../other", "/etc", "~/model", "./x"):
        with pytest.raises(MarsError, match="expected a directory within its own"):
            resolve_system_model(system, name)
