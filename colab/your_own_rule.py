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
# A rule decides which drafted tokens are kept. This notebook writes one in fifteen lines, compares it with `exact` and
# `mars` on the same prompts and seeds, and plots what it accepts against what that costs. The models come with the
# package; a CPU takes a few minutes.
#
# ## Install
#
# `SOURCE` is what pip installs where the package is not there yet: a package name, a `git+https://` address, or a
# folder with a checkout. On a TPU runtime (Runtime, Change runtime type) the extra `tpu` names the libtpu that fits its
# JAX; on a GPU runtime the extra `cuda` does. Restart the session if pip replaced a JAX that was loaded already.

# %%
import glob
import importlib.util
import subprocess
import sys

SOURCE = "mars-jax"  # @param {type:"string"}

if importlib.util.find_spec("mars_jax") is None:
    on_tpu = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")
    extras = "evaluate,tpu" if on_tpu else "evaluate,cuda" if glob.glob("/dev/nvidia0") else "evaluate"
    address = f"mars-jax[{extras}] @ {SOURCE}" if "://" in SOURCE else f"{SOURCE}[{extras}]"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", address], check=True)

# %%
import os

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import mars_jax as mj

NEW = int(os.environ.get("NEW_TOKENS", "64"))
print(f"mars-jax {mj.__version__}, jax {jax.__version__}, {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Write it
#
# A rule may take the runner-up where the target is unsure: here, where the entropy of its distribution is above
# a bound. The base class sees to strict rows, stop tokens and padding. The bound is a field: another one compiles
# nothing, and each prompt may have its own.

# %%
from typing import Any

import flax.struct


@flax.struct.dataclass
class Unsure(mj.verify.Relaxed):
    """Relaxed where the entropy of the target's distribution is above `bound` nats."""

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
print(result.text[0])
print(
    f"tau {result.metrics.tau:.2f}, {result.metrics.relaxed_share:.1%} of the accepted draft tokens relaxed"
)

# %% [markdown]
# ## Compare it
#
# At a bound of infinity the rule is `exact`, bit for bit. Regret is what a token costs: nats between the target's best
# logit and the token's.

# %%
exact = run(mj.verify.exact())
assert run(Unsure(bound=jnp.float32(jnp.inf))).tokens == exact.tokens

rules = {
    "exact": {"exact": mj.verify.exact()},
    "entropy": {f"{b:g}": Unsure(bound=jnp.float32(b)) for b in (2.5, 2.0, 1.5, 1.0, 0.5)},
    "mars": {f"{t:g}": mj.verify.mars(theta=t) for t in (0.95, 0.9, 0.8, 0.7)},
}
found = {}
for name, settings in rules.items():
    for setting, rule in settings.items():
        metrics = run(rule).metrics
        found.setdefault(name, []).append((metrics.tau, metrics.regret / metrics.emitted))
        print(f"{name:8} {setting:>6}   tau {metrics.tau:.2f}   regret {found[name][-1][1]:.3f} nats a token")

# %%
for (name, points), mark in zip(found.items(), "so^", strict=True):
    plt.plot(*zip(*points, strict=True), f"{mark}-", label=name)
plt.xlabel("tau, tokens per forward of the target")
plt.ylabel("regret, nats a token")
plt.grid(alpha=0.3)
plt.legend()
plt.show()

# %% [markdown]
# In a file `gates.py` with a factory of the rule, every command takes it: `python -m mars_jax.generate --verify
# gates.py:unsure`, and `mars-jax benchmark` measures it with controls and intervals.
