"""The losses, against torch and against the model that decodes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from mars_jax.contrib.teaching import predict
from mars_jax.lab.training.objectives import forward_kl, total_variation
from mars_jax.models import ModelConfig, init_params
from mars_jax.models.transformer import language_model

CONFIG = ModelConfig(
    vocab_size=29,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    tie_embeddings=True,
)


def two_logits():
    keys = jax.random.split(jax.random.key(0))
    return tuple(jax.random.normal(k, (2, 5, 29)) * 3 for k in keys)


def test_losses_and_their_gradients_are_those_of_torch():
    p, q = two_logits()
    torch = pytest.importorskip("torch")
    tp, tq = (torch.tensor(np.asarray(x), requires_grad=True) for x in (p, q))
    log_p, log_q = torch.log_softmax(tp.detach(), -1), torch.log_softmax(tq, -1)
    theirs = {
        "kl": torch.nn.functional.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1),
        "tv": 0.5 * (log_p.exp() - log_q.exp()).abs().sum(-1),
    }
    ours = {
        "kl": lambda q: forward_kl(p, q),
        "tv": lambda q: total_variation(p, q),
    }
    for name, value in theirs.items():
        np.testing.assert_allclose(ours[name](q), value.detach().numpy(), rtol=1e-5, atol=1e-5, err_msg=name)
        [gradient] = torch.autograd.grad(value.sum(), tq, retain_graph=True)
        mine = jax.grad(lambda q, name=name: jnp.sum(ours[name](q)))(q)
        np.testing.assert_allclose(mine, gradient.numpy(), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.slow
def test_a_document_is_read_as_if_it_stood_alone():
    model, params = language_model(CONFIG), init_params(CONFIG, jax.random.key(2), scale=0.3)
    tokens = jax.random.randint(jax.random.key(3), (1, 12), 0, 29, dtype=jnp.int32)
    segments = jnp.asarray([[0] * 5 + [1] * 7], jnp.int32)
    packed = predict(model, params, tokens, segments)
    for part in (slice(0, 5), slice(5, 12)):
        alone = predict(model, params, tokens[:, part], segments[:, part] * 0)
        # Rotary embeddings are relative: where a document begins changes nothing.
        np.testing.assert_allclose(packed[:, part], alone, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_gradients_reach_every_weight_and_agree_in_both_dtypes():
    tokens = jax.random.randint(jax.random.key(3), (2, 9), 0, 29, dtype=jnp.int32)
    segments = jnp.zeros((2, 8), jnp.int32)

    def loss(params, dtype):
        low = jax.tree.map(lambda x: x.astype(dtype), params)
        logits = predict(language_model(CONFIG, dtype=dtype), low, tokens[:, :-1], segments)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))

    params = init_params(CONFIG, jax.random.key(2), scale=0.3)
    full, half = (jax.grad(loss)(params, dtype) for dtype in ("float32", "bfloat16"))
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(full), jax.tree.leaves(half), strict=True):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype == jnp.float32, name
        assert float(jnp.linalg.norm(a)) > 0, name
        assert float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a)) < 0.1, name
    # A finite difference along the gradient.
    step = 1e-2 / float(jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(full))))
    moved = [jax.tree.map(lambda p, g, s=s: p + s * step * g, params, full) for s in (1, -1)]
    slope = (loss(moved[0], "float32") - loss(moved[1], "float32")) / (2 * step)
    np.testing.assert_allclose(slope, sum(float(jnp.sum(g**2)) for g in jax.tree.leaves(full)), rtol=2e-2)
