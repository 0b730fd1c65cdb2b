"""Verifiers: frozen, hashable rules `verify(keys, tree, logits, controls) -> Verdict`, built by factories."""

from kernels_pallas import MARGINS
from mars_jax.verify.exact import Exact, exact
from mars_jax.verify.mars import Mars, mars
from mars_jax.verify.rejection import Rejection, rejection

__all__ = ["MARGINS", "Exact", "Mars", "Rejection", "exact", "mars", "rejection"]
