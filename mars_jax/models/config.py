"""The static description of a transformer: frozen, hashable, free of arrays.

Oracle: the configs of transformers, read by `mars_jax.hub.config_json`.
"""

from __future__ import annotations

import dataclasses
import math

from mars_jax.utils.errors import MarsError, check_count
from mars_jax.utils.limits import DIMENSION, EXPERTS, LAYERS, POSITIONS

ROPE_KINDS = ("none", "linear", "dynamic", "llama3", "yarn", "longrope")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
_COUNTS = (
    "num_kv_heads",
    "head_dim",
    "num_experts",
    "experts_per_token",
    "expert_size",
    "shared_expert_size",
    "expert_groups",
    "groups_per_token",
)
"""Integer fields of a model that may be 0."""


LEAST = 1e-15
"""Lower bound of a rotary embedding's theta and factor: smaller values make frequencies overflow float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding, including the scaling of its frequencies beyond the trained length.

    Kinds and fields are named as in transformers' `ROPE_INIT_FUNCTIONS`. A field's comment lists the kinds that use it.
    "dynamic" (dynamic NTK) changes only the frequencies of texts longer than `max_positions`, the limit of a text here,
    so it has no effect. In "longrope", transformers selects the divisors by the current length and recomputes the cache
    when the selection changes. Here they are selected once, by the maximum context of the config, as in vLLM.
    """

    theta: float = 10000.0
    kind: str = "none"
    fraction: float = 1.0  # share of a head's dimensions that are rotated: the first ones
    interleaved: bool = False  # rotate pairs of neighbours; False: dimension i is paired with i + half
    factor: float = 1.0  # linear, dynamic, llama3, yarn: divisor of the scaled frequencies
    original_max_positions: int = 0  # llama3, yarn, longrope, query_growth: the trained length
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn, longrope: factor of cos and sin, already resolved
    truncate: bool = True  # yarn: round the corrected range outwards to whole dimensions
    short_divisors: tuple[float, ...] = ()  # longrope: one per frequency, for the trained length
    long_divisors: tuple[float, ...] = ()  # longrope: one per frequency, for a longer context
    is_long: bool = False  # longrope: use `long_divisors`
    query_growth: float = 0.0  # any: multiply queries by 1 + growth * log(1 + position // trained length)

    def __post_init__(self):
        if self.kind not in ROPE_KINDS:
            raise MarsError(
                f"rope kind '{self.kind}' is not supported: choose one of {', '.join(ROPE_KINDS)}."
            )
        needs_length = self.kind in ("llama3", "yarn", "longrope") or self.query_growth
        if needs_length and self.original_max_positions < 1:
            raise MarsError(
                f"rope kind '{self.kind}' needs original_max_positions, the length it was trained at."
            )
        if not 0 < self.fraction <= 1:
            raise MarsError(f"rope fraction is {self.fraction}: expected a number above 0, and at most 1.")
        if self.kind == "longrope" and not all(LEAST < x < math.inf for x in self.divisors):
            raise MarsError("rope divisors must be positive numbers.")
        if not (LEAST < self.theta < math.inf and LEAST < self.factor < math.inf):
            raise MarsError(f"rope theta ({self.theta}) and factor ({self.factor}) must be positive.")
        finite_fields = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor")
        for name in (*finite_fields, "query_growth"):
            if not math.isfinite(getattr(self, name)):
                raise MarsError(f"rope {name} is {getattr(self, name)}: expected a number.")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise MarsError(
                f"rope low_freq_factor is {self.low_freq_factor:g} and high_freq_factor {self.high_freq_factor:g}: "
                "expected the first below the second."
            )
        if self.kind == "yarn" and (self.theta == 1 or not (self.beta_slow > 0 and self.beta_fast > 0)):
            raise MarsError(
                f"rope theta is {self.theta:g}, beta_fast {self.beta_fast:g} and beta_slow {self.beta_slow:g}: of "
                "yarn the first is not 1, and the others are above 0."
            )

    @property
    def divisors(self) -> tuple[float, ...]:
        """Divisors of the frequencies in "longrope"."""
        if self.is_long:
            return self.long_divisors
        return self.short_divisors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention; see `models.latent_attention`."""

    rank: int  # width of the latent, `kv_lora_rank`
    query_rank: int = 0  # width of the latent of queries, `q_lora_rank`; 0: none
    plain: int  # dimensions of a query or key without rotary embedding, `qk_nope_head_dim`
    rotary: int  # dimensions with it, `qk_rope_head_dim`; all heads share those of the key
    value: int  # dimensions of a value, `v_head_dim`

    def __post_init__(self):
        for name in ("rank", "query_rank", "plain", "rotary", "value"):
            least = int(name != "query_rank")
            check_count(f"{name} of latent attention", getattr(self, name), least, DIMENSION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """The recurrent layers of a model, gated DeltaNet (arXiv 2412.06464); see `models.delta`."""

    layers: tuple[int, ...]  # numbers of the layers that have gated DeltaNet instead of attention
    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # width of a head's key
    value_dim: int
    taps: int = 4  # tokens that one output of the convolution before the recurrence reads

    def __post_init__(self):
        for name in ("key_heads", "value_heads", "key_dim", "value_dim", "taps"):
            check_count(f"{name} of the recurrent layers", getattr(self, name), most=DIMENSION)
        if self.value_heads % self.key_heads:
            raise MarsError(
                f"{self.value_heads} value heads of the recurrent layers cannot share {self.key_heads} key heads: "
                "choose a multiple of the number of key heads."
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Static configuration of a model.

    Invariants: `num_heads % num_kv_heads == 0`, `head_dim % 2 == 0`, `len(windows) == num_layers`,
    `experts_per_token <= num_experts`. In a layer with window w, a query at position p sees keys at positions above
    p - w; a window of None hides no keys.

    Raises:
      MarsError: an invariant does not hold.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
    >>> config.head_dim, config.num_kv_heads, config.windows
    (8, 2, (None, None))
    """

    # The Hugging Face architecture named in a saved checkpoint; the fields below define the maths.
    family: str = "llama"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int = 0  # 0: num_heads
    head_dim: int = 0  # 0: hidden_size // num_heads
    max_positions: int = 2048
    norm_eps: float = 1e-6
    rope: Rope = Rope()
    local_rope: Rope | None = None  # for layers with a window; None: rope
    nope_layers: tuple[int, ...] = ()  # layers without rotary embedding
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False  # dense MLPs have biases
    latent: Latent | None = None  # if set, num_kv_heads is 1 and head_dim is rank + rotary
    qk_norm: bool = False
    whole_qk_norm: bool = False  # one norm over all heads of a token; qk_norm: one per head
    attention_sinks: bool = False  # one learned logit per head that only adds to the softmax's denominator
    attention_gate: bool = False  # multiply attention's outputs by the sigmoid of a projection, a part of `q`
    delta: Delta | None = None  # layers that have a recurrent state instead of keys and values
    windows: tuple[int | None, ...] = ()  # sliding windows, one per layer; None or (): full attention
    activation: str = "silu"
    # (alpha, limit) of the experts' `layers.clamped_swiglu`, which replaces `activation`; None: use `activation`
    swiglu: tuple[float, float] | None = None
    num_experts: int = 0  # experts per layer; 0: every layer has a single dense MLP
    experts_per_token: int = 0
    expert_size: int = 0  # hidden units of one expert; 0: intermediate_size
    shared_expert_size: int = 0  # hidden units of an expert that every token also uses; 0: none
    # DeepSeek-V3's router: sigmoid scores, a bias that affects only the choice, and a shared expert without a gate.
    sigmoid_router: bool = False
    expert_groups: int = 1  # a token uses experts of its best groups; only with sigmoid_router
    groups_per_token: int = 1
    expert_multiplier: float = 1.0  # factor of the weights of a token's experts
    # Scale the weights of a token's experts to sum to 1; if False, use their probabilities among all experts.
    normalize_experts: bool = True
    dense_layers: tuple[int, ...] = ()  # layers that have a single dense MLP even if num_experts is not 0
    embedding_multiplier: float = 1.0  # factor of input embeddings, such as sqrt(hidden_size)
    residual_multiplier: float = 1.0  # factor of the outputs of attention and MLP
    logit_divisor: float = 1.0  # Granite's `logits_scaling`
    norm_plus_one: bool = False  # zero-centred norms, which multiply by 1 + weight
    pre_norms: bool = True  # normalise the inputs of attention and MLP
    # Normalise the outputs of attention and MLP before adding them to the residual stream.
    post_norms: bool = False
    query_scalar: float = 0.0  # attention scores are divided by its square root; 0: head_dim
    attention_cap: float | None = None  # attention scores x become cap * tanh(x / cap)
    logit_cap: float | None = None  # the same for logits
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self):
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "max_positions")
        for name in (*sizes, *_COUNTS):
            check_count(name, getattr(self, name), int(name in sizes))
        check_parts(self.num_layers, self.num_experts)
        for name in (*sizes, *_COUNTS):
            _check_limit(name, getattr(self, name), POSITIONS if name == "max_positions" else DIMENSION)
        if not 0 <= self.norm_eps < math.inf:  # NaN would make every logit NaN
            raise MarsError(f"norm_eps is {self.norm_eps}: expected a number of at least 0, such as 1e-6.")
        if self.head_dim == 0 and self.hidden_size % self.num_heads:
            raise MarsError(
                f"hidden_size {self.hidden_size} is not divisible by {self.num_heads} heads: set head_dim."
            )
        # Set derived defaults once; a frozen dataclass does not allow plain assignment.
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_heads)
        object.__setattr__(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        object.__setattr__(self, "windows", self.windows or (None,) * self.num_layers)
        if self.num_heads % self.num_kv_heads:
            raise MarsError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads: the "
                "first must be a multiple of the second."
            )
        if self.head_dim % 2:
            raise MarsError(f"head_dim {self.head_dim} is odd: rotary embeddings rotate pairs of dimensions.")
        pairs = (int(self.head_dim * self.rope.fraction) + 1) // 2
        if self.rope.kind == "longrope" and len(self.rope.divisors) != pairs:
            raise MarsError(f"longrope has {len(self.rope.divisors)} divisors: expected {pairs}.")
        if self.latent is not None and (
            (self.num_kv_heads, self.head_dim) != (1, self.latent.rank + self.latent.rotary)
            or self.latent.rotary % 2
        ):
            raise MarsError(
                f"num_kv_heads is {self.num_kv_heads} and head_dim {self.head_dim}: latent attention needs 1 and "
                f"rank + rotary = {self.latent.rank} + {self.latent.rotary}, and rotary must be even."
            )
        if len(self.windows) != self.num_layers:
            raise MarsError(f"{len(self.windows)} windows for {self.num_layers} layers: give one per layer.")
        for window in self.windows:
            if window is not None:
                check_count("a window", window, most=POSITIONS)
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise MarsError(
                f"experts_per_token is {self.experts_per_token}: a token takes at least 1 of the {self.num_experts} "
                "experts and at most all."
            )
        if (self.expert_groups, self.groups_per_token) != (1, 1) and self.num_experts:
            self._check_groups()
        multipliers = ("embedding_multiplier", "residual_multiplier", "logit_divisor", "expert_multiplier")
        for name in multipliers:
            if not 0 < getattr(self, name) < math.inf:
                raise MarsError(f"{name} is {getattr(self, name)}: it must be positive, or 1 for none.")
        for cap in (self.attention_cap, self.logit_cap):
            if cap is not None and not 0 < cap < math.inf:
                raise MarsError(f"a soft cap is {cap}: it must be positive, or None for none.")
        if self.swiglu is not None and not all(0 < x < math.inf for x in self.swiglu):
            raise MarsError(
                f"swiglu is {self.swiglu}: alpha and limit must be positive and finite; None uses `activation`."
            )
        if self.delta is not None and not set(range(self.num_layers)) > set(self.delta.layers):
            raise MarsError(
                f"the recurrent layers are {list(self.delta.layers)}: expected some of 0 to {self.num_layers - 1}, and "
                "attention in at least one layer."
            )
        if self.activation not in ACTIVATIONS:
            raise MarsError(
                f"activation '{self.activation}' is not supported: choose one of {', '.join(ACTIVATIONS)}."
            )

    @property
    def rotary_dim(self) -> int:
        """Dimensions of a head to which `rope` applies."""
        if self.latent is not None:
            return self.latent.rotary
        return self.head_dim

    def _check_groups(self) -> None:
        groups, per_token, experts = self.expert_groups, self.groups_per_token, self.num_experts
        # A group's score is the sum of the scores of its two best experts.
        if groups < 1 or experts % groups or 1 < groups > experts // 2:
            raise MarsError(
                f"expert_groups is {groups}: expected a divisor of num_experts = {experts}, at most half of it."
            )
        if not 1 <= per_token <= groups or experts // groups * per_token < self.experts_per_token:
            raise MarsError(
                f"groups_per_token is {per_token}: expected 1 to {groups} groups, which together have at least the "
                f"{self.experts_per_token} experts of a token."
            )


def check_parts(layers: int, experts: int = 0) -> None:
    """Raise MarsError if a model has more than `LAYERS` layers, or more than `EXPERTS` experts in total.

    Args:
      layers: number of layers.
      experts: experts per layer; 0 for a dense model.
    """
    _check_limit("num_layers", layers, LAYERS)
    _check_limit("num_layers times num_experts", layers * experts, EXPERTS)


def _check_limit(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise MarsError(
            f"{name} is {value:,}: expected at most {limit:,}; use the config the checkpoint came with."
        )
