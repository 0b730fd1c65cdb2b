"""Reference models in PyTorch transformers, with eager attention in float32."""

import contextlib
import dataclasses
import os
import warnings

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mars_jax.core.types import Visible
from mars_jax.hub.pretrained import Pretrained
from mars_jax.models import ModelConfig

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@contextlib.contextmanager
def third_party():
    """Ignore warnings of torch and transformers, which this project cannot fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        warnings.simplefilter("ignore", UserWarning)
        yield


def random_torch_model(config, seed: int = 0):
    """Return a torch model of a transformers config with random parameters."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # these models are too small for several threads
    torch.manual_seed(seed)
    with third_party():
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    return randomize(model)


def randomize(model):
    """Draw all parameters of a torch model at random, so that none stays at ones or zeros."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            noise *= 0.2 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
            parameter.copy_(noise + 1 if "norm" in name else noise)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.2 * torch.randn_like(buffer))
    return model.eval()


def layer_settings(config: ModelConfig) -> dict:
    """Return the settings of transformers' Llama and Qwen3 layers that match a config."""
    rope = {"rope_type": "default", "rope_theta": config.rope.theta}
    if config.rope.kind == "llama3":
        rope |= {"rope_type": "llama3", "factor": config.rope.factor}
        rope |= {"original_max_position_embeddings": config.rope.original_max_positions}
        rope |= {
            "low_freq_factor": config.rope.low_freq_factor,
            "high_freq_factor": config.rope.high_freq_factor,
        }
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_eps,
        "attention_bias": config.qkv_bias,
        "rope_parameters": rope,
        "attn_implementation": "eager",
    }


def save_torch(model, directory) -> None:
    with third_party():
        model.save_pretrained(directory)


def load_torch(directory):
    import torch
    from transformers import AutoModelForCausalLM

    with third_party():
        model = AutoModelForCausalLM.from_pretrained(
            directory, attn_implementation="eager", dtype=torch.float32
        )
    return model.eval()


def torch_logits(model, tokens: np.ndarray) -> np.ndarray:
    import torch

    with torch.no_grad(), third_party():
        return model(torch.tensor(tokens, dtype=torch.int64), use_cache=False).logits.float().numpy()


def read_again(model, tokens: np.ndarray, continuation: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits of `tokens`, and the likeliest token after them and after each prefix of `continuation`.

    By induction over its tokens, `continuation` is the greedy one exactly if it equals these.
    """
    logits = torch_logits(model, np.concatenate([tokens, continuation], axis=1))
    n = tokens.shape[1]
    return logits[:, :n], logits[:, n - 1 : -1].argmax(-1)


def logits_and_greedy(checkpoint: Pretrained, tokens: np.ndarray, count: int, lengths=None):
    """Return the logits f32[B, N, V] of a prompt, and `count` greedy tokens decoded through the cache one by one.

    Row b decodes from its first `lengths[b]` tokens, by default all.
    """
    model = checkpoint.model
    batch, n = tokens.shape
    slots = n + count
    lengths = jnp.asarray([n] * batch if lengths is None else lengths, jnp.int32)

    @jax.jit
    def program(params, tokens):
        start = jnp.zeros((batch,), jnp.int32)
        visible = dataclasses.replace(Visible.causal(start, n), count=lengths)
        out = model.forward(params, tokens, visible, model.init_cache(batch, slots))
        logits = model.unembed(params, out.hidden)

        def body(carry, step):
            cache, token = carry
            start = lengths + step
            out = model.forward(params, token, Visible.causal(start, 1), cache)
            following = jnp.argmax(model.unembed(params, out.hidden), axis=-1).astype(jnp.int32)
            return (out.cache, following), token[:, 0]

        last = jnp.take_along_axis(logits, lengths[:, None, None] - 1, axis=1)
        first = jnp.argmax(last, axis=-1).astype(jnp.int32)
        _, greedy = lax.scan(body, (out.cache, first), jnp.arange(count, dtype=jnp.int32))
        return logits, greedy.T

    logits, greedy = program(checkpoint.params, jnp.asarray(tokens, jnp.int32))
    return np.asarray(logits), np.asarray(greedy)
