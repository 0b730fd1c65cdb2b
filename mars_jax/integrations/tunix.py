"""`MarsRollout`, a rollout engine with speculative decoding for reinforcement learning with Tunix.

    cluster_config = ClusterConfig(
        rollout_engine=functools.partial(mars_jax.integrations.tunix.MarsRollout, drafter="ngram"), ...
    )

The engine converts the weights of Tunix's Qwen3, Qwen2 and Llama 3 from nnx state on the device, decodes with
continuous batching, prefills each distinct prompt once, and returns log-probabilities as Tunix defines them. By default
samples follow the policy's distribution exactly; lossy rules need `lossy=True`.

The interface follows google-tunix 0.1.7: `rl/rollout/base_rollout.py`, `rl/rl_cluster.py`,
`generate/sampler.py`, `models/{qwen3,qwen2,llama3}/model.py`. Tested against the actor's own logits
(tests/integrations/test_tunix.py) and with the real package (tests/integrations/test_tunix_cluster.py).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import AxisType, Mesh
from jax.typing import ArrayLike

import mars_jax as mj
from mars_jax.core.axes import name_axes
from mars_jax.core.metrics import Metrics
from mars_jax.core.types import LanguageModel, PyTree, Visible
from mars_jax.hub.pretrained import Pretrained
from mars_jax.integrations import bridge
from mars_jax.serve.prepare import AnyRule, bucket, loaded_rule, prepared
from mars_jax.serve.queue import Queue, Shares
from mars_jax.serve.requests import Request, total_metrics
from mars_jax.serve.session import default_rows
from mars_jax.utils.errors import MarsError

if TYPE_CHECKING:
    MarsRollout: type

__all__ = ["MarsRollout", "Rollout", "config_of", "params_from_state"]

SAME = 2e-2
"""Largest difference between the actor's logits and ours that bfloat16 rounding can cause, relative to the standard
deviation of the logits."""


def config_of(actor: Any) -> mj.models.ModelConfig:
    """Return the config of one of Tunix's dense models: Qwen3, Qwen2 or Llama 3.

    Raises:
      MarsError: the actor is not one of these models.
    """
    family, actor_config = type(actor).__name__, getattr(actor, "config", None)
    if family not in ("Qwen3", "Qwen2", "Llama3") or actor_config is None:
        raise MarsError(
            f"the rollout's model is {family}: MarsRollout takes Tunix's Qwen3, Qwen2 and Llama3."
        )
    if getattr(actor_config, "num_experts", None):
        raise MarsError("the rollout's model is a mixture of experts: MarsRollout takes dense models.")
    # The setting for tied embeddings has a different name in each model.
    is_tied = getattr(actor_config, "use_tied_embedding", getattr(actor_config, "weight_tying", False))
    return mj.models.ModelConfig(
        family={"Qwen3": "qwen3", "Qwen2": "qwen2", "Llama3": "llama"}[family],
        vocab_size=actor_config.vocab_size,
        hidden_size=actor_config.embed_dim,
        intermediate_size=actor_config.hidden_dim,
        num_layers=actor_config.num_layers,
        num_heads=actor_config.num_heads,
        num_kv_heads=actor_config.num_kv_heads,
        head_dim=actor_config.head_dim,
        max_positions=1 << 20,  # Tunix's configs do not specify a maximum
        norm_eps=actor_config.norm_eps,
        rope=mj.models.Rope(theta=float(actor_config.rope_theta)),
        tie_embeddings=bool(is_tied),
        qk_norm=family == "Qwen3",
        qkv_bias=family == "Qwen2",
    )


def params_from_state(state: PyTree, config: mj.models.ModelConfig) -> PyTree:
    """Convert the nnx state of one of Tunix's models to mars-jax params, using only reshapes, transposes and copies.

    Under `jax.jit` the result shares no memory with the state, so a trainer may donate its state.

    Args:
      state: from `nnx.state(actor, nnx.Param)`.
      config: from `config_of`.

    Raises:
      MarsError: the state lacks some of the weights, for example because it contains only adapters.
    """
    state_dict: PyTree = nnx.to_pure_dict(state)
    hidden_size = config.hidden_size

    def matrix(x: Array) -> Array:
        """Convert [D, heads, head_dim] or [D, F] to [out, in]."""
        return x.reshape(hidden_size, -1).T

    def layer(layer_state: PyTree) -> dict[str, Array]:
        attention, mlp = layer_state["attn"], layer_state["mlp"]
        params = {
            "attention_norm": jnp.copy(layer_state["input_layernorm"]["w"]),
            "mlp_norm": jnp.copy(layer_state["post_attention_layernorm"]["w"]),
            "q": matrix(attention["q_proj"]["w"]),
            "k": matrix(attention["k_proj"]["w"]),
            "v": matrix(attention["v_proj"]["w"]),
            # [heads, head_dim, D] -> [D, heads * head_dim].
            "o": attention["o_proj"]["w"].reshape(-1, hidden_size).T,
            "gate": matrix(mlp["gate_proj"]["kernel"]),
            "up": matrix(mlp["up_proj"]["kernel"]),
            "down": mlp["down_proj"]["kernel"].T,
        }
        if config.qk_norm:
            params |= {name: jnp.copy(attention[name]["w"]) for name in ("q_norm", "k_norm")}
        if config.qkv_bias:
            params |= {f"{name}_bias": jnp.copy(attention[f"{name}_bias"]).reshape(-1) for name in "qkv"}
        return params

    try:
        layers = state_dict["layers"]
        if isinstance(layers, dict):  # keys are layer numbers, as strings or integers
            layers = [layers[name] for name in sorted(layers, key=int)]
        params = {
            "embed": jnp.copy(state_dict["embedder"]["input_embedding"]),
            "layers": tuple(layer(layer_state) for layer_state in layers),
            "norm": jnp.copy(state_dict["final_norm"]["w"]),
        }
        if not config.tie_embeddings:
            params["unembed"] = state_dict["lm_head"]["w"].T
    except (KeyError, TypeError) as error:
        raise MarsError(
            f"the rollout's weights have no {error}: MarsRollout takes all weights of a Qwen3, Qwen2 or Llama3 of "
            "Tunix, and no adapters; merge them first."
        ) from error
    return params


class Rollout:
    """Methods of `MarsRollout`, which derives from this class and from Tunix's `BaseRollout`."""

    def __init__(
        self,
        *,
        rollout_actor: Any,
        tokenizer: Any,
        mesh: Mesh | None = None,
        rollout_config: Any = None,
        drafter: mj.drafters.AnyDrafter | Callable[[Pretrained], mj.drafters.AnyDrafter] = "ngram",
        verify: AnyRule | None = None,
        batch_size: int | None = None,
        lossy: bool = False,
    ):
        """
        Args:
          rollout_actor, tokenizer, mesh, rollout_config: as `RLCluster` passes them. On a mesh with Tunix's axes fsdp
            and tp, fsdp divides rows and tp divides the model; map other names with `mars_jax.sharding.name_axes`.
          drafter: a drafter or its spec; or a function that maps the target, with its initial weights, to a drafter.
          verify: the rule; default `exact`.
          batch_size: number of rows that decode at the same time; default: as many as fit in memory.
          lossy: allow a rule or a drafter whose samples do not follow the policy's distribution. Log-probabilities are
            still the policy's, so importance ratios do not correct for the difference.

        Raises:
          MarsError: the model is unknown, its logits differ from those computed here, or the rule or drafter is lossy
            and `lossy` is False.
        """
        del rollout_config  # each call to `generate` receives its own config
        rule = loaded_rule(verify)
        self._tokenizer, self._rule = tokenizer, rule
        self._batch_size, self._calls = batch_size, 0
        self._mesh = None
        if mesh is not None and mesh.size > 1:
            self._mesh = Mesh(
                mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names)
            )
            if {"fsdp", "tp"} & set(mesh.axis_names):
                name_axes(data="fsdp", model="tp")
        state = nnx.state(rollout_actor, nnx.Param)
        config = _config_that_computes_the_same(rollout_actor, state)
        dtype = jax.tree.leaves(state)[0].dtype.name
        self._take = _taker(config, dtype, self._mesh)
        self._target = Pretrained.from_parts(
            mj.models.language_model(config, dtype=dtype),
            self._take(state),
            config=config,
            mesh=self._mesh,
            name=type(rollout_actor).__name__,
        )
        if callable(drafter):
            drafter = drafter(self._target)
        self._drafter = mj.drafters.loaded(drafter, self._target)
        if not lossy and (not rule.rule.lossless or self._drafter.drafter.trusts):
            raise MarsError(
                f"the rule {rule.rule.name} with the drafter '{self._drafter.drafter.name}' is lossy: "
                "its samples are not the policy's, and importance ratios do not correct for this; verify by exact or "
                "rejection, or give lossy=True."
            )
        self.metrics: Metrics | None = None
        """Metrics of the last `generate`; `metrics.tau` falls as a drafter becomes outdated."""

    def generate(self, prompts: Sequence[str], rollout_config: Any, **kwargs: Any) -> Any:
        """Sample a completion of each prompt; see Tunix's `BaseRollout.generate`.

        Tokens include the stop token. The pad token is never sampled, because learners mask it. Samples depend on
        `rollout_config.seed`, the number of earlier calls, and the index of the prompt.
        """
        del kwargs
        ids = [self._encode(text) for text in prompts]
        longest_prompt, prompt_width = max(map(len, ids)), rollout_config.max_prompt_length
        # A prompt longer than `max_prompt_length` widens the batch to the next power of two.
        if prompt_width < longest_prompt:
            prompt_width = 1 << (longest_prompt - 1).bit_length()
        pad_token, max_new_tokens = self.pad_id(), rollout_config.max_tokens_to_generate
        stop_tokens = tuple(rollout_config.eos_tokens or (self.eos_id(),))
        requests = [
            Request(
                prompt_tokens=tuple(tokens),
                max_new_tokens=max_new_tokens,
                temperature=float(rollout_config.temperature),
                top_p=1.0 if rollout_config.top_p is None else float(rollout_config.top_p),
                top_k=max(int(rollout_config.top_k or 0), 0),
                seed=seed,
                stop_tokens=stop_tokens,
                logit_bias=tuple((token, -np.inf) for token in {pad_token}.difference(stop_tokens)),
            )
            for tokens, seed in zip(ids, self._seeds(rollout_config.seed, len(ids)), strict=True)
        ]
        prepared_batch = prepared(self._target, self._drafter, requests, verify=self._rule)
        # All calls with one config use the same width, so that prompts of different lengths do not trigger
        # recompilation.
        prepared_batch = dataclasses.replace(prepared_batch, width=bucket(prompt_width + max_new_tokens))
        num_rows = self._batch_size or default_rows(prepared_batch)
        # A mesh may shard rows, and rows on different devices cannot share a prompt.
        shares = Shares.PROMPTS if self._mesh is None else Shares.NOTHING
        completion_by_index = dict(Queue(prepared_batch, num_rows, log_probs=True, shared=shares))
        completions = [completion_by_index[i] for i in range(len(requests))]
        self.metrics = total_metrics(completions)
        if any(completion.finish_reason == "failed" for completion in completions):
            raise MarsError("the policy's logits are not finite: its weights hold NaN, or overflow.")
        tokens = [np.asarray(completion.tokens, np.int32) for completion in completions]
        padded_prompts = np.full((len(ids), prompt_width), pad_token, np.int32)
        for row, prompt in enumerate(ids):
            padded_prompts[row, prompt_width - len(prompt) :] = prompt
        log_probs = [
            np.asarray(completion.log_probs.temperature_log_prob, np.float32)
            for completion in completions
            if completion.log_probs is not None
        ]
        return _base().RolloutOutput(
            text=[self._tokenizer.decode(x.tolist()) for x in tokens],
            logits=[],
            tokens=tokens,
            left_padded_prompt_tokens=padded_prompts,
            logprobs=log_probs if rollout_config.return_logprobs else None,
        )

    def _encode(self, text: str) -> list[int]:
        """Encode a text as Tunix's sampler does, with exactly one BOS token if the tokenizer has one."""
        bos = self._tokenizer.bos_id()
        ids = [int(i) for i in self._tokenizer.encode(text)]
        if bos:
            ids = [bos, *ids]
            while len(ids) > 1 and ids[0] == ids[1] == bos:
                ids = ids[1:]
        return ids

    def _seeds(self, seed: ArrayLike | None, count: int) -> list[int]:
        """Return a seed for each prompt; every call returns different seeds."""
        if seed is None:
            seed = 0
        elif jnp.issubdtype(getattr(seed, "dtype", np.int32), jax.dtypes.prng_key):
            seed = jax.random.key_data(seed)
        seed_words = np.ravel(np.asarray(seed)).astype(np.uint32).tolist()
        seeds = np.random.SeedSequence([*seed_words, self._calls]).generate_state(count, np.uint32)
        self._calls += 1
        return seeds.tolist()

    def get_per_token_logps(
        self, prompt_tokens: Array, completion_tokens: Array, completion_mask: Array | None = None
    ) -> Array:
        """Return log-probabilities of completions under the rollout's weights at temperature 1: f32[B, C].

        Args:
          prompt_tokens: i32[B, P], padded on the left.
          completion_tokens: i32[B, C], padded on the right.
          completion_mask: bool[B, C] or numbers; tokens with mask 0 are padding, which takes up no position and is not
            attended to. None: every token except the pad token is valid, as in `tunix.rl.common`. The results for
            padding, and for a token right after padding, are meaningless.

        Raises:
          MarsError: the mask and the completions have different shapes.
        """
        completions = jnp.asarray(completion_tokens, jnp.int32)
        if completion_mask is None:
            valid_mask = completions != self.pad_id()
        else:
            valid_mask = jnp.asarray(completion_mask) != 0
        if valid_mask.shape != completions.shape:
            raise MarsError(
                f"completion_mask has shape {valid_mask.shape}: expected {completions.shape}, as of completion_tokens."
            )
        with self._target.on_mesh():
            return _log_probs(
                self._target.model,
                self._target.params,
                jnp.asarray(prompt_tokens, jnp.int32),
                completions,
                valid_mask,
                pad=self.pad_id(),
            )

    def update_params(self, params: PyTree, filter_types: object = None) -> None:
        """Replace the policy's weights with copies of new ones, which share no memory with the trainer's weights.

        Args:
          params: from `nnx.state(actor, nnx.Param)`, with the trainer's shardings. Each update reshards them for
            decoding, in a jitted function that is compiled once.
          filter_types: ignored; a state that contains only adapters raises MarsError.
        """
        del filter_types
        # Tunix moves the state of `model()` between host and device, and passes that state to this method too.
        is_model_state = "weights" in params
        target_params = bridge.params_of(self.model(), params) if is_model_state else self._take(params)
        self._target = dataclasses.replace(self._target, params=target_params)

    def update_drafter(self, params: PyTree) -> None:
        """Set new drafter weights, for example those of a retrained head, without recompilation."""
        self._drafter = self._drafter._replace(params=params)

    @property
    def target(self) -> Pretrained:
        """The policy with its current weights, for `mars_jax.generate`, `mars_jax.score` and drafters."""
        return self._target

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> bridge.OurParams:
        """Return the decoding model as an nnx module with its own arrays.

        The module must not be the actor: Tunix assumes that engines that share the actor's arrays need no update, and
        never calls `update_params` for them.
        """
        return bridge.to_nnx(self._target.model, self._target.params)


@functools.cache
def _taker(config: mj.models.ModelConfig, dtype: str, mesh: Mesh | None) -> Callable[[PyTree], PyTree]:
    """Return a compiled `params_from_state` that casts to `dtype` and, on a mesh, shards the params for decoding."""

    def take(state: PyTree) -> PyTree:
        return jax.tree.map(lambda x: x.astype(dtype), params_from_state(state, config))

    return jax.jit(take, out_shardings=mesh and mj.sharding.params_shardings(config, mesh))


def _config_that_computes_the_same(actor: Any, state: PyTree) -> mj.models.ModelConfig:
    """Return the config that reproduces the actor's logits on a short token sequence.

    Tunix 0.1.7 ignores the rotary base of the config and uses the default of its `apply_rope`, 1,000,000. This function
    therefore compares both bases, and chooses the one whose logits are closer to the actor's.

    Raises:
      MarsError: the logits differ too much with either base.
    """
    config = config_of(actor)
    rope_thetas = [config.rope.theta]
    apply_rope = getattr(sys.modules.get(type(actor).__module__), "apply_rope", None)
    if apply_rope is not None:
        default_theta = inspect.signature(apply_rope).parameters["rope_theta"].default
        rope_thetas.append(float(default_theta or config.rope.theta))
    count = 32
    ids = (jnp.arange(count, dtype=jnp.int32) * 7 % config.vocab_size)[None]
    positions = jnp.arange(count, dtype=jnp.int32)[None]
    causal_mask = jnp.tril(jnp.ones((1, count, count), bool))
    actor_logits = actor(ids, positions, None, causal_mask)[0].astype(jnp.float32)

    def difference(candidate: mj.models.ModelConfig) -> float:
        """Return the largest difference between logits, relative to the standard deviation of the actor's logits."""
        model = mj.models.language_model(candidate, dtype=jax.tree.leaves(state)[0].dtype.name)

        @jax.jit
        def logits(state: PyTree) -> Array:
            params = params_from_state(state, candidate)
            start = jnp.zeros((1,), jnp.int32)
            output = model.forward(params, ids, Visible.causal(start, count), model.init_cache(1, count))
            return model.unembed(params, output.hidden)

        max_difference = jnp.max(jnp.abs(logits(state) - actor_logits))
        return float(max_difference / (jnp.std(actor_logits) + 1e-6))

    candidates = [
        dataclasses.replace(config, rope=mj.models.Rope(theta=theta)) for theta in dict.fromkeys(rope_thetas)
    ]
    min_difference, best_config = min(((difference(c), c) for c in candidates), key=lambda pair: pair[0])
    if not min_difference < 10 * SAME:
        raise MarsError(
            f"the logits of {type(actor).__name__} are not those of its weights as MarsRollout computes them (they "
            f"differ by {min_difference:.2g} of their spread): this version of Tunix is not known."
        )
    return best_config


@functools.partial(jax.jit, static_argnums=0, static_argnames="pad")
def _log_probs(
    model: LanguageModel, params: PyTree, prompts: Array, completions: Array, mask: Array, *, pad: int
) -> Array:
    # Column t is slot t. Positions count only valid tokens. Padding has the position of the last valid token before it,
    # or 0.
    num_rows, prompt_width = prompts.shape
    tokens = jnp.concatenate([prompts, completions], axis=1)
    num_columns = tokens.shape[1]
    is_valid = jnp.concatenate([prompts != pad, mask], axis=1)
    positions = jnp.maximum(jnp.cumsum(is_valid.astype(jnp.int32), axis=1) - 1, 0)
    start = jnp.zeros((num_rows,), jnp.int32)
    attention_mask = jnp.tril(jnp.ones((num_columns, num_columns), bool))[None] & is_valid[:, None]
    visible = Visible(first=start, positions=positions, slot=start, seen=attention_mask)
    output = model.forward(params, tokens, visible, model.init_cache(num_rows, num_columns))
    # The logits at column t predict the token in column t + 1, and completions begin in column `prompt_width`.
    log_p = jax.nn.log_softmax(model.unembed(params, output.hidden[:, prompt_width - 1 : -1]), axis=-1)
    return jax.lax.stop_gradient(jnp.take_along_axis(log_p, completions[:, :, None], axis=2)[..., 0])


def _base() -> ModuleType:
    """Import the module that defines Tunix's interface. It has many dependencies, so import it only on first use."""
    try:
        return importlib.import_module("tunix.rl.rollout.base_rollout")
    except ImportError as error:
        raise MarsError(
            f"Tunix cannot be imported ({error}): pip install google-tunix to use MarsRollout."
        ) from error


@functools.cache
def _rollout_class() -> type:
    return type(
        "MarsRollout", (Rollout, _base().BaseRollout), {"__doc__": Rollout.__doc__, "__module__": __name__}
    )


def __getattr__(name: str) -> type:
    # The class derives from one of Tunix's classes, so it is created only on first use.
    if name == "MarsRollout":
        return _rollout_class()
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
