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
# # A rule of your own
#
# A rule decides which drafted tokens are accepted. This notebook defines a rule in fifteen lines, compares it with
# `exact` and `mars` on the same prompts and seeds, and plots tau against its cost. The models are part of the
# package.
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
import os
from pathlib import Path

import jax
import jax.numpy as jnp
from IPython.display import Image, display

import mars_jax as mj
from mars_jax.lab.pictures import OTHER, look, picture

NEW = int(os.environ.get("NEW_TOKENS", "64"))
print(f"mars-jax {mj.__version__}, jax {jax.__version__}, {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Define the rule
#
# This rule accepts the runner-up if the target is unsure, that is, if the entropy of its distribution is above a
# bound. The base class handles strict rows, stop tokens and padding. The bound is a field of the rule: changing its
# value does not trigger recompilation, and each prompt may have its own value. Expect 20 seconds.

# %%
from typing import Any

import flax.struct


@flax.struct.dataclass(frozen=True)
class Unsure(mj.verify.Relaxed):
    """Accept the runner-up at positions where the target's entropy is above `bound` nats."""

    bound: Any

    def low(self, evidence):
        log_p = jax.nn.log_softmax(evidence.logits)
        return -jnp.sum(jnp.exp(log_p) * log_p, axis=-1) > self.bound[:, None]


# %%
target = mj.load("tiny/target", dtype="float32")
draft = mj.drafters.load("model:tiny/draft", target, num_draft_tokens=5, dtype="float32")
prompts = ["Once upon a time", "One day, a cat", "Tim and Sue went", "The old dog"]


def run(rule):
    return mj.generate(target, draft, prompts, verify=rule, max_new_tokens=NEW, log_probs=True)


result = run(Unsure(bound=jnp.float32(1.5)))
for prompt, text in zip(prompts, result.text, strict=True):
    print(f"{prompt}|{text}\n")
print(
    f"tau {result.metrics.tau:.2f}, {result.metrics.relaxed_share:.1%} of the accepted draft tokens relaxed"
)

# %% [markdown]
# ## Compare it
#
# With an infinite bound, the output is the same as with `exact`, bit for bit. Regret is the cost of a token: the
# difference in nats between the target's best logit and the logit of the token. Expect 40 seconds.

# %%
exact = run(mj.verify.exact())
assert run(Unsure(bound=jnp.float32(jnp.inf))).tokens == exact.tokens

rules = {
    "exact": {"exact": mj.verify.exact()},
    "entropy": {f"{b:g}": Unsure(bound=jnp.float32(b)) for b in (2.5, 2.0, 1.5, 1.0, 0.5)},
    "mars": {f"{t:g}": mj.verify.mars(theta=t) for t in (0.95, 0.9, 0.8, 0.7)},
}
curves = {}
for name, settings in rules.items():
    for setting, rule in settings.items():
        metrics = run(rule).metrics
        curves.setdefault(name, []).append((metrics.tau, metrics.regret_per_token, setting))
        print(
            f"{name:8} {setting:>6}   tau {metrics.tau:.2f}   regret {metrics.regret_per_token:.3f} nats per token"
        )

# %% [markdown]
# The rule with the lower curve is better, because it reaches the same tau with less regret. The numbers next to the
# points are the bounds and the thetas. Four prompts show the shape of the curves, but do not determine which curve is
# lower: `mars-jax benchmark` computes intervals.

# %%
looks = {"exact": look("exact"), "entropy": OTHER, "mars": look("mars")}
caption = f"tiny/target drafted by tiny/draft, {len(prompts)} prompts of {NEW} new tokens, temperature 0"
with picture([Path("rules.png")], panel=(6, 3.8), caption=caption) as ((axis,),):
    for name, points in curves.items():
        taus, regrets, settings = zip(*points, strict=True)
        axis.plot(taus, regrets, label=name, **looks[name].line)
        for tau, regret, setting in points[: len(points) * (name != "exact")]:
            axis.annotate(setting, (tau, regret), (5, -9), textcoords="offset points", fontsize=8)
    axis.set(xlabel="tau, tokens per forward of the target", ylabel="regret, nats per token")
display(Image("rules.png"))

# %% [markdown]
# If a file `gates.py` contains a function that returns the rule, every command accepts it: `python -m
# mars_jax.generate --verify gates.py:unsure`, and `mars-jax benchmark` measures it with controls and intervals.
