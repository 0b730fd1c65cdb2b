# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Rollouts: GRPO with speculative decoding
#
# This notebook trains a policy with GRPO ([arXiv 2402.03300](https://arxiv.org/abs/2402.03300)), and a small draft
# speeds up sampling. Under `exact`, the samples follow the policy's distribution with any draft, so a draft that no
# longer fits the policy only reduces the speed. The draft can then be trained on its own rejected tokens. The models
# are part of the package.
#
# ## Install
#
# Upload a wheel next to this notebook (`pip wheel --no-deps .` in a checkout builds one), or set `SOURCE` to the path
# of a wheel or to a URL such as `git+https://HOST/OWNER/mars-jax`. The package is never installed from PyPI. The
# extras install the matching libtpu on a TPU, and CUDA on a GPU. If pip replaced a version of JAX that was already
# loaded, restart the session. Expect a minute.

# %%
import glob
import importlib.util
import subprocess
import sys

SOURCE = ""  # @param {type:"string"}

on_tpu, on_gpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/*"), glob.glob("/dev/nvidia0")
if importlib.util.find_spec("mars_jax") is None:
    source = (sorted(glob.glob("mars_jax-*.whl")) or [SOURCE])[-1]
    if "://" not in source and not (source.endswith(".whl") and glob.glob(glob.escape(source))):
        print("Upload a wheel of mars-jax, or set SOURCE to the path of a wheel or a Git address.")
    else:
        extras = "train,evaluate" + (",tpu" if on_tpu else ",cuda" if on_gpu else "")
        address = f"mars-jax[{extras}] @ {source}" if "://" in source else f"{source}[{extras}]"
        subprocess.run([sys.executable, "-m", "pip", "install", "-q", address], check=True)

# %%
import dataclasses
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from IPython.display import Image, display

import mars_jax as mj
from mars_jax.lab.pictures import BLUE, VERMILLION, picture
from mars_jax.lab.training import online

UPDATES = int(os.environ.get("UPDATES", "12"))
REFRESH = int(os.environ.get("REFRESH", "64"))
SEED = int(os.environ.get("SEED", "0"))
SAMPLES, NEW = 8, 32
print(f"mars-jax {mj.__version__}, jax {jax.__version__}, {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Policy, draft, reward
#
# The reward favours stories with dialogue: each quotation mark adds 0.25, up to a reward of 1. Twelve updates raise
# the mean reward from about 0.1 to at least 0.7.

# %%
policy = mj.load("tiny/target", dtype="float32")
small = mj.load("tiny/draft", dtype="float32")
draft = mj.drafters.load("model:tiny/draft", policy, num_draft_tokens=4, dtype="float32")
prompts = [
    "Once upon a time, there was a little girl named Lily.",
    "One day, a boy named Tim went to the park.",
    "The big dog and the small cat were friends.",
    "Sue had a red ball. She liked to play with it.",
]


def reward(text):
    return min(text.count('"'), 4) / 4


def rollout(policy, draft, seed):
    return mj.generate(
        policy,
        draft,
        prompts,
        samples=SAMPLES,
        temperature=1.0,
        max_new_tokens=NEW,
        batch_size=8,
        seed=seed,
        log_probs=True,
    )


# %% [markdown]
# ## One update
#
# The samples include the behaviour policy's log-probabilities, `temperature_log_prob`: log softmax(z / T) over the
# whole vocabulary. Shapes are fixed, so nothing compiles after the first update. Expect 2 minutes for twelve updates.

# %%
WIDTH = 64
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(2e-4))


def arrays(result):
    """Return (tokens, mask of new tokens, log-probabilities [B, WIDTH], advantages f32[B]), and the mean reward."""
    count = len(result.completions)
    tokens, mask = np.zeros((count, WIDTH), np.int32), np.zeros((count, WIDTH), np.float32)
    old = np.zeros((count, WIDTH), np.float32)
    for row, c in enumerate(result.completions):
        first, new = len(c.request.prompt_tokens), c.tokens
        tokens[row, : first + len(new)] = [*c.request.prompt_tokens, *new]
        mask[row, first : first + len(new)] = 1
        old[row, first : first + len(new)] = c.log_probs.temperature_log_prob
    rewards = np.array([reward(text) for text in result.text]).reshape(-1, SAMPLES)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-3)
    return jax.tree.map(
        jnp.asarray, (tokens, mask, old, advantages.reshape(-1).astype(np.float32))
    ), rewards.mean()


@jax.jit
def update(params, state, tokens, mask, old, advantages):
    def loss(params):
        visible = mj.types.Visible.causal(jnp.zeros((tokens.shape[0],), jnp.int32), WIDTH)
        output = policy.model.forward(params, tokens, visible, policy.model.init_cache(*tokens.shape))
        log_p = jax.nn.log_softmax(policy.model.unembed(params, output.hidden)[:, :-1])
        new = jnp.take_along_axis(log_p, tokens[:, 1:, None], axis=2)[..., 0]
        ratio = jnp.exp((new - old[:, 1:]) * mask[:, 1:])
        gain = jnp.minimum(ratio * advantages[:, None], jnp.clip(ratio, 0.8, 1.2) * advantages[:, None])
        return -jnp.sum(gain * mask[:, 1:]) / jnp.sum(mask)

    value, gradient = jax.value_and_grad(loss)(params)
    change, state = optimizer.update(gradient, state, params)
    return optax.apply_updates(params, change), state, value


# %%
compilations = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compilations.append(event) if event.endswith("backend_compile_duration") else None
)

state = optimizer.init(policy.params)
taus, rewards, compiled, completions = [], [], [], []
for step in range(UPDATES):
    earlier = len(compilations)
    result = rollout(policy, draft, seed=100_000 * SEED + 1000 * step)
    batch, mean = arrays(result)
    if step == 0:
        # Recompute the log-probabilities of the rollout by teacher forcing.
        visible = mj.types.Visible.causal(jnp.zeros((len(batch[0]),), jnp.int32), WIDTH)
        out = policy.model.forward(policy.params, batch[0], visible, policy.model.init_cache(*batch[0].shape))
        log_p = jax.nn.log_softmax(policy.model.unembed(policy.params, out.hidden)[:, :-1])
        forced = jnp.take_along_axis(log_p, batch[0][:, 1:, None], axis=2)[..., 0]
        difference = float(jnp.max(jnp.abs(forced - batch[2][:, 1:]) * batch[1][:, 1:]))
        print(f"log-probabilities differ from teacher forcing by {difference:.1e}")
    params, state, value = update(policy.params, state, *batch)
    policy = dataclasses.replace(policy, params=params)
    taus.append(result.metrics.tau)
    completions += result.completions
    rewards.append(mean)
    compiled.append(len(compilations) - earlier)
    print(f"update {step}: reward {mean:.2f}, tau {taus[-1]:.2f}, {compiled[-1]} compilations")

# %% [markdown]
# ## Refresh the draft
#
# As the policy changes, tau falls because the draft no longer matches it. The draft is trained on the last four
# rollouts, at the positions where its tokens were rejected. Held-out text protects against forgetting: if the
# expected tau on that text falls by more than 3%, the update is reverted. Expect a minute.

# %%
held_out = [
    policy.encode("The sun was warm and the birds sang. The children played in the garden all day long.")
]
refiner = online.Refiner(
    policy.model,
    small.model,
    draft.params,
    depth=4,
    held_out=held_out,
    target_params=policy.params,
    width=WIDTH,
    temperature=1.0,
)
refiner.see_completions(completions[-4 * len(result.completions) :])
refinement = refiner.refine(policy.params, steps=REFRESH)
fresh = draft._replace(params=refinement.params)
verdict = "kept" if refinement.kept else "rolled back"
print(f"held-out tau {refinement.before:.2f} before and {refinement.after:.2f} after, {verdict}")

stale, renewed = (rollout(policy, drafter, seed=77_000) for drafter in (draft, fresh))
assert stale.tokens == renewed.tokens  # samples do not depend on the draft
print(f"tau with the stale draft {stale.metrics.tau:.2f}, refreshed {renewed.metrics.tau:.2f}")

# %% [markdown]
# The left panel shows the benefit of training, and the right panel its cost: tau falls while the policy learns, and
# recovers when the draft is refreshed. The samples do not depend on the draft.

# %%
caption = f"tiny/target drafted by tiny/draft, {len(prompts)} prompts, {SAMPLES} samples of each"
with picture([Path("rollouts.png")], columns=2, panel=(4.6, 3.2), caption=caption) as ((ax1, ax2),):
    ax1.plot(rewards, "o-", color=BLUE)
    ax1.set(xlabel="update", ylabel="mean reward", ylim=(0, 1), title="the policy learns")
    ax2.plot([*taus, stale.metrics.tau], "o-", color=BLUE, label="the draft as it was")
    ax2.plot([UPDATES], [renewed.metrics.tau], "s", color=VERMILLION, label="refreshed")
    ax2.set(xlabel="update", ylabel="tau, tokens per forward of the policy", title="its draft falls behind")
display(Image("rollouts.png"))

# %% [markdown]
# The policy's answers to one prompt, before and after training:

# %%
for when, completion in (("before", completions[0]), ("after", renewed.completions[0])):
    print(f"{when:7} {prompts[0]}|{completion.text}\n")
