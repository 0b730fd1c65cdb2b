"""Nucleus acceptance. B batch, N nodes. Oracles: transformers' top-p warper in tests/verify/test_edges.py, and the
exact law of one step in tests/verify/test_distributions.py."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from mars_jax.core import struct
from mars_jax.core.evidence import Evidence
from mars_jax.core.sampling import at_drafted, process
from mars_jax.specs import UNLIMITED_RUN
from mars_jax.verify import drafted
from mars_jax.verify.lossy import numbers
from mars_jax.verify.rejection import rejection
from mars_jax.verify.relaxed import Relaxed, base_of


@struct.dataclass(kw_only=True)
class Nucleus(Relaxed):
    """Nucleus acceptance (arXiv 2610.07822): a drafted token x is accepted where rejection accepts it, u <= p(x) /
    q(x), or where it is in the nucleus of p: the tokens above it have less than `mass` of the probability.

    The token that is emitted where it stops is unchanged, a draw of norm((p - q)+), so one step is off the target's law
    by a total variation of sum((q - p)+) over the nucleus. p is the distribution that the row draws from, after
    temperature and filters; at temperature 0 its nucleus is its best token, and the rule is exact. Lossy; `mass` = 0
    equals `base` bit for bit.
    """

    mass: Any  # f32[] or [B]; from 0 to 1

    def relaxable(self, evidence: Evidence) -> Array:
        log_p = jax.nn.log_softmax(process(evidence.logits, evidence.controls), axis=-1)
        there, above = drafted.preferred(evidence, log_p)
        # f32[B, N]: the mass above x. x is in the nucleus where that is still below `mass`.
        likelier = jnp.sum(jnp.where(above, jnp.exp(there), 0.0), axis=-1)
        # Sums that are rounded below a mass of 1 would let in what the filters exclude.
        return (likelier < self.mass[:, None]) & (at_drafted(evidence.tree, log_p) > -jnp.inf)


def nucleus(
    mass: Any = 0.9, *, base: Any = None, max_relaxed_run: Any = UNLIMITED_RUN, exact_prefix: Any = 0
) -> Nucleus:
    """Nucleus acceptance; see `Nucleus`.

    Args:
      base: the strict rule, `rejection()` by default, as in the paper; `exact()` takes trees too.
      mass: of the nucleus; the default is ours.
      max_relaxed_run, exact_prefix: as for `mars`. Every number is one value, or one per row.

    Raises:
      MarsError: a number out of its range, or a base that cannot be relaxed.

    >>> from mars_jax import verify
    >>> from mars_jax.core.tree import chain
    >>> z = jnp.log(jnp.asarray([[[0.2, 0.5, 0.3], [0.1, 0.8, 0.1]]] * 50))
    >>> given = verify.evidence(chain(jnp.asarray([[2, 2]] * 50, jnp.int32)), z, temperature=1.0)
    >>> accepted = jax.jit(lambda rule: verify.for_rows(rule, 50)(given)[0].num_accepted.sum())
    >>> [int(accepted(nucleus(mass=m))) for m in (0.5, 0.6)]
    [15, 50]
    """
    given = {"mass": mass, "max_relaxed_run": max_relaxed_run, "exact_prefix": exact_prefix}
    return Nucleus(
        base=base_of(rejection() if base is None else base, "nucleus"), **numbers("nucleus", given)
    )
