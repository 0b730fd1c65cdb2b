"""Training of DIVERSED's head to maximise the reward of completions (with REINFORCE) and the acceptance rate.

R completions, L tokens per row, V vocabulary. Source: arXiv 2604.07622, section 3 (task reward plus acceptance).
Each token of a completion is sampled from v = w p + (1 - w) q. The policy gradient of the expected reward is therefore
the gradient of the sum of log v, weighted by the difference between the reward and its mean over the completions. The
acceptance rate at a position, sum min(v, q), is differentiated directly. Tested against the expectation over a small
vocabulary, computed by enumeration, in tests/contrib/test_diversed.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from mars_jax.contrib.models import mixer
from mars_jax.contrib.rules.diversed import Diversed
from mars_jax.contrib.teaching import Training, forward_packed
from mars_jax.core.rule import LoadedRule
from mars_jax.core.types import LanguageModel, PyTree
from mars_jax.drafters import LoadedDrafter, language_model
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.generation import generate

UPDATES, ROLLOUTS, CHAIN, ANSWER_TOKENS = 40, 48, 5, 128
"""Number of updates, completions per update, tokens per draft, and maximum tokens per completion."""
ACCEPTANCE, LEARNING_RATE = 0.5, 1e-2
"""Weight of the acceptance rate relative to the reward, and learning rate of Adam."""


class Rollouts(NamedTuple):
    """Completions and their rewards. The rule decoded the completions at temperature 1, without filters."""

    tokens: Any  # i32[R, L]
    written: Any  # bool[R, L]; tokens decoded by the rule, excluding the prompt and padding
    reward: Any  # f32[R]


def surrogate(
    head: PyTree,
    rollouts: Rollouts,
    params: tuple[PyTree, PyTree],
    *,
    models: tuple[LanguageModel, LanguageModel],
) -> tuple[Array, dict[str, Array]]:
    """Return a loss whose gradient is that of -(reward + ACCEPTANCE * acceptance rate), and metrics to log.

    `params` and `models` are pairs, for the target and the draft model.
    """
    target, draft = models
    tokens = rollouts.tokens[:, :-1]
    segments = jnp.zeros_like(tokens)
    output = forward_packed(target, params[0], tokens, segments)
    log_p = jax.nn.log_softmax(target.unembed(params[0], output.hidden))
    drafted = forward_packed(draft, params[1], tokens, segments)
    log_q = jax.nn.log_softmax(draft.unembed(params[1], drafted.hidden))
    log_p, log_q, hidden, draft_hidden = jax.lax.stop_gradient((log_p, log_q, output.hidden, drafted.hidden))
    log_odds = mixer.weight_log_odds(head, hidden, log_p, log_q, draft_hidden)[..., None]
    # log v for v = w p + (1 - w) q, with the target's weight w = sigmoid(log_odds).
    log_v = jnp.logaddexp(jax.nn.log_sigmoid(log_odds) + log_p, jax.nn.log_sigmoid(-log_odds) + log_q)
    is_written = rollouts.written[:, 1:].astype(jnp.float32)
    num_written = jnp.maximum(jnp.sum(is_written), 1.0)
    log_prob = jnp.take_along_axis(log_v, rollouts.tokens[:, 1:, None], axis=-1)[..., 0]
    # REINFORCE, with the mean reward as the baseline.
    advantage = rollouts.reward - jnp.mean(rollouts.reward)
    # The sum of min(v, q) over the vocabulary is the probability of acceptance at a position.
    accepted_share = jnp.sum(jnp.sum(jnp.exp(jnp.minimum(log_v, log_q)), axis=-1) * is_written) / num_written
    reward_term = jnp.mean(advantage * jnp.sum(log_prob * is_written, axis=1))
    mean_weight = jnp.sum(jax.nn.sigmoid(log_odds[..., 0]) * is_written) / num_written
    figures = {"reward": jnp.mean(rollouts.reward), "accepted": accepted_share, "weight": mean_weight}
    return -(reward_term + ACCEPTANCE * accepted_share), figures


def rollouts(
    target: Pretrained,
    small: Pretrained,
    prompts: Sequence[Sequence[int]],
    reward: Callable[[int, str], float],
    *,
    seed: int = 0,
) -> Callable[[PyTree, np.ndarray], Rollouts]:
    """Return a function `(head, draws) -> Rollouts` that decodes prompts with the rule. Pass it to `fit` as `prepare`.

    Args:
      target, small: target and draft model, which have the same vocabulary.
      prompts: token ids of the prompts.
      reward: function `(index of the prompt, text of the completion) -> reward`.
      seed: base seed. Draw i uses the seed `seed + i` and prompt `i % len(prompts)`.
    """
    drafter = language_model(small.model, CHAIN, sample=True, vocab_size=target.config.vocab_size)
    length = max(map(len, prompts)) + ANSWER_TOKENS

    def prepare(head: PyTree, draws: np.ndarray) -> Rollouts:
        prompt_numbers = [int(draw) % len(prompts) for draw in draws]
        answers = generate(
            target,
            LoadedDrafter(drafter, small.params),
            [prompts[i] for i in prompt_numbers],
            verify=LoadedRule(Diversed(), head),
            temperature=1.0,
            seed=[(seed + int(draw)) % 2**32 for draw in draws],
            max_new_tokens=ANSWER_TOKENS,
            batch_size=len(draws),
        )
        tokens, written = np.zeros((len(draws), length), np.int32), np.zeros((len(draws), length), bool)
        for row, (number, answer) in enumerate(zip(prompt_numbers, answers.tokens, strict=True)):
            ids = [*prompts[number], *answer]
            tokens[row, : len(ids)] = ids
            written[row, len(prompts[number]) : len(ids)] = True
        rewards = [reward(number, text) for number, text in zip(prompt_numbers, answers.text, strict=True)]
        return Rollouts(tokens, written, np.asarray(rewards, np.float32))

    return prepare


def mixer_training(target: Pretrained, small: Pretrained, *, seed: int = 0) -> Training:
    """Return the setup that trains the head of `contrib.diversed`.

    Pass `(target.params, small.params)` as the frozen params of the loss. The batches are the `draws` of `rollouts`.

    Args:
      target, small: target and draft model, which have the same vocabulary.
      seed: seed of the head's initial params.
    """
    import grain
    import optax

    models = target.model, small.model
    sizes = target.config.hidden_size, small.config.hidden_size
    return Training(
        init=lambda: mixer.init_params(sizes[0], jax.random.key(seed), draft_hidden_size=sizes[1]),
        loss=lambda head, batch, params: surrogate(head, batch, params, models=models),
        batches=grain.MapDataset.source(range(UPDATES * ROLLOUTS)).batch(ROLLOUTS),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adam(LEARNING_RATE)),
        steps=UPDATES,
        step_tokens=ROLLOUTS,
    )
