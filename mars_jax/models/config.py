"""Static model configurations: frozen, hashable dataclasses without arrays.

Tested against the configs of transformers, read by `mars_jax.hub.config_json`.
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
"""Integer fields of `ModelConfig` that may be 0."""


LEAST = 1e-15
"""Lower bound on theta, the factor and the divisors of a rotary embedding. Smaller values would make the frequencies
overflow float32."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary position embedding (RoPE), with the frequency scaling that extends the trained context length.

    The names of kinds and fields follow transformers' `ROPE_INIT_FUNCTIONS`. The comment on each field lists the kinds
    that use it.

    The kind "dynamic" (dynamic NTK) has no effect: it only changes the frequencies of sequences longer than
    `max_positions`, and mars-jax does not decode such sequences. For "longrope", transformers selects the divisors from
    the current length, and recomputes the cache when the selection changes. Like vLLM, mars-jax selects the divisors
    once, from the maximum context length of the config.
    """

    theta: float = 10000.0
    kind: str = "none"
    fraction: float = 1.0  # fraction of a head's dimensions that is rotated, starting with the first
    interleaved: bool = False  # rotate pairs of adjacent dimensions; False: pair dimension i with i + half
    factor: float = 1.0  # linear, dynamic, llama3, yarn: divisor of the scaled frequencies
    original_max_positions: int = 0  # llama3, yarn, longrope, query_growth: trained context length
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn, longrope: factor by which cos and sin are multiplied
    truncate: bool = True  # yarn: round the bounds of the correction range outwards to whole dimensions
    short_divisors: tuple[float, ...] = ()  # longrope: divisor of each frequency, up to the trained length
    long_divisors: tuple[float, ...] = ()  # longrope: divisor of each frequency, for longer contexts
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
                f"rope theta is {self.theta:g}, beta_fast {self.beta_fast:g} and beta_slow {self.beta_slow:g}: "
                "yarn needs a theta other than 1, and the others above 0."
            )

    @property
    def divisors(self) -> tuple[float, ...]:
        """Divisors of the frequencies that "longrope" uses for this config."""
        if self.is_long:
            return self.long_divisors
        return self.short_divisors


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """Sizes of multi-head latent attention; see `models.latent_attention`."""

    rank: int  # width of the latent, `kv_lora_rank`
    query_rank: int = 0  # width of the queries' latent, `q_lora_rank`; 0: queries have no latent
    plain: int  # number of dimensions of a query or key without rotary embedding, `qk_nope_head_dim`
    rotary: int  # number of rotary dimensions of a query or key, `qk_rope_head_dim`; all heads share one rotary key
    value: int  # number of dimensions of a value, `v_head_dim`

    def __post_init__(self):
        for name in ("rank", "query_rank", "plain", "rotary", "value"):
            least = int(name != "query_rank")
            check_count(f"{name} of latent attention", getattr(self, name), least, DIMENSION)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Delta:
    """Sizes of a model's recurrent layers, which are gated DeltaNet layers (arXiv 2412.06464); see `models.delta`."""

    layers: tuple[int, ...]  # indices of the layers that use gated DeltaNet instead of attention
    key_heads: int
    value_heads: int  # a multiple of key_heads
    key_dim: int  # width of a head's key
    value_dim: int
    taps: int = 4  # kernel size, in tokens, of the convolution before the recurrence

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
    `experts_per_token <= num_experts`. In a layer with window w, a query at position p attends to keys at positions
    above p - w. If the window is None, queries attend to all keys.

    Raises:
      MarsError: an invariant does not hold.

    >>> config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2)
    >>> config.head_dim, config.num_kv_heads, config.windows
    (8, 2, (None, None))
    """

    # Model family: selects the Hugging Face architecture of saved checkpoints. It does not affect the computation.
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
    local_rope: Rope | None = None  # rotary embedding of layers with a window; None: rope
    nope_layers: tuple[int, ...] = ()  # layers without rotary embedding
    tie_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False  # add biases in dense MLPs
    latent: Latent | None = None  # latent attention; num_kv_heads is then 1, and head_dim is rank + rotary
    qk_norm: bool = False  # normalise queries and keys, each head separately
    whole_qk_norm: bool = False  # normalise queries and keys over all heads of a token together
    attention_sinks: bool = False  # add a learned logit per head to the denominator of the softmax
    attention_gate: bool = False  # multiply attention's output by the sigmoid of a gate, part of `q`'s output
    delta: Delta | None = None  # recurrent layers, with a state instead of keys and values
    windows: tuple[int | None, ...] = ()  # sliding windows, one per layer; None or (): full attention
    activation: str = "silu"
    # (alpha, limit) of `layers.clamped_swiglu`, which experts use instead of `activation`; None: use `activation`
    swiglu: tuple[float, float] | None = None
    num_experts: int = 0  # experts per layer; 0: every layer has a single dense MLP
    experts_per_token: int = 0
    expert_size: int = 0  # hidden units of one expert; 0: intermediate_size
    shared_expert_size: int = 0  # hidden units of the shared expert, which every token uses; 0: none
    # DeepSeek-V3's router: sigmoid scores, a bias that only affects which experts are chosen, and a shared expert
    # without a gate.
    sigmoid_router: bool = False
    # Groups of experts; a token only uses experts of its best `groups_per_token` groups. Only with sigmoid_router.
    expert_groups: int = 1
    groups_per_token: int = 1
    expert_multiplier: float = 1.0  # factor by which the routing weights of experts are multiplied
    # Scale the routing weights of a token's experts to sum to 1. If False, keep the router's scores over all experts.
    normalize_experts: bool = True
    dense_layers: tuple[int, ...] = ()  # layers with a single dense MLP in a model with experts
    embedding_multiplier: float = 1.0  # factor for input embeddings, such as sqrt(hidden_size)
    residual_multiplier: float = 1.0  # factor for the outputs of attention and MLP
    logit_divisor: float = 1.0  # divisor of the logits, Granite's `logits_scaling`
    norm_plus_one: bool = False  # norms multiply by 1 + weight (zero-centred norms)
    pre_norms: bool = True  # normalise the inputs of attention and MLP
    # Normalise the outputs of attention and MLP before adding them to the residual stream.
    post_norms: bool = False
    query_scalar: float = 0.0  # divide attention scores by the square root of this number; 0: head_dim
    attention_cap: float | None = None  # soft cap on attention scores x: cap * tanh(x / cap); None: no cap
    logit_cap: float | None = None  # soft cap on the logits; None: no cap
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
        # Replace 0 and (), the defaults, with derived values. A frozen dataclass does not allow plain assignment.
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
                f"experts_per_token is {self.experts_per_token}: expected a number from 1 to num_experts = "
                f"{self.num_experts}."
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
        """Number of dimensions per head to which `rope` applies; `Rope.fraction` is a share of this number."""
        if self.latent is not None:
            return self.latent.rotary
        return self.head_dim

    def _check_groups(self) -> None:
        groups, per_token, experts = self.expert_groups, self.groups_per_token, self.num_experts
        # A group's score is the sum of the scores of its two best experts, so a group needs at least two experts.
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
    """Check that a model has at most `LAYERS` layers, and at most `EXPERTS` experts in total.

    Args:
      layers: number of layers.
      experts: number of experts per layer; 0 for a dense model.

    Raises:
      MarsError: a limit is exceeded.
    """
    _check_limit("num_layers", layers, LAYERS)
    _check_limit("num_layers times num_experts", layers * experts, EXPERTS)


def _check_limit(name: str, value: int, limit: int) -> None:
    if value > limit:
        raise MarsError(
            f"{name} is {value:,}: expected at most {limit:,}; use the config the checkpoint came with."
        )
