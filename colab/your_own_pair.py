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
# # Your own pair
#
# This notebook decodes with a target and a draft from the Hugging Face hub on a TPU. It first estimates the memory
# and the time of a step from the configs, and then compares the pair with the target without a draft. On a machine
# without a TPU it uses the pair in the package.
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
# ## The pair
#
# Both models must have the same vocabulary. If there is an EAGLE-3 head for the target, decoding is even faster:
# `DRAFT = "eagle:OWNER/HEAD"`. If a checkpoint requires a token, set `HF_TOKEN` in the secrets of the runtime.

# %%
import os
from pathlib import Path

accelerator = bool(on_tpu or on_gpu)
TARGET = os.environ.get("TARGET", "Qwen/Qwen3-1.7B" if accelerator else "tiny/target")
DRAFT = os.environ.get("DRAFT", "model:Qwen/Qwen3-0.6B" if accelerator else "model:tiny/draft")
TOPOLOGY = os.environ.get("TOPOLOGY", "v5e:1x1")  # Colab has v5e-1 and v6e-1
PLANNED = os.environ.get("PLANNED", TARGET if accelerator else "llama-3.2-1b")
PLANNED_DRAFT = os.environ.get("PLANNED_DRAFT", DRAFT if accelerator else "ngram")
NEW = int(os.environ.get("NEW_TOKENS", "192"))

# %% [markdown]
# ## Plan first
#
# `mars-jax plan` compiles the decode loop for the slice ahead of time, without weights and without a TPU. It reports
# the memory of each chip, the time of a step at the published bandwidth, and whether the pair fits. The command needs
# libtpu. It runs in a separate process, before this process uses the TPU. Expect a minute.

# %%
if importlib.util.find_spec("libtpu") is None:
    print("there is no libtpu here: pip install 'jax[tpu]' to plan")
else:
    flags = ["--target", PLANNED, "--draft", PLANNED_DRAFT, "--topology", TOPOLOGY, "--context", "2048"]
    plan = subprocess.run(
        [sys.executable, "-m", "mars_jax", "plan", *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
        capture_output=True,
    )
    print(plan.stdout or plan.stderr)  # exit code 1 means that the pair does not fit

# %% [markdown]
# ## Load and decode
#
# The first round compiles the programs, and then three interleaved rounds are timed. Each speed is the median of the
# three rounds, shown with the lowest and the highest speed. Regret is the cost of relaxing. Expect a minute.

# %%
import time

import jax
from IPython.display import Image, display

import mars_jax as mj
from mars_jax.lab.pictures import look, no_grid, picture, whiskers

print(f"mars-jax {mj.__version__}, jax {jax.__version__}, {jax.devices()[0].device_kind}")
target = mj.load(TARGET)
draft = mj.drafters.load(DRAFT, target)
chat = accelerator and target.tokenizer.chat_template is not None
prompts = (
    [
        "Why is the sky blue?",
        "Explain a hash table to a child.",
        "Write a haiku about rain.",
        "What is 17 * 23?",
    ]
    if chat
    else ["Once upon a time", "One day, a cat", "Tim and Sue went", "The old dog"]
)


def timed(arms):
    """Return (result, three speeds in ascending order) for each arm."""

    def run(drafter, rule):
        began = time.perf_counter()
        decoded = mj.generate(target, drafter, prompts, verify=rule, max_new_tokens=NEW, chat=chat)
        return decoded, decoded.metrics.emitted / (time.perf_counter() - began)

    results = {name: run(*arm)[0] for name, arm in arms.items()}
    rounds = [{name: run(*arm)[1] for name, arm in arms.items()} for _ in range(3)]
    return {name: (results[name], sorted(speeds[name] for speeds in rounds)) for name in arms}


def show(results):
    for name, (result, (low, middle, high)) in results.items():
        print(
            f"{name:9} {middle:6.0f} [{low:.0f}, {high:.0f}] tokens/s   tau {result.metrics.tau:.2f}   "
            f"regret {result.metrics.regret_per_token:.3f} nats per token"
        )


arms = {
    "no draft": ("none", mj.verify.exact()),
    "exact": (draft, mj.verify.exact()),
    "mars 0.9": (draft, mj.verify.mars(theta=0.9)),
}
results = timed(arms)
show(results)

# %% [markdown]
# A draft is useful only if it increases the speed on this machine, so the plot shows the speed with the range of the
# rounds.

# %%
caption = f"{TARGET} drafted by {DRAFT}, {len(prompts)} rows, {jax.devices()[0].device_kind}, three rounds"
looks = {"no draft": look("autoregressive"), "exact": look("exact"), "mars 0.9": look("mars")}
with picture([Path("speed.png")], panel=(6, 2.2), caption=caption) as ((axis,),):
    for place, (name, (_, (low, middle, high))) in enumerate(results.items()):
        axis.errorbar([middle], [place], xerr=whiskers([middle], [(low, high)]), **looks[name].line)
    axis.set_yticks(range(len(results)), list(results))
    axis.invert_yaxis()
    axis.set(xlabel="tokens/s", xlim=(0, None), ylim=(len(results) - 0.5, -0.5))
    no_grid(axis, "y")
display(Image("speed.png"))

# %%
for prompt, text in zip(prompts, results["mars 0.9"][0].text, strict=True):
    print(f"{prompt}|{text}\n")
same = sum(a == b for a, b in zip(results["exact"][0].tokens, results["no draft"][0].tokens, strict=True))
print(f"{same} of {len(prompts)} texts of exact are those without a draft")

# %% [markdown]
# In bfloat16, rounding may break a near-tie between two tokens differently in different programs. In float32
# (`mj.load(TARGET, dtype="float32")`), all completions are the same.
#
# ## Adaptive length
#
# A draft may speed up small batches but slow down large ones. `draft_size="auto"` measures the cost of a step with
# the whole chain, with half of it and without a draft. Each step then uses the size that is estimated to produce the
# most tokens per second. The output stays the same. Expect a minute.

# %%
auto = mj.drafters.load(DRAFT, target, draft_size="auto")
show(timed({"auto": (auto, mj.verify.exact())}))

# %% [markdown]
# On the command line, use `python -m mars_jax.generate --target PATH --draft model:SMALL "..."` to decode with a pair,
# and `mars-jax benchmark` to measure it with controls and intervals.
