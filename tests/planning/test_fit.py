"""Plans for slices that are not here, by the TPU's own compiler."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from mars_jax import MarsError, planning, verify
from mars_jax.cli import plan, progress
from mars_jax.models import ModelConfig
from mars_jax.placement.shardings import parse_mesh
from mars_jax.planning import make_plan
from mars_jax.planning.chips import CHIPS, topology
from mars_jax.planning.fit import default_mesh, draft_of
from mars_jax.planning.models import CONFIGS, eagle3
from mars_jax.planning.program import _out_of_memory, collectives

pytest.importorskip("libtpu", reason="plans need libtpu: pip install 'mars-jax[test]' on Linux x86-64")

TINY = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=512,
    num_layers=1,
    num_heads=4,
    num_kv_heads=4,
    head_dim=64,
)
MATRICES = 512 * 256 + 4 * 256 * 256 + 3 * 256 * 512
"""Numbers that a step reads: unembedding, attention and MLP; norms are the rest."""


def planned(config, text, draft="none", **options):
    where = topology(text)
    mesh = options.pop("mesh", None) or default_mesh(config, len(where.devices), options.get("batch", 1))
    if not isinstance(mesh, str):
        mesh = ",".join(f"{name}={size}" for name, size in mesh.items())
    options = {"verify": verify.exact(), "context": 256} | options
    return make_plan(config, draft_of(draft), where, mesh=parse_mesh(mesh, where.devices), **options)


@pytest.fixture(scope="module")
def spread():
    return planned(TINY, "v5e:2x2")


def test_a_model_over_four_chips_holds_and_reads_a_quarter_of_the_matrices(spread):
    norms = 3 * 256
    assert spread.mesh == {"model": 4} and spread.fits
    assert spread.weight_bytes == 2 * ((MATRICES + 512 * 256) // 4 + norms)
    cache = 2 * 2 * (256 + 1) * 64  # one of four heads
    assert spread.read_bytes == 2 * (MATRICES // 4 + norms) + cache
    assert spread.floor_seconds == pytest.approx(spread.read_bytes / 819e9)


def test_what_the_compiler_holds_is_at_least_what_was_added_up(spread):
    assert spread.weight_bytes + spread.cache_bytes < spread.held_bytes < spread.hbm_bytes == 16 * 2**30


def test_the_layers_are_summed_over_the_chips(spread):
    assert any(name.startswith("all-reduce bf16") for name in spread.collectives)
    assert not spread.notes


def test_a_model_that_is_too_large_does_not_fit():
    large = dataclasses.replace(TINY, vocab_size=2**20, hidden_size=8192)
    made = planned(large, "v5e:1x1")
    assert not made.fits and made.weight_bytes > made.hbm_bytes


def test_in_8_bits_a_model_reads_a_byte_a_weight_and_its_scales():
    made = planned(TINY, "v5e:2x2", dtype="int8")
    divided, whole = 512 + 3 * 256 + 2 * 512, 2 * 256  # channels; those of `o` and `down` are on every chip
    cache = 2 * 2 * (256 + 1) * 64
    assert made.fits
    assert made.read_bytes == MATRICES // 4 + 4 * (divided // 4 + whole) + 2 * 3 * 256 + cache


def test_experts_that_nobody_chose_are_not_read():
    sizes = {"num_experts": 8, "experts_per_token": 2, "expert_size": 512}
    mixture = dataclasses.replace(TINY, family="mixtral", **sizes)
    made = planned(mixture, "v5e:1x1")
    others = 2 * (512 * 256 + 4 * 256 * 256 + 8 * 256 + 3 * 256) + 2 * 2 * (256 + 1) * 4 * 64
    assert made.read_bytes == others + 2 * 2 * 3 * 256 * 512  # 2 of 8 for one token


def test_the_message_of_the_compiler_is_read():
    error = _out_of_memory(
        "RESOURCE_EXHAUSTED: ... Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G."
    )
    assert (error.used, error.capacity) == (int(20.5 * 2**30), int(15.75 * 2**30))


def test_collectives_are_counted_by_kind_and_shape():
    text = "%a = bf16[8,4]{1,0:T(8)} all-reduce-start(%x), b\n%c = s32[4]{0} all-gather(%y)\n%d = f32[] add(%x, %y)"
    assert collectives(text) == {"all-reduce bf16[8,4]": 1, "all-gather s32[4]": 1}


DIGITS = "v5e:1x" + "9" * 5000  # Python converts no text of more than 4,300 digits


@pytest.mark.parametrize(
    "name", ["v5e", "v5e:4", "v5p:2x2", "v9:2x2", "v5e:0x2", "v5e:3x5", "v5e:axb", "v5e:²x2", DIGITS]
)
def test_a_topology_that_is_none_gets_a_sentence(name):
    with pytest.raises(MarsError, match="topology"):
        topology(name)


def test_named_models_have_the_sizes_that_their_names_say():
    from mars_jax.models.weights import weights

    def billions(config):
        total = 0
        for row in weights(config):
            count = 1
            for size in row.shape:
                count *= size
            total += count
        return total / 1e9

    said = {
        "vicuna-13b": 13.0, "llama-3.1-8b": 8.03, "llama-3.2-1b": 1.24, "llama-3.3-70b": 70.55, "qwen3-8b": 8.19,
        "qwen3-32b": 32.76, "qwen3-235b-a22b": 235.1,
    }  # fmt: skip
    assert {name: billions(c) for name, c in CONFIGS.items()} == pytest.approx(said, rel=0.005)
    assert all(eagle3(config).draft_vocab_size == 32000 for config in CONFIGS.values())


def test_every_chip_is_one_that_the_compiler_knows():
    assert {
        name: len(topology(f"{name}:{'x'.join('2' * chip.dims)}").devices) for name, chip in CHIPS.items()
    }


def test_the_command_prints_json_and_ends_with_whether_it_fits(capsys):
    flags = ["--draft", "ngram", "--topology", "v5e:1x1", "--context", "128", "--json"]
    code = plan.main(["--target", "tiny/draft", *flags])
    row = json.loads(capsys.readouterr().out)
    assert code == 0 and row["fits"] and row["topology"] == "v5e:1x1" and row["collectives"] == {}


def test_a_line_now_and_then_says_that_it_plans(capsys, monkeypatch):
    def slow(*args, **options):
        time.sleep(0.3)
        raise MarsError("enough.")

    monkeypatch.setattr(progress, "SECONDS", 0.05)
    monkeypatch.setattr(planning, "make_plan", slow)
    assert plan.main(["--target", "tiny/draft", "--draft", "ngram", "--topology", "v5e:1x1"]) == 2
    assert "planning ... (0 s)" in capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--topology v5e:2x2 --draft what", "--draft is what"),
        ("--topology v5e:2x2 --mesh model=8", "8 devices and there are 4"),
        ("--topology v5e:2x2 --batch 0", "--batch is 0"),
        ("--topology v5e:2x2 --batch " + "9" * 5000, "expected a whole number from 1 to 1048576"),
        ("--topology v5e:2x2 --context " + "9" * 5000, "expected a whole number from 1 to 1048576"),
        ("--topology v5e:2x2 --mesh model=" + "9" * 5000, "expected axes among"),
        ("--topology v5e:2x" + "9" * 5000, "expected v"),
        ("--topology v5e:2x2 --batch 3 --mesh data=2", "3 rows"),
        ("--draft none", "required"),
    ],
)
def test_bad_input_gets_a_sentence(capsys, flags, sentence):
    assert plan.main(["--target", "tiny/draft", *flags.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_what_fuses_the_targets_features_is_read_once_a_step():
    from mars_jax.placement import shardings
    from mars_jax.planning.fit import FUSED, _local_bytes, read_once

    config = dataclasses.replace(TINY, num_layers=4, windows=(None,) * 4)
    head = eagle3(config)
    mesh = parse_mesh("model=1", topology("v5e:1x1").devices)
    places = shardings.params_shardings(head, mesh)
    weights = shardings.abstract_params(head, "bfloat16", int8=False, shardings=places)
    fused = _local_bytes({name: value for name, value in weights.items() if name in FUSED})
    assert fused == 2 * 256 * len(head.feature_layers) * 256
    reads = []
    for length in (2, 3):
        made = make_plan(
            config,
            draft_of(head, num_draft_tokens=length),
            topology("v5e:1x1"),
            mesh=mesh,
            verify=verify.exact(),
            context=256,
        )
        reads.append(made.read_bytes)
    # A level more reads the head without what fuses, its cache, and a slot more of the caches.
    level, cache = reads[1] - reads[0], 2 * 2 * (256 + 4) * 4 * 64
    alone = read_once(head, weights, tokens=1) - fused
    assert alone <= level <= alone + 1.1 * cache
