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
# MARS (arXiv 2601.15498) keeps the target's second token where the target hardly prefers its first one. This notebook
# measures what that is worth on the largest published pair that this machine holds: speed and tau beside the strict
# rule, the curve of theta, the margins at which drafts are refused, and every rule at its own best draft length.
# Without an accelerator it takes the pair that comes with the package, about 15 minutes on two cores.
#
# ## Install
#
# Upload a wheel next to this notebook (`pip wheel --no-deps .` in a checkout makes one), or set `SOURCE` to the path of
# a wheel or to an address such as `git+https://HOST/OWNER/mars-jax`. The package is never installed by its name only.
# The extras add the libtpu that fits JAX on a TPU, and CUDA on a GPU. Restart the session if pip replaced a JAX that
# was loaded already. Expect a minute.

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
# A recipe is the flags of a pair: target, head, question sets, temperatures. The largest one whose weights fit is
# taken. Only configs are downloaded here. Set an `HF_TOKEN` in the runtime's secrets for checkpoints that ask for one.
# Expect half a minute.

# %%
import json
import os
from pathlib import Path

import jax
from IPython.display import Image, Markdown, display

from mars_jax.lab.commands.benchmark import main, parse
from mars_jax.lab.recipes.needs import check_memory
from mars_jax.utils.errors import MarsError

OUTPUT = Path(os.environ.get("OUTPUT", "reproduce"))
PROBLEMS = int(os.environ.get("PROBLEMS", "24"))  # of each question set
LENGTHS = os.environ.get("LENGTHS", "3 5 8").split()  # of drafts, that are tried
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


chosen = next((name for name in LARGEST_FIRST if accelerated and fits(name)), "embedded")
RECIPE = os.environ.get("RECIPE", chosen)
print("recipe:", RECIPE)

# %% [markdown]
# ## Measure
#
# First as the paper's table was, at temperature 1: the target alone, the strict rule, MARS at several thetas, and its
# controls. Then every rule at the draft length that is best for it, lossless rules too, since a longer draft is another
# way to get more tokens per step (arXiv 2607.08690). If the runtime is lost, this cell goes on where it was. Expect 10
# minutes on two cores, and about an hour for an 8B pair; the first line says how much memory it takes.
#
# Programs that a model writes for HumanEval are not run here. They are in `samples-*.jsonl` below `OUTPUT`.
# docs/benchmark.md shows how to score them in a container; after that, this cell fills in the scores.

# %%
flags = ["--recipe", RECIPE, "--problems", str(PROBLEMS), "--temperatures", "1", "--controls", "all", *mesh]
flags += ["--thetas", "0.9", "0.95", "0.85", "0.8", "--tune", *LENGTHS]
if RECIPE != "embedded":
    flags += ["--task", "humaneval=openai/openai_humaneval", "--task", "gsm8k=openai/gsm8k"]
assert main([*flags, "--output", str(OUTPUT)]) == 0

# %% [markdown]
# ## Beside the paper
#
# Speed is over the target alone, and tau counts the token that the target adds to every step. The paper measured on
# H100s; means are over its six question sets, and here over those that were taken.

# %%
display(Markdown((OUTPUT / "recipe.md").read_text()))

# %% [markdown]
# ## Theta
#
# A lower theta accepts more. Whiskers are 95% intervals over the problems.

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
# A lossy rule pays where its speed over the best lossless one is above 1 by more than its interval, at a score that has
# not moved by more than its own.

# %%
display(Markdown((OUTPUT / "tuned" / "table.md").read_text()))

# %% [markdown]
# ## Check this device
#
# Every kernel against its reference, and what a step takes. `check.json` has no names of hosts or users: send it back
# with a report. Expect 5 minutes.

# %%
if os.environ.get("CHECK", "1") == "1":
    from mars_jax.lab.commands.check.device_check import main as check

    check(["--output", str(OUTPUT / "check.json")])
