"""Tests of the losses, against torch, and of `predict` on packed documents."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.contrib.teaching import predict
from mars_jax.lab.training.objectives import forward_kl, total_variation
from mars_jax.models import ModelConfig, init_params
from mars_jax.models.transformer import language_model

CONFIG = ModelConfig(
    vocab_size=29, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2
)


def test_losses_and_their_gradients_are_those_of_torch():
    p, q = (3 * jax.random.normal(key, (2, 5, 29)) for key in jax.random.split(jax.random.key(0)))
    torch = pytest.importorskip("torch")
    tp, tq = (torch.tensor(np.asarray(x), requires_grad=True) for x in (p, q))
    log_p, log_q = torch.log_softmax(tp.detach(), -1), torch.log_softmax(tq, -1)
    torch_losses = {
        "kl": torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1),
        "tv": 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1),
    }
    losses = {"kl": forward_kl, "tv": total_variation}
    for name, value in torch_losses.items():
        divergence = functools.partial(losses[name], p)
        np.testing.assert_allclose(divergence(q), value.detach().numpy(), rtol=1e-5, atol=1e-5, err_msg=name)
        [gradient] = torch.autograd.grad(value.sum(), tq, retain_graph=True)
        vjp_gradient = jax.vjp(divergence, q)[1](jnp.ones((2, 5)))[0]
        np.testing.assert_allclose(vjp_gradient, gradient.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_document_is_read_as_if_it_stood_alone():
    model, params = language_model(CONFIG), init_params(CONFIG, jax.random.key(2), scale=0.3)
    tokens = jax.random.randint(jax.random.key(3), (1, 12), 0, 29, dtype=jnp.int32)
    segments = jnp.asarray([[0] * 5 + [1] * 7], jnp.int32)
    packed = predict(model, params, tokens, segments)
    for part in (slice(0, 5), slice(5, 12)):
        separate = predict(model, params, tokens[:, part], segments[:, part] * 0)
        # Rotary embeddings are relative, so the start of a document has no effect.
        np.testing.assert_allclose(packed[:, part], separate, rtol=1e-4, atol=1e-4)
