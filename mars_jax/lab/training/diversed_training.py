"""Train DIVERSED's head: REINFORCE on what a text is worth, and on how much of the draft is accepted.

R texts, L tokens of a row, V vocabulary. Source: arXiv 2604.07622, section 3 (reward of the task plus acceptance).
Texts that the rule writes follow v = w p + (1 - w) q token by token, so that the gradient of the expected reward is
that of the sum of log v, times the reward less its mean over the texts. Acceptance, sum min(v, q) at a position, has a
gradient of its own. Oracle: the enumerated expectation of a small vocabulary, in tests/lab/training/test_diversed.py.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from mars_jax.contrib.models import mixer
from mars_jax.core.types import LanguageModel, PyTree
from mars_jax.lab.training.objectives import read


class Rollouts(NamedTuple):
    """Texts that the rule wrote at temperature 1, without filters."""

    tokens: Any  # i32[R, L]
    written: Any  # bool[R, L]; by the rule: not the prompt, nor what pads the row
    reward: Any  # f32[R]


class Models(NamedTuple):
    """Whose distributions are mixed."""

    target: LanguageModel
    teacher: PyTree
    draft: LanguageModel
    params: PyTree


def surrogate(
    head: PyTree, models: Models, rollouts: Rollouts, *, acceptance: float = 0.5
) -> tuple[Array, dict[str, Array]]:
    """A loss whose gradient is that of -(reward + `acceptance` * share accepted), and its figures."""
    tokens = rollouts.tokens[:, :-1]
    segments = jnp.zeros_like(tokens)
    output = read(models.target, models.teacher, tokens, segments)
    log_p = jax.nn.log_softmax(models.target.unembed(models.teacher, output.hidden))
    drafted = read(models.draft, models.params, tokens, segments)
    log_q = jax.nn.log_softmax(models.draft.unembed(models.params, drafted.hidden))
    log_p, log_q, hidden, known = jax.lax.stop_gradient((log_p, log_q, output.hidden, drafted.hidden))
    odds = mixer.logit(head, hidden, log_p, log_q, known)[..., None]
    log_v = jnp.logaddexp(jax.nn.log_sigmoid(odds) + log_p, jax.nn.log_sigmoid(-odds) + log_q)
    written = rollouts.written[:, 1:].astype(jnp.float32)
    count = jnp.maximum(jnp.sum(written), 1.0)
    said = jnp.take_along_axis(log_v, rollouts.tokens[:, 1:, None], axis=-1)[..., 0]
    advantage = rollouts.reward - jnp.mean(rollouts.reward)
    accepted = jnp.sum(jnp.sum(jnp.exp(jnp.minimum(log_v, log_q)), axis=-1) * written) / count
    worth = jnp.mean(advantage * jnp.sum(said * written, axis=1))
    weight = jnp.sum(jax.nn.sigmoid(odds[..., 0]) * written) / count
    figures = {"reward": jnp.mean(rollouts.reward), "accepted": accepted, "weight": weight}
    return -(worth + acceptance * accepted), figures


def train(
    models: Models,
    rollouts: Callable[[PyTree, int], Rollouts],
    work: str | os.PathLike[str],
    *,
    hidden_size: int,
    draft_hidden_size: int = 0,
    steps: int = 40,
    acceptance: float = 0.5,
    learning_rate: float = 1e-2,
    seed: int = 0,
) -> PyTree:
    """Alternate between texts and steps of Adam; killed and called again it goes on from the last step.

    Args:
      models: target and draft.
      rollouts: (head, step) -> texts that the rule writes with this head.
      work: directory of the checkpoints.
      hidden_size: of the target.
      draft_hidden_size: of the draft; 0: the head does not read its hidden states.
      steps: texts, and updates.
      acceptance: what a share of 1 is worth beside a reward of 1.
      learning_rate: of Adam.
      seed: of the first head.

    Returns:
      Params for `contrib.diversed`.
    """
    import orbax.checkpoint as ocp

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(learning_rate))
    head = mixer.init_params(hidden_size, jax.random.key(seed), draft_hidden_size=draft_hidden_size)
    state = optimizer.init(head)

    @jax.jit
    def update(head: PyTree, state: PyTree, teacher: PyTree, params: PyTree, found: Rollouts):
        both = models._replace(teacher=teacher, params=params)
        (_, figures), gradient = jax.value_and_grad(surrogate, has_aux=True)(
            head, both, found, acceptance=acceptance
        )
        changes, state = optimizer.update(gradient, state, head)
        return optax.apply_updates(head, changes), state, figures

    options = ocp.CheckpointManagerOptions(max_to_keep=2, create=True)
    with ocp.CheckpointManager(Path(work).absolute() / "checkpoints", options=options) as manager:
        done = manager.latest_step() or 0
        if done:
            kept = {"head": head, "state": state}
            restored = manager.restore(done, args=ocp.args.StandardRestore(kept))  # pyright: ignore
            head, state = restored["head"], restored["state"]
        for step in range(done, steps):
            found = Rollouts(*map(jnp.asarray, rollouts(head, step)))
            head, state, figures = update(head, state, models.teacher, models.params, found)
            shown = ", ".join(f"{name} {float(x):.3f}" for name, x in figures.items())
            print(f"step {step + 1} of {steps}: {shown}", flush=True)
            manager.save(step + 1, args=ocp.args.StandardSave({"head": head, "state": state}))  # pyright: ignore
            manager.wait_until_finished()
    return jax.tree.map(np.asarray, head)
