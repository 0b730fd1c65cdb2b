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
# # Distill a head
#
# An EAGLE-3 head reads features of its target and drafts from them. This notebook trains a head on text that the
# target generates, with training-time test ([arXiv 2503.01840](https://arxiv.org/abs/2503.01840)), and then decodes
# with it. A head trained on so few tokens is weak; training it on more tokens improves it.
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
import json
import os
from pathlib import Path

import jax
from IPython.display import Image, display

import mars_jax as mj
from mars_jax.lab.pictures import COLOURS, picture

TARGET = os.environ.get("TARGET", "tiny/target")
TOKENS = os.environ.get("TOKENS", "200000")
WRITE = os.environ.get("WRITE", "256")
print(f"mars-jax {mj.__version__}, jax {jax.__version__}, {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Training text
#
# The target continues the first 16 tokens of each document (`--write`), because a head learns best from its target's
# output. The documents used here are openings of stories. For another target, use your own file of documents,
# separated by lines of `<|endoftext|>`.

# %%
names = ["Lily", "Tim", "Sue", "Tom", "Ben", "Mia", "Sam", "Anna"]
places = [
    "the park",
    "the garden",
    "the big house",
    "the sea",
    "the woods",
    "a small shop",
    "the farm",
    "school",
]
events = ["found a red ball", "saw a little bird", "met a big dog", "wanted to play"]
openings = [f"One day, {a} went to {b}. {a} {c}." for a in names for b in places for c in events]
_ = Path("beginnings.txt").write_text("\n<|endoftext|>\n".join(openings), encoding="utf-8")

# %% [markdown]
# ## Train
#
# Training runs in a separate process, on the CPU or on the accelerator, so that its memory is free afterwards. If
# training is killed, run the cell again to continue from the last checkpoint. Expect 5 minutes on two cores.

# %%
flags = ["eagle3", "--target", TARGET, "--data", "beginnings.txt", "--write", WRITE, "--tokens", TOKENS]
flags += ["--step-tokens", "1024", "--length", "128", "--steps-ahead", "3", "--draft-vocab", "2048"]
flags += ["--learning-rate", "2e-3", "--loss", "kl+tv", "--output", "head"]
_ = subprocess.run([sys.executable, "-m", "mars_jax", "distill", *flags], check=True)

# %%
figures = [json.loads(line) for line in Path("head-training/log.jsonl").read_text().splitlines()]
with picture([Path("accepted.png")], panel=(6, 3.4), caption=f"a head for {TARGET}, {TOKENS} tokens") as (
    (axis,),
):
    for ahead, colour in zip((1, 2, 3), COLOURS, strict=False):
        axis.plot([100 * row[f"accept_{ahead}"] for row in figures], label=f"{ahead} ahead", color=colour)
    axis.set(xlabel="step", ylabel="head's best token is the target's, %", ylim=(0, None))
display(Image("accepted.png"))
print(
    f"accepted one ahead: {figures[0]['accept_1']:.0%} at the first step, {figures[-1]['accept_1']:.0%} at the last"
)

# %% [markdown]
# ## Draft with the head
#
# Under `exact`, the output is the same as without a head. tau is the number of tokens per forward pass of the target.
# These prompts were not in the training data. Expect half a minute.

# %%
target = mj.load(TARGET, dtype="float32")
prompts = ["Once upon a time, a boy", "The cat and the bird", "Mom said it was time", "In the sun, the frog"]
options = {"verify": mj.verify.exact(), "max_new_tokens": 48}
reference = mj.generate(target, "none", prompts, **options)
for prompt, text in zip(prompts, reference.text, strict=True):
    print(f"{prompt}|{text}\n")
for spec in ["ngram", "eagle:head"] + (["eagle:tiny/eagle3"] if TARGET == "tiny/target" else []):
    draft = mj.drafters.load(spec, target, num_draft_tokens=4, dtype="float32" if ":" in spec else None)
    result = mj.generate(target, draft, prompts, **options)
    same = sum(a == b for a, b in zip(result.tokens, reference.tokens, strict=True))
    print(f"{spec:18} tau {result.metrics.tau:.2f}, {same} of {len(prompts)} texts those without a draft")

# %% [markdown]
# The head is stored in the published layout, which SGLang and vLLM also read (`--layout`). For a target with billions
# of parameters, store its features first with `mars-jax distill features`, so that an epoch runs only the head.
