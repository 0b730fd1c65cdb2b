"""Full-size shapes of the heads that docs/heads.md lists as loadable, compared with those that the loader expects.

Sources of the layouts: SafeAILab/EAGLE `cnets.py`, sgl-project/SpecForge and vllm-project/speculators.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from mars_jax.hub.heads.eagle_files import canonical, from_head_json
from mars_jax.lab.planning.outlined_models import CONFIGS

PAGE = (Path(__file__).parents[2] / "docs" / "heads.md").read_text()
DRAFTED = 32000


class Head(NamedTuple):
    target: str
    layout: str
    inner: int  # width of the MLP
    heads: tuple[int, int]  # query heads, key-value heads
    width: int = 128  # of a head
    joined_norm: bool = False  # a norm over the joined features
    feature_layers: tuple[int, ...] = ()  # stated in config.json; (): the usual ones


LLAMA8, LLAMA70 = (32, 8), (64, 8)
HEADS = {
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Head("llama-3.1-8b", "eagle3", 14336, LLAMA8),
    "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": Head("llama-3.1-8b", "eagle3", 14336, LLAMA8),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": Head("llama-3.3-70b", "eagle3", 28672, LLAMA70),
    "yuhuili/EAGLE3-Vicuna1.3-13B": Head("vicuna-13b", "eagle3", 13824, (40, 40)),
    "yuhuili/EAGLE-Vicuna-13B-v1.3": Head("vicuna-13b", "eagle1", 13824, (40, 40)),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": Head("llama-3.1-8b", "eagle1", 14336, LLAMA8),
    "AngelSlim/Qwen3-8B_eagle3": Head("qwen3-8b", "eagle3", 12288, LLAMA8),
    "AngelSlim/Qwen3-32B_eagle3": Head("qwen3-32b", "eagle3", 25600, LLAMA70),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": Head("llama-3.1-8b", "speculators", 14336, LLAMA8),
    "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3": Head("llama-3.3-70b", "speculators", 28672, LLAMA70),
    "RedHatAI/Qwen3-8B-speculator.eagle3": Head("qwen3-8b", "speculators", 12288, LLAMA8),
    "RedHatAI/Qwen3-32B-speculator.eagle3": Head("qwen3-32b", "speculators", 25600, LLAMA70),
    "RedHatAI/Qwen3-235B-A22B-speculator.eagle3": Head("qwen3-235b-a22b", "speculators", 12288, (64, 4)),
    "RedHatAI/gpt-oss-20b-speculator.eagle3": Head(
        "gpt-oss-20b", "speculators", 2880, LLAMA70, width=64, joined_norm=True
    ),
    "lmsys/EAGLE3-gpt-oss-120b-bf16": Head(
        "gpt-oss-120b", "eagle3", 17280, LLAMA70, width=64, feature_layers=(1, 17, 33)
    ),
}


def shapes(head: Head, wide: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Return the tensor shapes of a head's layout, as the code of that layout defines them."""
    new = head.layout != "eagle1"
    queries, groups = (head.width * n for n in head.heads)
    layer = {
        "self_attn.q_proj": (queries, wide * (1 + new)),
        "self_attn.k_proj": (groups, wide * (1 + new)),
        "self_attn.v_proj": (groups, wide * (1 + new)),
        "self_attn.o_proj": (wide, queries),
        "mlp.gate_proj": (head.inner, wide),
        "mlp.up_proj": (head.inner, wide),
        "mlp.down_proj": (wide, head.inner),
        "post_attention_layernorm": (wide,),
    }
    tensors = {"fc.weight": (wide, wide * (3 if new else 2))}
    if new:
        layer |= {"hidden_norm": (wide,), "input_layernorm": (wide,)}
        tensors |= {"norm.weight": (wide,), "lm_head.weight": (DRAFTED, wide)}
        if vocab != DRAFTED:
            tensors |= {"d2t": (DRAFTED,), "t2d": (vocab,)}
    else:
        tensors |= {"fc.bias": (wide,)}
    if head.joined_norm:
        tensors["input_norm.weight"] = (3 * wide,)
    if head.layout != "eagle3":
        tensors["embed_tokens.weight"] = (vocab, wide)
    name = "midlayer" if head.layout == "eagle3" else "layers.0"
    return tensors | {f"{name}.{key}.weight": shape for key, shape in layer.items()}


def config_json(head: Head, wide: int, vocab: int) -> dict[str, Any]:
    """Return the fields of the head's config.json."""
    queries, groups = head.heads
    layer = {"model_type": "llama", "vocab_size": vocab, "hidden_size": wide, "rms_norm_eps": 1e-5}
    layer |= {"intermediate_size": head.inner, "num_hidden_layers": 1, "head_dim": head.width}
    layer |= {"num_attention_heads": queries, "num_key_value_heads": groups}
    if head.layout == "speculators":
        fields = {"norm_before_residual": True, "draft_vocab_size": DRAFTED, "target_hidden_size": None}
        fields |= {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3"}
        fields |= {"norm_before_fc": head.joined_norm}
        return fields | {"transformer_layer_config": layer}
    if head.layout == "eagle3":
        fields = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFTED}
        return (
            layer | fields | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(head.feature_layers)}}
        )
    return layer | {"architectures": ["LlamaForCausalLM"], "bias": True}


@pytest.mark.parametrize("name", HEADS)
def test_a_head_of_the_page_fits_its_target(name):
    head, target = HEADS[name], CONFIGS[HEADS[name].target]
    wide, vocab = target.hidden_size, target.vocab_size
    published = {canonical(key): shape for key, shape in shapes(head, wide, vocab).items()}
    config = from_head_json(config_json(head, wide, vocab), published, target)
    table = {canonical(row.name): row.shape for row in config.weights()}
    assert table == {key: shape for key, shape in published.items() if key not in ("d2t", "t2d")}
    count = target.num_layers
    usual = () if config.version == 1 else (1, count // 2 - 1, count - 4)
    assert config.feature_layers == (head.feature_layers or usual)


@pytest.mark.parametrize("drafted", [DRAFTED, 201088])
def test_a_head_of_nvidia_may_read_the_last_layer_and_draft_from_the_whole_vocabulary(drafted):
    """The fields are those that NVIDIA's Model Optimizer exports."""
    head, target = Head("gpt-oss-120b", "eagle3", 17280, LLAMA70, width=64), CONFIGS["gpt-oss-120b"]
    published = {canonical(key): shape for key, shape in shapes(head, 2880, 201088).items()}
    published["lm_head.weight"] = (drafted, 2880)
    if drafted == 201088:
        published = {key: shape for key, shape in published.items() if key not in ("d2t", "t2d")}
    settings = {"use_aux_hidden_state": True, "use_input_layernorm_in_first_layer": True}
    settings |= {"use_last_layernorm": True, "use_mtp_layernorm": False, "next_layer_regular": True}
    settings["eagle_aux_hidden_state_layer_ids"] = [23, 29, 35]
    fields = config_json(head, 2880, 201088) | {"draft_vocab_size": drafted, "eagle_config": settings}
    config = from_head_json(fields, published, target)
    assert (config.feature_layers, config.draft_vocab_size) == ((23, 29, 35), drafted)


def test_the_page_names_these_heads():
    rows = [line for line in PAGE.splitlines() if line.startswith("| `") and "| yes |" in line]
    named = {re.findall(r"`([^`]+/[^`]+)`", line)[-1] for line in rows}
    assert named >= set(HEADS)
