"""Fixtures: tiny random checkpoints with a tokenizer, and the command line called in the test's process."""

import json
import re
import shutil
from pathlib import Path
from typing import NamedTuple

import jax
import pytest

from mars_jax import hub
from mars_jax.cli import progress
from mars_jax.cli.generate.command import main
from mars_jax.contrib.drafters.medusa_files import save_medusa
from mars_jax.contrib.models import medusa_layers
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.models import ModelConfig, eagle_head, init_params
from mars_jax.models.eagle_head import EagleConfig

# A context of 64 keeps every test in one token buffer, so that tests share compiled programs.
CONTEXT = 64


def write_tokenizer(directory: Path, corpus: str, merges: int) -> int:
    """Train a byte-level BPE tokenizer, save it as transformers would, and return the size of its vocabulary."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=257 + merges,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([corpus], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(directory)
    return tokenizer.get_vocab_size()


def write_checkpoint(
    directory: Path, *, seed: int, corpus: str = "a story of the sea and the sun", merges: int = 12
):
    """Write a random one-layer llama checkpoint and return its directory."""
    vocab_size = write_tokenizer(directory, corpus, merges)
    config = ModelConfig(
        vocab_size=vocab_size, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=4, num_kv_heads=2,
        max_positions=CONTEXT, eos_token_ids=(0,),
    )  # fmt: skip
    hub.save(directory, config, init_params(config, jax.random.key(seed), scale=0.3), overwrite=True)
    return directory


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "target", seed=0)


@pytest.fixture(scope="session")
def draft(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "draft", seed=1)


@pytest.fixture(scope="session")
def foreign(tmp_path_factory):
    """Return a checkpoint with another tokenizer."""
    return write_checkpoint(
        tmp_path_factory.mktemp("cli") / "foreign", seed=0, corpus="numbers 0123456789", merges=9
    )


@pytest.fixture(scope="session")
def eagle(target, tmp_path_factory):
    """Return a random EAGLE head for the target."""
    layer = hub.read_config(target)
    sizes = {"target_hidden_size": layer.hidden_size, "draft_vocab_size": layer.vocab_size}
    head = EagleConfig(version=1, layer=layer, own_unembed=False, **sizes)
    params = eagle_head.init_params(head, jax.random.key(2), scale=0.3)
    return hub.save_eagle(tmp_path_factory.mktemp("cli") / "eagle", head, params)


@pytest.fixture(scope="session")
def medusa(target, tmp_path_factory):
    """Return three random Medusa heads for the target."""
    base = hub.read_config(target)
    heads = MedusaConfig(num_heads=3, num_layers=1, hidden_size=base.hidden_size, vocab_size=base.vocab_size)
    params = medusa_layers.init_params(heads, jax.random.key(3), scale=0.3)
    return save_medusa(tmp_path_factory.mktemp("cli") / "medusa", heads, params)


@pytest.fixture
def broken(target, tmp_path):
    """Return a copy of the target, for tests that damage it."""
    return Path(shutil.copytree(target, tmp_path / "broken"))


@pytest.fixture(autouse=True)
def _no_heartbeat(monkeypatch):
    """Disable progress lines, so that stderr does not depend on the speed of the machine."""
    monkeypatch.setattr(progress, "SECONDS", 3600.0)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def run(capsys, monkeypatch):
    """Return a function that calls the command line: run("--target", path, ...) -> Outcome."""
    monkeypatch.delenv("FORCE_COLOR", raising=False)

    def call(*argv: object) -> Outcome:
        capsys.readouterr()
        code = main([str(a) for a in argv])
        captured = capsys.readouterr()
        return Outcome(code, captured.out, captured.err)

    return call


@pytest.fixture
def refused(run):
    """Return a function that calls the command line with bad input and returns the sentence on stderr."""

    def call(*argv: object) -> str:
        outcome = run(*argv)
        assert (outcome.code, outcome.out) == (2, "")
        assert re.fullmatch(r"error: [^\n]+\.\n", outcome.err)
        return outcome.err

    return call


def rows_of(text: str) -> list[dict]:
    """Return the rows of a JSON lines file, which may not hold NaN or infinities."""
    return [json.loads(line, parse_constant=pytest.fail) for line in text.split("\n") if line]


def timeless(text: str) -> list[dict]:
    """Return the rows without times and fingerprints, which differ between two runs."""
    times = ("seconds", "tokens_per_second", "fingerprint")
    return [{key: value for key, value in row.items() if key not in times} for row in rows_of(text)]
