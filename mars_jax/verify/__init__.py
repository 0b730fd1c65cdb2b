"""Verification rules: frozen pytrees that are called as `rule(evidence) -> (verdict, rule)`; see docs/rules.md."""

from kernels_pallas import MARGINS
from mars_jax.core.rule import Evidence, LoadedRule, Rule, evidence, for_rows, node_stats
from mars_jax.core.sampling import entropy
from mars_jax.core.struct import setting
from mars_jax.core.tree import at_parent
from mars_jax.utils.settings import Range
from mars_jax.verify.adaptive import Adaptive, adaptive
from mars_jax.verify.choice import Given, RuleChoice, choose, not_in
from mars_jax.verify.definition import NEEDS, Definition, register, rules
from mars_jax.verify.exact import Exact, exact
from mars_jax.verify.lossy import Lossy
from mars_jax.verify.mars import Mars, mars
from mars_jax.verify.mixture import Mixture, mixture
from mars_jax.verify.named import load, needs_q
from mars_jax.verify.nucleus import Nucleus, nucleus
from mars_jax.verify.own import find, is_own, source_digest, split
from mars_jax.verify.rejection import Rejection, rejection
from mars_jax.verify.relaxed import Relaxed, runner_up_edges
from mars_jax.verify.retargeted import Retargeted
from mars_jax.verify.topk import TopK, topk
from mars_jax.verify.typical import Typical, typical

__all__ = [
    "MARGINS",
    "NEEDS",
    "Adaptive",
    "Definition",
    "Evidence",
    "Exact",
    "Given",
    "LoadedRule",
    "Lossy",
    "Mars",
    "Mixture",
    "Nucleus",
    "Range",
    "Rejection",
    "Relaxed",
    "Retargeted",
    "Rule",
    "RuleChoice",
    "TopK",
    "Typical",
    "adaptive",
    "at_parent",
    "choose",
    "entropy",
    "evidence",
    "exact",
    "find",
    "for_rows",
    "is_own",
    "load",
    "mars",
    "mixture",
    "needs_q",
    "node_stats",
    "not_in",
    "nucleus",
    "register",
    "rejection",
    "rules",
    "runner_up_edges",
    "setting",
    "source_digest",
    "split",
    "topk",
    "typical",
]
