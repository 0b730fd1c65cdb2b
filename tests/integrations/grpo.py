"""Comparison of `MarsRollout` with `VanillaRollout` on the same tokens: GRPO with a two-layer Qwen3 in an RLCluster.

python -m tests.integrations.grpo STEPS FILE    writes the losses and weights of both as JSON
"""

import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from tests.integrations.tunix_like.stand_in import Tokenizer

PROMPTS = ["abcabcabc", "the cat sat on the mat", "xyz", "one two three"]


def part(name: str) -> Any:
    """Import a module of Tunix, which is not a dependency."""
    return importlib.import_module(f"tunix.{name}")


def actor(seed: int) -> nnx.Module:
    """Return a random Qwen3 with two layers."""
    qwen3 = part("models.qwen3.model")
    sizes = {"num_layers": 2, "vocab_size": 64, "embed_dim": 32, "hidden_dim": 64}
    heads = {"num_heads": 4, "head_dim": 16, "num_kv_heads": 2}
    settings = {"rope_theta": 10_000, "norm_eps": 1e-6, "use_tied_embedding": True}
    return qwen3.Qwen3(qwen3.ModelConfig(**sizes, **heads, **settings), rngs=nnx.Rngs(seed))


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Return the fraction of letters early in the alphabet, per completion."""
    return [float(np.mean([c < "S" for c in text] or [0])) for text in completions]


def job(engine: Any, *, steps: int, iterations: int = 2) -> tuple[list[float], nnx.Module, Any]:
    """Run GRPO and return the losses, the trained actor and the rollout."""
    clusters = part("rl.rl_cluster")
    grpo_learner = part("rl.grpo.grpo_learner")
    base_rollout = part("rl.rollout.base_rollout")

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("fsdp", "tp"))
    roles = clusters.Role
    config = clusters.ClusterConfig(
        role_to_mesh=dict.fromkeys((roles.ACTOR, roles.REFERENCE, roles.ROLLOUT), mesh),
        rollout_engine=engine,
        training_config=clusters.RLTrainingConfig(
            actor_optimizer=optax.sgd(0.5), eval_every_n_steps=1000, max_steps=steps * iterations
        ),
        rollout_config=base_rollout.RolloutConfig(
            max_tokens_to_generate=16,
            max_prompt_length=32,
            kv_cache_size=64,
            temperature=1.0,
            top_p=1.0,
            return_logprobs=True,
        ),
    )
    trained = actor(0)
    with mesh:
        cluster = clusters.RLCluster(
            actor=trained, reference=actor(1), tokenizer=Tokenizer(), cluster_config=config
        )
        losses: list[float] = []
        trainer: Any = cluster.actor_trainer
        log = trainer._log_metrics

        def record(loss: Any, *arguments: Any, **options: Any) -> Any:
            losses.append(float(np.asarray(loss)))
            return log(loss, *arguments, **options)

        trainer._log_metrics = record
        algorithm = grpo_learner.GRPOConfig(num_generations=2, num_iterations=iterations, beta=0.04)
        learner = grpo_learner.GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=reward)
        learner.train([{"prompts": np.array(PROMPTS[i % 2 * 2 : i % 2 * 2 + 2])} for i in range(steps)])
    return losses, trainer.model, cluster.rollout


def engines() -> tuple[type, type, list[Any]]:
    """Return a `MarsRollout` that records its outputs, a `VanillaRollout` that replays them, and the record."""
    base_rollout = part("rl.rollout.base_rollout")
    vanilla_rollout = part("rl.rollout.vanilla_rollout")

    from mars_jax.integrations import tunix

    record: list[Any] = []

    class Recorded(tunix.MarsRollout):
        def generate(self, prompts, rollout_config, **kwargs):
            record.append(super().generate(prompts, rollout_config, **kwargs))
            return record[-1]

    class Replayed(vanilla_rollout.VanillaRollout):
        def __init__(self, *, rollout_actor, tokenizer, mesh, rollout_config):
            adapter = part("generate.tokenizer_adapter").TokenizerAdapter(tokenizer)
            model = rollout_actor.config
            heads = {"num_kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
            slots = {"cache_size": rollout_config.kv_cache_size, "num_layers": model.num_layers}
            size = base_rollout.CacheConfig(**slots, **heads)
            # Copy the model, as RLCluster does for its vanilla engine.
            graph, state = nnx.split(rollout_actor)
            copied = nnx.merge(graph, jax.tree.map(jnp.copy, state))
            super().__init__(copied, adapter, size)
            self._outputs = iter(list(record))

        def generate(self, prompts, rollout_config, **kwargs):
            return next(self._outputs)

    return Recorded, Replayed, record


def compare(steps: int) -> dict[str, Any]:
    """Return the losses of both, and the largest differences of their log-probabilities and weights."""
    recorded, replayed, record = engines()
    mars_losses, mars_actor, rollout = job(partial(recorded, drafter="ngram"), steps=steps)
    vanilla_losses, vanilla_actor, vanilla = job(replayed, steps=steps)
    last = record[-1]
    completions = np.zeros((len(last.tokens), 16), np.int32)
    for row, tokens in enumerate(last.tokens):
        completions[row, : len(tokens)] = tokens
    inputs = jnp.asarray(last.left_padded_prompt_tokens), jnp.asarray(completions)
    mask = completions != 0
    gap = np.abs(np.asarray(rollout.get_per_token_logps(*inputs) - vanilla.get_per_token_logps(*inputs)))
    trained = (nnx.state(model, nnx.Param) for model in (mars_actor, vanilla_actor))
    weights = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), *trained)
    logps = np.concatenate(last.logprobs)
    return {
        "losses with MarsRollout": mars_losses,
        "losses with VanillaRollout on the same tokens": vanilla_losses,
        "largest difference of losses": float(np.max(np.abs(np.subtract(mars_losses, vanilla_losses)))),
        "largest difference of trained weights": max(jax.tree.leaves(weights)),
        "largest difference of per-token log-probabilities": float(gap[mask].max()),
        "log-probabilities of samples are numbers": bool(np.isfinite(logps).all() and (logps <= 0).all()),
        "tau of the last rollout": rollout.metrics.tau,
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(compare(int(sys.argv[1]))), encoding="utf-8")
