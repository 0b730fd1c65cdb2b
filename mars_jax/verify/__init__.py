"""Verifiers: frozen, hashable rules `verify(keys, tree, logits, controls) -> Verdict`, built by factories."""

from kernels_pallas import MARGINS
from mars_jax.verify.context import Context, context, token_classes
from mars_jax.verify.exact import Exact, exact
from mars_jax.verify.learned import Learned, learned
from mars_jax.verify.mars import Mars, mars
from mars_jax.verify.rejection import Rejection, rejection
from mars_jax.verify.simulated import Simulated, simulated

__all__ = [
    "MARGINS",
    "Context",
    "Exact",
    "Learned",
    "Mars",
    "Rejection",
    "Simulated",
    "context",
    "exact",
    "learned",
    "mars",
    "rejection",
    "simulated",
    "token_classes",
]
