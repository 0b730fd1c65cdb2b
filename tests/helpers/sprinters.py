"""Models and weights of SPRINTER."""

import jax.numpy as jnp
import numpy as np

from mars_jax import contrib
from mars_jax.core import fake
from mars_jax.core.types import Params

VOCAB, BUFFER, MOST = 13, 48, 6
SMALL = fake.hash_model(vocab_size=VOCAB, seed=5, agree=0.9)
# The fake model's hidden state is a hash, uniform in [0, 2 ** 32), so this bound accepts three quarters of the tokens.
SURE_BELOW = 0.75 * 2**32
WEIGHT, BIAS = np.float32(-1e-7), np.float32(1e-7 * SURE_BELOW)


def weights(threshold):
    return Params(
        (), contrib.SprinterParams((), jnp.full((1,), WEIGHT), jnp.asarray(BIAS), np.float32(threshold))
    )
