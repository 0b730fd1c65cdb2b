"""Models and weights of cascades."""

import numpy as np

from mars_jax import contrib
from mars_jax.core import fake
from mars_jax.core.types import Params

VOCAB, BUFFER, K, MOST = 13, 40, 3, 12
PROXY = fake.hash_model(vocab_size=VOCAB, seed=3, agree=0.92, scale=4.0)
SMALL = fake.hash_model(vocab_size=VOCAB, seed=5, agree=0.9)


def weights(margin):
    numbers = tuple(np.float32(x) for x in margin) if isinstance(margin, tuple) else np.float32(margin)
    return Params((), contrib.CascadeParams((), (), numbers))
