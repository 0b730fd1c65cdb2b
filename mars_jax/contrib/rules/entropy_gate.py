"""A relaxed rule based on entropy. B batch, N nodes. Tested against scipy's entropy, in tests/verify/test_edges.py."""

from __future__ import annotations

from typing import Any

from jax import Array

from mars_jax.core import struct
from mars_jax.core.sampling import entropy as entropy_of
from mars_jax.verify import Evidence, Range, Relaxed, register
from mars_jax.verify.relaxed import over

# Thresholds that `calibrate` and `benchmark` try, from strict to loose.
ENTROPIES = (4.0, 3.5, 3.0, 2.5, 2.0, 1.75, 1.5, 1.25, 1.0, 0.8, 0.6, 0.4, 0.2)


@register("entropy_gate", paper="after 2511.22972")
@struct.dataclass(kw_only=True)
class EntropyGate(Relaxed):
    """Also accept the runner-up if the target's entropy is high.

    The runner-up is accepted if the entropy of the target's distribution at temperature 1 exceeds `entropy` nats.

    The rule is based on the gate of FLy (arXiv 2511.22972), but it uses the entropy of the whole distribution and no
    window. It is lossy. With entropy = inf, it equals `base` bit for bit.

    >>> import jax
    >>> import jax.numpy as jnp
    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.log(jnp.asarray([[[0.2, 0.45, 0.35], [0.1, 0.8, 0.1]]]))  # entropies of 1.05 and 0.64
    >>> evidence = verify.evidence(chain(jnp.asarray([[0, 2]], jnp.int32)), z)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 1)(evidence)[0].num_accepted[0])
    >>> [int(accepted(EntropyGate(entropy=h))) for h in (1.1, 1.0)]
    [0, 1]
    """

    # f32[] or [B]; nats
    entropy: Any = struct.setting(
        default=1.5,
        ranges=Range("a number of at least 0 (inf is strict)", 0, grid=ENTROPIES),
        help="entropy in nats above which the runner-up is accepted; inf never relaxes",
        kw_only=False,
    )

    @property
    def name(self) -> str:
        return over("entropy_gate", self.base)

    def low(self, evidence: Evidence) -> Array:
        return entropy_of(evidence.logits) > self.entropy[:, None]
