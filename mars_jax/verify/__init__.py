"""The rules: frozen pytrees `rule(evidence) -> (verdict, rule)`, built by factories; see docs/rules.md."""

from kernels_pallas import MARGINS
from mars_jax.core.evidence import Evidence, evidence, node_stats
from mars_jax.core.rules import for_rows
from mars_jax.core.types import LoadedRule, Verifier
from mars_jax.verify.adaptive import Adaptive, adaptive
from mars_jax.verify.budget import Budget, budget
from mars_jax.verify.cactus import Cactus, cactus
from mars_jax.verify.context import Context, context, entropy, token_classes
from mars_jax.verify.diversed import Diversed, diversed
from mars_jax.verify.entropy_gate import EntropyGate, entropy_gate
from mars_jax.verify.equivalent import Equivalent, equivalent, token_groups
from mars_jax.verify.exact import Exact, exact
from mars_jax.verify.fly import Fly, fly
from mars_jax.verify.learned import Learned, learned
from mars_jax.verify.lenience import Lenience, lenience
from mars_jax.verify.lossy import Lossy
from mars_jax.verify.mars import Mars, mars
from mars_jax.verify.mixture import Mixture, mixture
from mars_jax.verify.named import load, needs_chain, needs_q, save
from mars_jax.verify.nucleus import Nucleus, nucleus
from mars_jax.verify.phrase import Phrase, phrase
from mars_jax.verify.rejection import Rejection, rejection
from mars_jax.verify.relaxed import Relaxed, runner_up_edges
from mars_jax.verify.released import Released, released
from mars_jax.verify.retargeted import Retargeted
from mars_jax.verify.simulated import Simulated, simulated
from mars_jax.verify.speccascade import SpecCascade, speccascade
from mars_jax.verify.topk import TopK, topk
from mars_jax.verify.typical import Typical, typical

__all__ = [
    "MARGINS",
    "Adaptive",
    "Budget",
    "Cactus",
    "Context",
    "Diversed",
    "EntropyGate",
    "Equivalent",
    "Evidence",
    "Exact",
    "Fly",
    "Learned",
    "Lenience",
    "LoadedRule",
    "Lossy",
    "Mars",
    "Mixture",
    "Nucleus",
    "Phrase",
    "Rejection",
    "Relaxed",
    "Released",
    "Retargeted",
    "Simulated",
    "SpecCascade",
    "TopK",
    "Typical",
    "Verifier",
    "adaptive",
    "budget",
    "cactus",
    "context",
    "diversed",
    "entropy",
    "entropy_gate",
    "equivalent",
    "evidence",
    "exact",
    "fly",
    "for_rows",
    "learned",
    "lenience",
    "load",
    "mars",
    "mixture",
    "needs_chain",
    "needs_q",
    "node_stats",
    "nucleus",
    "phrase",
    "rejection",
    "released",
    "runner_up_edges",
    "save",
    "simulated",
    "speccascade",
    "token_classes",
    "token_groups",
    "topk",
    "typical",
]
