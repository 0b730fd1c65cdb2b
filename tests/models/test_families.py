"""Every family, compared with the logits and greedy tokens of the same checkpoint in PyTorch transformers."""

import jax
import numpy as np
import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.core.types import NO_TOKEN
from mars_jax.drafters.asked import LoadedDrafter
from mars_jax.drafters.eagle import eagle
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.models.heads import init_params as init_head
from tests.helpers import mtp, slow_but, transformers_oracle

pytest.importorskip("transformers")

PROMPT, NEW = 12, 64
VOCAB = 61
BASE = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 44, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}


def rope(kind, **fields):
    """Return rope parameters whose trained length, 32, is far exceeded by the 76 decoded tokens."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, "factor": 4.0, **fields}}


TRAINED = {"original_max_position_embeddings": 32}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
MISTRAL = BASE | {"num_hidden_layers": 3}
ALTERNATING = {"use_sliding_window": True, "sliding_window": 7, "num_hidden_layers": 3}
FULL_IN_THE_MIDDLE = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
SHARED = {"shared_expert_intermediate_size": 28}
ONE_OF_FOUR = {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
NO_CAPS = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
# Caps that the scores and logits of these models reach, and a query scalar that differs from head_dim.
GEMMA = MISTRAL | {"head_dim": 12, "sliding_window": 7, "query_pre_attn_scalar": 24}
ROPES = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}

MULTIPLIERS = {"embedding_multiplier": 3.0, "residual_multiplier": 0.22, "attention_multiplier": 0.3}
MULTIPLIERS |= {"logits_scaling": 0.7}
GROWTH = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.5}
LONGROPE = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.5, 4.0, 9.0], "partial_rotary_factor": 0.75}
PHI4_MINI = {
    "pad_token_id": 0,
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 1000.0, **LONGROPE},
}
OLMO3_ROPES = {
    "full_attention": rope("yarn", original_max_position_embeddings=32)["rope_parameters"],
    "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
}

# Experts whose gates and ups reach the limit.
GPT_OSS = {"num_local_experts": 8, "num_experts_per_tok": 3, "swiglu_limit": 0.4, "swiglu_alpha": 1.5}
GPT_OSS |= {"head_dim": 12, "sliding_window": 7}
SIGMOID_ROUTER = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20}
SIGMOID_ROUTER |= {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "n_shared_experts": 2}
SIGMOID_ROUTER |= {"first_k_dense_replace": 1}
LATENT = {
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
}
LATENT |= {"num_key_value_heads": 4}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 12, "head_dim": 16, "num_hidden_layers": 3}
LINEAR |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
QUARTER = {
    "rope_type": "default",
    "rope_theta": 1000.0,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
}

TIED = {"tie_word_embeddings": True}
CASES = {
    "llama, tied, one shared key-value head": ("Llama", BASE | TIED | {"num_key_value_heads": 1}),
    "llama, every bias": ("Llama", BASE | {"attention_bias": True, "mlp_bias": True, "head_dim": 12}),
    "llama, gelu": ("Llama", BASE | {"hidden_act": "gelu", "rms_norm_eps": 1e-3}),
    "llama 3.1": ("Llama", BASE | rope("llama3", **TRAINED, **BANDS)),
    "llama, yarn, every field": (
        "Llama",
        BASE | rope("yarn", **TRAINED, attention_factor=1.2, beta_fast=4.0, beta_slow=2.0, truncate=False),
    ),
    "mistral, window": ("Mistral", MISTRAL | {"sliding_window": 8}),
    "qwen2, windows from layer 1 on": ("Qwen2", BASE | ALTERNATING | {"max_window_layers": 1}),
    "qwen2.5, yarn": ("Qwen2", BASE | rope("yarn", **TRAINED)),
    "qwen3": ("Qwen3", BASE | {"head_dim": 16}),
    "qwen3, tied, biases": ("Qwen3", BASE | TIED | {"head_dim": 6, "attention_bias": True}),
    "mixtral": ("Mixtral", BASE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mixtral, window": (
        "Mixtral",
        MISTRAL | {"num_local_experts": 8, "num_experts_per_tok": 1, "sliding_window": 8},
    ),
    "qwen2 moe, shared expert": ("Qwen2Moe", BASE | EXPERTS | SHARED),
    "qwen2 moe, windows, one dense layer": (
        "Qwen2Moe",
        BASE
        | EXPERTS
        | ALTERNATING
        | SHARED
        | {"mlp_only_layers": [1], "qkv_bias": False, "norm_topk_prob": True},
    ),
    "qwen3 moe, weights sum to 1": ("Qwen3Moe", BASE | EXPERTS | {"head_dim": 16, "norm_topk_prob": True}),
    "qwen3 moe, one layer of four": ("Qwen3Moe", BASE | EXPERTS | ALTERNATING | ONE_OF_FOUR),
    "qwen3.5": ("Qwen3_5Text", BASE | LINEAR | {"rope_parameters": QUARTER}),
    "qwen3.5 moe": ("Qwen3_5MoeText", BASE | LINEAR | EXPERTS | SHARED | {"rope_parameters": QUARTER}),
    "qwen3 next, one dense layer": ("Qwen3Next", BASE | LINEAR | EXPERTS | SHARED | {"mlp_only_layers": [1]}),
    "ministral3": ("Ministral3", BASE | {"head_dim": 12} | rope("yarn", **TRAINED, **GROWTH)),
    "ministral3, window": ("Ministral3", MISTRAL | {"sliding_window": 8} | rope("yarn", **TRAINED, **GROWTH)),
    "phi3, window": ("Phi3", MISTRAL | {"sliding_window": 8, "pad_token_id": 0}),
    "phi4 mini, partial longrope, long": (
        "Phi3",
        BASE | TIED | PHI4_MINI | {"original_max_position_embeddings": 4},
    ),
    "phi3, longrope, short": ("Phi3", BASE | PHI4_MINI | {"original_max_position_embeddings": 128}),
    "glm": ("Glm", BASE | {"head_dim": 12, "pad_token_id": 0}),
    "glm4": ("Glm4", BASE | {"head_dim": 16, "attention_bias": False, "pad_token_id": 0}),
    "glm4 moe, groups": (
        "Glm4Moe",
        MISTRAL | SIGMOID_ROUTER | {"head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    ),
    "deepseek v3, groups, yarn": (
        "DeepseekV3",
        MISTRAL | LATENT | SIGMOID_ROUTER | rope("yarn", **TRAINED, mscale=0.7, mscale_all_dim=0.9),
    ),
    "deepseek v3, whole queries, halves rotated": (
        "DeepseekV3",
        BASE | LATENT | SIGMOID_ROUTER | {"q_lora_rank": None, "rope_interleave": False},
    ),
    "smollm3, biases": (
        "SmolLM3",
        MISTRAL | {"no_rope_layer_interval": 2, "attention_bias": True, "mlp_bias": True, "pad_token_id": 0},
    ),
    "smollm3, windows in nope layers": (
        "SmolLM3",
        MISTRAL
        | {"no_rope_layers": [0, 1, 1], "use_sliding_window": True, "sliding_window": 7, "pad_token_id": 0},
    ),
    "llama, dynamic ntk": ("Llama", BASE | rope("dynamic")),
    "granite, every multiplier": (
        "Granite",
        BASE | TIED | MULTIPLIERS | {"attention_bias": True, "mlp_bias": True},
    ),
    "olmo2": ("Olmo2", BASE | {"attention_bias": True, "rms_norm_eps": 1e-3}),
    "olmo3, yarn in full layers": (
        "Olmo3",
        MISTRAL | FULL_IN_THE_MIDDLE | {"sliding_window": 7, "rope_parameters": OLMO3_ROPES},
    ),
    "gpt-oss": ("GptOss", MISTRAL | GPT_OSS | rope("yarn", **TRAINED, truncate=False)),
    "gpt-oss, one expert, only windows, no biases": (
        "GptOss",
        BASE
        | GPT_OSS
        | {"layer_types": ["sliding_attention"] * 2, "num_experts_per_tok": 1, "attention_bias": False},
    ),
    "gemma2, caps": ("Gemma2", GEMMA | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.5}),
    "gemma2, no caps": ("Gemma2", GEMMA | NO_CAPS | {"attention_bias": True, "tie_word_embeddings": False}),
    "gemma3, two ropes": ("Gemma3Text", GEMMA | FULL_IN_THE_MIDDLE | {"rope_parameters": ROPES}),
    "gemma3, pattern of six": (
        "Gemma3Text",
        GEMMA | {"num_hidden_layers": 7, "final_logit_softcapping": 2.5},
    ),
}
SLOW = (
    "llama, gelu", "qwen3, tied, biases", "mixtral, window", "qwen3 moe, weights sum to 1", "gemma2, no caps",
    "gemma3, pattern of six", "phi3, longrope, short", "qwen2 moe, shared expert", "smollm3, biases", "ministral3",
    "gpt-oss, one expert, only windows, no biases",
    "deepseek v3, whole queries, halves rotated", "qwen3.5 moe", "qwen3 moe, one layer of four", "glm4 moe, groups",
)  # fmt: skip
"""The fast cases have every layer and every kind of rope, window, bias and cap once."""
IN_TIME = [name for name in CASES if name not in SLOW]


def transformers_config(family, fields):
    import transformers

    with transformers_oracle.third_party():
        return getattr(transformers, f"{family}Config")(**fields, bos_token_id=1, eos_token_id=2)


def saved(config, path):
    """Save a random torch model of a transformers config; return it and its checkpoint in this package."""
    model = transformers_oracle.random_torch_model(config)
    transformers_oracle.save_torch(model, path)
    return model, hub.load(path)


def assert_close(logits, expected):
    # 1e-4: float32 products summed in another order; a wrong term would differ by 1e-2 or more.
    np.testing.assert_allclose(logits, expected, atol=1e-4, rtol=0)


PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (2, PROMPT))


@pytest.mark.parametrize("name", slow_but(CASES, *IN_TIME))
def test_logits_and_greedy_tokens_equal_those_of_transformers(name, tmp_path):
    """Decode a ragged batch, whose rows transformers reads one at a time."""
    model, checkpoint = saved(transformers_config(*CASES[name]), tmp_path)
    lengths = (PROMPT, 5)
    padded = np.where(np.arange(PROMPT) < np.asarray(lengths)[:, None], PROMPTS, NO_TOKEN)
    logits, greedy = transformers_oracle.logits_and_greedy(checkpoint, padded, NEW, lengths)
    assert np.isfinite(logits).all()
    for b, length in enumerate(lengths):
        expected, continuation = transformers_oracle.read_again(
            model, PROMPTS[b : b + 1, :length], greedy[b : b + 1]
        )
        assert_close(logits[b, :length], expected[0])
        np.testing.assert_array_equal(greedy[b], continuation[0])
    torch = pytest.importorskip("torch")
    entered = model.get_input_embeddings()(torch.tensor(PROMPTS)).detach().numpy()
    entered = entered * getattr(model.config, "embedding_multiplier", 1.0)  # Granite's model multiplies later
    np.testing.assert_allclose(checkpoint.model.embed(checkpoint.params, PROMPTS), entered, rtol=1e-6)


@pytest.mark.parametrize("name", slow_but(CASES, *IN_TIME))
def test_transformers_loads_what_was_loaded_and_saved(name, tmp_path):
    model, checkpoint = saved(transformers_config(*CASES[name]), tmp_path / "theirs")
    hub.save(tmp_path / "ours", checkpoint.config, checkpoint.params)
    assert hub.read_config(tmp_path / "ours") == checkpoint.config
    # Exact equality: the same numbers in the same order.
    actual = transformers_oracle.torch_logits(transformers_oracle.load_torch(tmp_path / "ours"), PROMPTS)
    np.testing.assert_array_equal(actual, transformers_oracle.torch_logits(model, PROMPTS))


def test_the_text_model_of_mistral_3_with_images_is_loaded(tmp_path):
    text = transformers_config(*CASES["ministral3"])
    vision = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 8,
        "head_dim": 8,
    }
    vision |= {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16}
    fields = {"text_config": text, "vision_config": vision, "tie_word_embeddings": False}
    import transformers

    with transformers_oracle.third_party():
        model = transformers.Mistral3ForConditionalGeneration(transformers_config("Mistral3", fields))
    transformers_oracle.save_torch(transformers_oracle.randomize(model), tmp_path)
    logits, _ = transformers_oracle.logits_and_greedy(hub.load(tmp_path), PROMPTS, 1)
    assert_close(logits, transformers_oracle.torch_logits(model, PROMPTS))


@pytest.mark.parametrize("kind", slow_but(["qwen3.5", "qwen3.5 moe"], "qwen3.5 moe"))
def test_the_text_model_of_qwen_3_5_with_images_and_a_draft_module_is_loaded(kind, tmp_path):
    """The published files store the experts of a layer together, as in PyTorch; transformers splits them."""
    from safetensors.numpy import save_file

    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 8}
    vision |= {"out_hidden_size": 32, "num_position_embeddings": 4}
    text, family = transformers_config(*CASES[kind]), CASES[kind][0].removesuffix("Text")
    config = transformers_config(family, {"text_config": text.to_dict(), "vision_config": vision})
    import torch
    import transformers

    torch.manual_seed(0)  # with some weights, PyTorch's float32 is 1.2e-4 from float64
    with transformers_oracle.third_party():
        model_class = getattr(transformers, f"{family}ForConditionalGeneration")
        model = transformers_oracle.randomize(model_class(config))
    transformers_oracle.save_torch(model, tmp_path)
    tensors = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    assert any(name.endswith(".experts.gate_up_proj") for name in tensors) == (kind == "qwen3.5 moe")
    save_file(tensors | {"mtp.fc.weight": np.ones((2, 2))}, tmp_path / "model.safetensors")
    logits, _ = transformers_oracle.logits_and_greedy(hub.load(tmp_path), PROMPTS, 1)
    assert_close(logits, transformers_oracle.torch_logits(model, PROMPTS))


def test_the_text_model_of_gemma_3_with_images_is_loaded(tmp_path):
    text = transformers_config("Gemma3Text", GEMMA | FULL_IN_THE_MIDDLE | {"rope_parameters": ROPES})
    vision = {"num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
    media = {"vision_config": vision | {"hidden_size": 16, "intermediate_size": 16}, "mm_tokens_per_image": 4}
    special = {"image_token_index": 61, "boi_token_index": 62, "eoi_token_index": 63}
    config = transformers_config("Gemma3", {"text_config": text, **media, **special})
    model, checkpoint = saved(config, tmp_path)
    logits, greedy = transformers_oracle.logits_and_greedy(checkpoint, PROMPTS, 16)
    expected, continuation = transformers_oracle.read_again(model, PROMPTS, greedy)
    assert_close(logits, expected)
    np.testing.assert_array_equal(greedy, continuation)


NEW_FAMILIES = (
    "qwen2 moe, windows, one dense layer", "ministral3, window", "phi3, window", "phi4 mini, partial longrope, long",
    "glm", "glm4", "glm4 moe, groups", "deepseek v3, groups, yarn", "smollm3, windows in nope layers",
    "granite, every multiplier", "olmo2", "olmo3, yarn in full layers", "gpt-oss",
)  # fmt: skip
RECURRENT = ("qwen3.5", "qwen3.5 moe", "qwen3 next, one dense layer")


def drafter_of(kind, target, model_path):
    if kind == "model":
        return mj.drafters.load(f"model:{model_path}", target, num_draft_tokens=3)
    if kind == "eagle":
        head = EagleConfig.outline(target.config)
        return LoadedDrafter(eagle(head, target.model, 3), init_head(head, jax.random.key(0), scale=0.3))
    return kind


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [None, "data=2,model=2"])
@pytest.mark.parametrize("name", [*NEW_FAMILIES, *RECURRENT])
def test_drafts_of_every_kind_change_no_token(name, mesh, tmp_path):
    """Decode three prompts of different lengths in two rows, so that one row refills."""
    config = transformers_config(*CASES[name])
    model, _ = saved(config, tmp_path / "target")
    kinds, draft_config = ["none", "ngram", "model", "eagle"], config
    if name in RECURRENT:
        # A draft model has attention in every layer.
        draft_config = transformers_config(*CASES["qwen3"])
        mtp.add_module(tmp_path / "target")
        kinds.append("mtp")
    draft = transformers_oracle.random_torch_model(draft_config, seed=1)
    transformers_oracle.save_torch(draft, tmp_path / "draft")
    target = hub.load(tmp_path / "target", mesh=mesh)
    prompts = [PROMPTS[0].tolist(), PROMPTS[1, :5].tolist(), PROMPTS[1].tolist()]
    for kind in kinds:
        drafter = drafter_of(kind, target, tmp_path / "draft")
        result = mj.generate(
            target,
            drafter,
            prompts,
            temperature=0.0,
            max_new_tokens=NEW,
            batch_size=2,
            verify=mj.verify.exact(),
        )
        for ids, tokens in zip(prompts, result.tokens, strict=True):
            _, expected = transformers_oracle.read_again(model, np.asarray([ids]), np.asarray([tokens]))
            assert list(tokens) == expected[0].tolist(), kind
            assert 2 not in tokens[:-1] and (tokens[-1] == 2 or len(tokens) == NEW), kind
