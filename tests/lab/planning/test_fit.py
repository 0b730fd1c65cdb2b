"""Tests of plans for absent TPU slices, made with the TPU compiler."""

import dataclasses
import importlib.util
import json
import math
from types import SimpleNamespace

import jax
import pytest

from mars_jax import MarsError, hub, verify
from mars_jax.core.cache import slots
from mars_jax.core.prefill import chunk_of
from mars_jax.lab.commands import plan
from mars_jax.lab.planning import fit
from mars_jax.lab.planning.chips import larger, topology
from mars_jax.lab.planning.estimate import StepTime
from mars_jax.lab.planning.fit import make_plan, product_weights, read_once
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.lab.planning.pair_programs import (
    Programs,
    _out_of_memory,
    collectives,
    default_mesh,
    draft_of,
    local_bytes,
)
from mars_jax.models import ModelConfig, transformer
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.mtp_head import MtpConfig
from mars_jax.models.shardings import abstract_params, parse_mesh
from mars_jax.models.weights import weights
from tests.tpu import aot

pytest.importorskip("libtpu", reason="plans need libtpu: pip install 'mars-jax[test]' on Linux x86-64")

TINY = ModelConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_layers=1, num_heads=4, head_dim=64
)
MATRICES = 512 * 256 + 4 * 256 * 256 + 3 * 256 * 512
"""Number of matrix entries that a step reads: unembedding, attention and MLP, without norms."""


def planned(config, text, mesh=None, dump=lambda name, text: None, **options):
    """Return the plan of autoregression on a slice."""
    tpu_slice = topology(text)
    options = {"batch": 1, "context": 256, "dtype": "bfloat16"} | options
    mesh = mesh or default_mesh(config, len(tpu_slice.devices), options["batch"])
    device_mesh = parse_mesh(mesh, tpu_slice.devices)
    program = Programs(config, draft_of("none"), device_mesh, verify.exact(), **options)
    return make_plan(program, program, tpu_slice, dump)


@pytest.mark.slow
def test_a_model_over_four_chips_holds_and_reads_a_quarter_of_the_matrices():
    spread = planned(TINY, "v5e:2x2")
    norms = 3 * 256
    assert spread.mesh == {"model": 4} and spread.fits
    assert spread.weight_bytes == 2 * ((MATRICES + 512 * 256) // 4 + norms)
    cache = 2 * 2 * (256 + 1) * 64  # a chip holds one of four heads
    assert spread.read_bytes == 2 * (MATRICES // 4 + norms) + cache
    assert spread.floor_seconds == pytest.approx(spread.read_bytes / 819e9)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_layers_are_summed_over_the_chips_in_bfloat16(dtype):
    texts = {}
    plan_of_layers = planned(TINY, "v5e:2x2", dtype=dtype, batch=8, mesh="model=4", dump=texts.__setitem__)
    assert not plan_of_layers.notes
    instructions = aot.instructions(texts["decode.hlo.txt"])
    large_sums = (i for i in instructions if i.opcode.startswith("all-reduce") and i.size >= 8 * 256)
    sums = [instruction.dtype for instruction in large_sums]
    assert sums.count("bf16") >= 2 and "f32" not in sums


@pytest.mark.slow
def test_layers_whose_kernels_are_divided_over_both_axes_compile():
    """Sixteen rows are eight for each part, from which layers attend with a kernel; two layers share their program."""
    two_layers = dataclasses.replace(TINY, num_layers=2, windows=())
    assert planned(two_layers, "v5e:2x2", batch=16, mesh="data=2,model=2").fits


@pytest.mark.slow
def test_in_8_and_4_bits_a_model_reads_its_weights_and_their_scales():
    int8 = planned(TINY, "v5e:2x2", dtype="int8")
    int4 = planned(TINY, "v5e:2x2", dtype="int4")
    # Channels with scales. Every chip holds those of `o` and `down`.
    divided, copied = 512 + 3 * 256 + 2 * 512, 2 * 256
    cache = 2 * 2 * (256 + 1) * 64
    assert int8.fits
    assert int8.read_bytes == MATRICES // 4 + 4 * (divided // 4 + copied) + 2 * 3 * 256 + cache
    # Half a byte per weight and 6 bytes per group of 128; the unembedding has 8 bits.
    out = 256 * 256  # its two input groups cannot be divided among four chips, so every chip holds it
    numbers = (MATRICES - 512 * 256 - out) // 4 + out
    assert int4.read_bytes == numbers // 2 + 6 * numbers // 128 + 512 * (256 + 4) // 4 + 2 * 3 * 256 + cache


EXPERTS = {"family": "mixtral", "num_experts": 8, "experts_per_token": 2, "expert_size": 512}


@pytest.mark.slow
@pytest.mark.parametrize("packed", [False, True])
def test_experts_that_nobody_chose_are_not_read(packed):
    mixture = planned(dataclasses.replace(TINY, **EXPERTS), "v5e:1x1", packed_experts=packed)
    shared_bytes = 2 * (512 * 256 + 4 * 256 * 256 + 8 * 256 + 3 * 256) + 2 * 2 * (256 + 1) * 4 * 64
    # 2 of 8 experts for one token. In MXFP4, 32 numbers take 17 bytes.
    expert_bytes = 3 * 256 * 512 * 2
    if packed:
        expert_bytes = 3 * 256 * 512 * 17 // 32
    assert mixture.read_bytes == shared_bytes + 2 * expert_bytes


def test_an_mtp_module_reads_the_experts_of_its_token():
    module = MtpConfig.outline(dataclasses.replace(TINY, **EXPERTS))
    params = abstract_params(module, "bfloat16")
    assert local_bytes(params) - read_once(module, params, tokens=1) == 2 * 6 * 3 * 256 * 512  # 6 of 8


def test_the_message_of_the_compiler_is_read():
    error = _out_of_memory("... Used 20.50G of 15.75G hbm. Exceeded hbm capacity by 4.75G.")
    assert error.used == int(20.5 * 2**30)
    assert _out_of_memory("... Used 17.50M of 16.00M vmem.").used == 0


def test_collectives_are_counted_by_kind_and_shape():
    text = "%a = bf16[8,4]{1,0:T(8)} all-reduce-start(%x), b\n%c = s32[4]{0} all-gather(%y)\n%d = f32[] add(%x, %y)"
    assert collectives(text) == {"all-reduce bf16[8,4]": 1, "all-gather s32[4]": 1}


@pytest.mark.parametrize("name", ["v5e:4", "v5p:2x2", "v9:2x2", "v5e:0x2", "v5e:3x5", "v5e:²x2"])
def test_a_topology_that_is_none_gets_a_sentence(name):
    with pytest.raises(MarsError, match="topology"):
        topology(name)


def test_without_libtpu_the_message_names_the_package(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(MarsError, match=r"a plan needs libtpu: pip install 'jax\[tpu\]'"):
        topology("v5e:1x1")


def test_named_models_have_the_sizes_that_their_names_say():
    def billions(config):
        return sum(math.prod(row.shape) for row in weights(config)) / 1e9

    expected = {
        "vicuna-13b": 13.0, "llama-3.1-8b": 8.03, "llama-3.2-1b": 1.24, "llama-3.3-70b": 70.55, "qwen3-8b": 8.19,
        "qwen3-32b": 32.76, "qwen3-235b-a22b": 235.1, "qwen3.5-9b": 8.95, "qwen3.5-35b-a3b": 34.66,
        "gpt-oss-20b": 20.91, "gpt-oss-120b": 116.83,
    }  # fmt: skip
    assert {name: billions(c) for name, c in CONFIGS.items()} == pytest.approx(expected, rel=0.005)
    # A token of gpt-oss-120b uses 5.1 billion weights, according to its publisher.
    assert product_weights(CONFIGS["gpt-oss-120b"]) / 1e9 == pytest.approx(5.1, rel=0.02)
    assert all(EagleConfig.outline(config).draft_vocab_size == 32000 for config in CONFIGS.values())


@pytest.mark.slow
def test_the_command_prints_json_and_writes_the_programs(capsys, tmp_path):
    folder = tmp_path / "new" / "programs"
    flags = ["--draft", "ngram", "--topology", "v5e:1x1", "--context", "128", "--json", "--dump", str(folder)]
    code = plan.main(["--target", "tiny/draft", *flags])
    row = json.loads(capsys.readouterr().out)
    assert code == 0 and row["fits"] and row["topology"] == "v5e:1x1" and row["collectives"] == {}
    step, baseline = row["step"], row["autoregressive_step"]
    assert baseline["high_seconds"] > baseline["low_seconds"] > row["autoregressive_floor_seconds"] > 0
    assert step["low_seconds"] > baseline["low_seconds"]
    compiled = (folder / "decode.hlo.txt").read_text()
    assert compiled.startswith("HloModule jit_run") and "while(" in compiled and "tpu_custom_call" in compiled
    assert "stablehlo.while" in (folder / "decode.stablehlo.txt").read_text()


@pytest.mark.parametrize(
    ("name", "shape", "chips"),
    [("v5litepod-1", "v5e:1x1", 1), ("v6e-16", "v6e:4x4", 16), ("tpu7x-8", "tpu7x:2x2x1", 4)],
)
def test_slices_have_the_names_of_the_cloud_too(name, shape, chips):
    tpu_slice = topology(name)
    assert (tpu_slice.name, tpu_slice.chips) == (shape, chips)
    assert len(tpu_slice.devices) == len(topology(shape).devices)


@pytest.mark.parametrize("name", ["v5litepod-3", "v5p-4", "v6e-", "v4-8x"])
def test_a_type_that_is_none_gets_the_sizes_there_are(name):
    with pytest.raises(MarsError, match=r"the topology is .*: v\w+ comes in \d+, .*; name one of these"):
        topology(name)


def large(layers):
    """Return a config of 6 GiB per layer and 4 GiB for the vocabulary in bfloat16; a v5e chip has 16 GiB."""
    sizes = {"vocab_size": 2**16, "hidden_size": 2**14, "intermediate_size": 2**16}
    return dataclasses.replace(TINY, **sizes, num_layers=layers, windows=(None,) * layers)


def attempt_of(config):
    def attempt(name, dtype):
        tpu_slice = topology(name or "v5e:1x1")
        mesh = parse_mesh(f"model={len(tpu_slice.devices)}", tpu_slice.devices)
        program = Programs(config, draft_of("none"), mesh, verify.exact(), batch=1, context=128, dtype=dtype)
        return fit.try_fit(program, tpu_slice)

    return attempt


@pytest.mark.slow
def test_what_is_recommended_was_compiled_and_fits():
    eight, larger_slice = fit.advise(attempt_of(large(3)), "bfloat16", larger("v5e:1x1"))
    assert (eight.topology, eight.dtype, eight.fits) == ("v5e:1x1", "int8", True)
    assert (larger_slice.topology, larger_slice.dtype, larger_slice.fits) == ("v5e:2x2", "bfloat16", True)
    assert larger_slice.mesh == {"model": 4} and larger_slice.held_bytes < eight.held_bytes < eight.hbm_bytes
    recompiled = planned(large(3), "v5e:1x1", context=128, dtype="int8")
    assert recompiled.fits and recompiled.held_bytes == eight.held_bytes


def test_what_does_not_fit_either_is_not_recommended():
    """The weights already exceed the memory, so nothing is compiled. Slices are tried until one fits."""
    tried = fit.advise(attempt_of(large(40)), "bfloat16", ["v5e:2x2"])
    forms = [(trial.topology, trial.dtype) for trial in tried if not trial.fits]
    assert forms == [("v5e:1x1", "int8"), ("v5e:1x1", "int4"), ("v5e:2x2", "bfloat16")]
    assert all(trial.held_bytes > trial.hbm_bytes for trial in tried)

    def attempt(name, dtype):
        if name == "odd":
            raise MarsError("3 chips")
        return fit.Attempt(name, dtype, {}, name == "fits", 1, 1)

    until_fit = fit.advise(attempt, "int4", ["small", "odd", "fits", "larger"])
    assert [trial.topology for trial in until_fit] == ["small", "fits"]


@pytest.mark.slow
def test_the_command_prints_what_to_try(capsys, monkeypatch):
    attempts = [
        fit.Attempt("v5e:1x1", "int8", {"model": 1}, False, 2**35, 2**34),
        fit.Attempt("v5e:2x2", "bfloat16", {"model": 4}, True, 2**33, 2**34),
    ]
    monkeypatch.setitem(CONFIGS, "large", large(3))
    monkeypatch.setattr(fit, "advise", lambda attempt, dtype, slices: attempts)
    flags = ["--target", "large", "--draft", "none", "--topology", "v5litepod-1", "--context", "128"]
    assert plan.main(flags) == 1
    out = capsys.readouterr().out
    assert "batch 1, context 128, bfloat16, no draft" in " ".join(out.split())
    rows = [line.strip("│ ").split("│") for line in out.splitlines()]
    cells = [tuple(cell.strip() for cell in row) for row in rows]
    assert ("fits neither", "--dtype int8 (32.00 GiB of 16.00 GiB)") in cells
    assert ("try", "--topology v5e:2x2 (8.00 GiB of 16.00 GiB)") in cells


def test_drafts_are_compared_by_what_they_give_for_what_they_cost():
    baseline = StepTime(1.0, 2.0, 4.0)
    costs = {3: 1.5, 5: 1.6, None: 6.0}

    def step(shape):
        if shape.length == 5:
            return None  # does not fit
        return StepTime(*(costs[shape.length] * seconds for seconds in baseline[:3]))

    chain, tree = fit.compare_drafts(step, baseline, [0.5])
    assert chain.flags == "--num-draft-tokens 3" and chain.pays_above == pytest.approx((1.5, 1.5))
    assert chain.tau == 1.875 and chain.gain == pytest.approx(1.875 / 1.5)
    # By hand: 7 levels, each accepted with probability 3/4.
    assert tree.tau == pytest.approx(4 * (1 - 0.75**8)) and tree.gain == pytest.approx(tree.tau / 6)
    assert fit.compare_drafts(lambda shape: None, baseline, [0.5]) == []
    # With likely drafts, an additional level pays for its cost. With unlikely drafts, no level does.
    levels = {None: 1.0, 7: 1.2, 10: 1.3}

    def deeper(shape):
        return StepTime(*(levels[shape.tree and shape.tree.depth] * seconds for seconds in baseline[:3]))

    for likely, first in (([0.9, 0.8], 10), ([0.4], 7), ([0.1], None)):
        best = fit.compare_drafts(deeper, baseline, likely, fit.DEEPER)[0]
        assert best.flags == (f"--tree dynamic:10-{first}-60" if first else "--num-draft-tokens 5")


@pytest.mark.slow
def test_a_mixture_is_told_which_draft_pays(capsys, monkeypatch):
    layers = {"num_layers": 4, "windows": ()}
    monkeypatch.setitem(CONFIGS, "mixture", dataclasses.replace(TINY, **EXPERTS, **layers))
    flags = ["--target", "mixture", "--topology", "v5e:1x1", "--context", "256"]
    assert plan.main([*flags, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    drafts = {draft["flags"]: draft for draft in row["drafts"]}
    shapes = ("--num-draft-tokens 3", "--num-draft-tokens 5", "--tree dynamic:10-7-60")
    assert set(drafts) == set(shapes)
    # The plan is for the default, a chain of 3. Mixtures have only lower bounds.
    assert drafts[shapes[0]]["low_seconds"] == row["floor_seconds"] and row["step"] is None
    times = [drafts[shape]["low_seconds"] for shape in shapes]
    assert times == sorted(times) and len(set(times)) == 3
    assert row["drafts"][0]["gain"] == max(draft["gain"] for draft in row["drafts"])
    assert plan.main([*flags, "--num-draft-tokens", "3"]) == 0
    assert "draft with" not in capsys.readouterr().out


def test_a_folder_that_cannot_be_is_refused_before_anything_is_compiled(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    flags = ["--target", "tiny/draft", "--topology", "v5e:1x1", "--dump", str(tmp_path / "file")]
    assert plan.main(flags) == 2
    assert "file', which is a file: choose another path." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("--topology v5e:2x2 --draft what", "--draft is what"),
        ("--topology v5e:2x2 --mesh model=8", "8 devices and there are 4"),
        ("--topology v5e:2x2 --batch 0", "--batch is 0"),
        ("--topology v5e:2x2 --batch " + "9" * 5000, "expected a whole number from 1"),
        ("--topology v5e:2x" + "9" * 5000, "expected v"),
        ("--topology v5e:2x2 --batch 3 --mesh data=2", "3 rows"),
        ("--draft none", "required"),
    ],
)
def test_bad_input_gets_a_sentence(capsys, flags, sentence):
    assert plan.main(["--target", "tiny/draft", *flags.split()]) == 2
    assert sentence in capsys.readouterr().err


def test_what_is_traced_for_a_slice_has_its_chunks_and_slots():
    model = transformer.language_model(TINY)
    assert chunk_of(64) == 64 and slots(model.init_cache(1, 200)) == 256
    with jax.set_mesh(parse_mesh("model=1", topology("v5e:1x1").devices)):
        assert chunk_of(64) == 512
        short, long = (jax.eval_shape(lambda n=n: model.init_cache(1, n)) for n in (200, 1200))
    # The attention kernel reads 1,280 slots.
    assert slots(short) == 200 and slots(long) == 1280


def test_a_conversion_is_planned_in_its_own_dtype(tmp_path):
    hub.convert("tiny/draft", tmp_path / "draft8", dtype="int8")
    assert (
        plan._read_target(str(tmp_path / "draft8"))[1] == "int8"
        and plan._read_target("tiny/draft")[1] == "bfloat16"
    )


def test_a_draft_that_can_never_pay_is_named():
    seconds = lambda low, high: {"low_seconds": low, "high_seconds": high}  # noqa: E731
    estimate = SimpleNamespace(step=seconds(5e-5, 9e-5), autoregressive_step=seconds(1e-5, 1e-5))
    rows = dict(plan._step_rows(estimate, batch=1, max_depth=3))
    assert rows["a draft pays above tau"] == "5.00 to 9.00: never, since a step gives at most 4 tokens"
    assert rows["a step, estimated"] == "0.05 to 0.09 ms"
