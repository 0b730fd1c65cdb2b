"""Many rules in one program: each row is verified by its own."""

from __future__ import annotations

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax.core import struct


@struct.dataclass(kw_only=True)
class Among:
    """Of the rules the one whose number a row has. It keeps the state of all of them."""

    rules: tuple[Any, ...]
    which: Any = np.int32(0)
    needs: tuple[str, ...] = struct.field(pytree_node=False, default=())

    @property
    def lossless(self) -> bool:
        return all(rule.lossless for rule in self.rules)

    def __call__(self, given):
        with mock.patch.object(jax.lax, "cond", _select):
            found, after = zip(
                *(
                    rule(given.replace(params=weights))
                    for rule, weights in zip(self.rules, given.params, strict=True)
                ),
                strict=True,
            )

        def own(*arrays):
            stacked = jnp.stack(arrays)
            return stacked[self.which, jnp.arange(stacked.shape[1])]

        return jax.tree.map(own, *found), self.replace(rules=after)

    def check_drafter(self, drafter):
        for rule in self.rules:
            if hasattr(rule, "check_drafter"):
                rule.check_drafter(drafter)


def _select(condition, true, false, *operands):
    """`lax.cond` by both branches: what several rules compute alike is then compiled once."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), true(*operands), false(*operands))
