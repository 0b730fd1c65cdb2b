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
# # Reproduce MARS
#
# MARS (arXiv 2601.15498) accepts the target's second best token if the target barely prefers its best one. This
# notebook measures the effect on the largest published pair that fits this machine: speed and tau compared with the
# strict rule, results for several values of theta, the margins at which drafts are rejected, and every rule at its
# own best draft length. Without an accelerator, it uses the pair in the package and takes about 15 minutes on two
# cores.
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

# %% [markdown]
# ## The recipe
#
# A recipe contains the settings for a pair: target, head, question sets and temperatures. This cell chooses the
# largest recipe whose weights fit, and downloads only configs. If a checkpoint requires a token, set `HF_TOKEN` in
# the secrets of the runtime. Expect half a minute.

# %%
import json
import os
from pathlib import Path

import jax
from IPython.display import Image, Markdown, display

from mars_jax import MarsError
from mars_jax.lab.commands.benchmark import main, parse
from mars_jax.lab.recipes.needs import check_memory

OUTPUT = Path(os.environ.get("OUTPUT", "reproduce"))
PROBLEMS = int(os.environ.get("PROBLEMS", "24"))  # per question set
LENGTHS = os.environ.get("LENGTHS", "3 5 8").split()  # draft lengths to try
LARGEST_FIRST = ("llama-3.3-70b", "qwen3-32b", "vicuna-13b", "llama-3.1-8b", "qwen3-8b", "qwen2.5-coder-1.5b")
accelerated = jax.default_backend() != "cpu"
mesh = ["--mesh", f"model={jax.device_count()}"] if jax.device_count() > 1 else []


def fits(name):
    try:
        args = parse(["--recipe", name, *mesh, "--output", str(OUTPUT)]).parts["tuned"]
        check_memory(args, name)
    except MarsError as error:
        print(f"{name}: {error}")
        return False
    return True


largest = next((name for name in LARGEST_FIRST if accelerated and fits(name)), "embedded")
RECIPE = os.environ.get("RECIPE", largest)
print("recipe:", RECIPE)

# %% [markdown]
# ## Measure
#
# The first run follows the paper's table, at temperature 1: the target without a draft, the strict rule, MARS at
# several thetas, and its controls. The second run measures every rule at its best draft length, including lossless
# rules, because a longer draft also increases the number of tokens per step (arXiv 2607.08690). If the runtime is
# lost, run this cell again to continue. Expect 10 minutes on two cores, and about an hour for an 8B pair. The first
# line of output states the required memory.
#
# Programs that a model writes for HumanEval are not run here, but stored in `samples-*.jsonl` under `OUTPUT`.
# docs/benchmark.md shows how to score them in a container. Run this cell again afterwards to add the scores.

# %%
flags = ["--recipe", RECIPE, "--problems", str(PROBLEMS), "--temperatures", "1", "--controls", "all", *mesh]
flags += ["--thetas", "0.9", "0.95", "0.85", "0.8", "--tune", *LENGTHS]
if RECIPE != "embedded":
    flags += ["--task", "humaneval=openai/openai_humaneval", "--task", "gsm8k=openai/gsm8k"]
assert main([*flags, "--output", str(OUTPUT)]) == 0

# %% [markdown]
# ## Comparison with the paper
#
# Speed is relative to the target without a draft, and tau includes the token that the target adds in every step. The
# paper used H100s. Its means are over six question sets; the means here are over the sets that were measured.

# %%
display(Markdown((OUTPUT / "recipe.md").read_text()))

# %% [markdown]
# ## Theta
#
# A lower theta accepts more tokens. Whiskers are 95% intervals over the problems.

# %%
display(Image(OUTPUT / "paper" / "tau_theta.png"))
summary = json.loads((OUTPUT / "paper" / "summary.json").read_text())
for table in summary["tables"]:
    for arm in table["arms"]:
        if arm["role"] in ("strict", "rule"):
            low, high = arm["intervals"]["tau"]
            score = "not scored" if arm["score"] is None else f"score {100 * arm['score']:.1f}"
            print(f"{table['task']}: {arm['arm']:18} tau {arm['tau']:.2f} [{low:.2f}, {high:.2f}], {score}")

# %% [markdown]
# ## Every rule at its own length
#
# A lossy rule is worth using if its speed relative to the best lossless rule is significantly above 1 and its score
# does not change significantly.

# %%
display(Markdown((OUTPUT / "tuned" / "table.md").read_text()))

# %% [markdown]
# ## Check this device
#
# This cell compares every kernel with its reference and measures the time of a step. `check.json` contains no host or
# user names, so you can attach it to bug reports. Expect 5 minutes.

# %%
if os.environ.get("CHECK", "1") == "1":
    from mars_jax.lab.commands.check.device_check import main as check

    check(["--output", str(OUTPUT / "check.json")])
