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
# A target and a draft from the Hugging Face hub on a TPU: first what they take and how long a step is, from their
# configs alone; then the pair itself, beside the target without a draft. Where there is no TPU the pair that comes with
# the package stands in, and this takes some minutes.
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

# %% [markdown]
# ## The pair
#
# Both speak one vocabulary. A target with an EAGLE-3 head is faster still: `DRAFT = "eagle:OWNER/HEAD"`. Set an
# `HF_TOKEN` in the runtime's secrets for checkpoints that ask for one.

# %%
import os

accelerator = bool(glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*") or glob.glob("/dev/nvidia0"))
TARGET = os.environ.get("TARGET", "Qwen/Qwen3-1.7B" if accelerator else "tiny/target")
DRAFT = os.environ.get("DRAFT", "model:Qwen/Qwen3-0.6B" if accelerator else "model:tiny/draft")
TOPOLOGY = os.environ.get("TOPOLOGY", "v5e:1x1")  # Colab has v5e-1 and v6e-1
PLANNED = os.environ.get("PLANNED", TARGET if accelerator else "llama-3.2-1b")
PLANNED_DRAFT = os.environ.get("PLANNED_DRAFT", DRAFT if accelerator else "ngram")
NEW = int(os.environ.get("NEW_TOKENS", "96"))

# %% [markdown]
# ## Plan first
#
# `mars-jax plan` compiles the decode loop for the slice ahead of time, without weights and without the TPU: what each
# chip holds, how long a step takes at its published bandwidth, and whether the pair fits. It runs in a process of its
# own, before this one takes the TPU. It needs libtpu.

# %%
if importlib.util.find_spec("libtpu") is None:
    print("there is no libtpu here: install mars-jax[tpu] to plan")
else:
    flags = ["--target", PLANNED, "--draft", PLANNED_DRAFT, "--topology", TOPOLOGY, "--context", "2048"]
    plan = subprocess.run(
        [sys.executable, "-m", "mars_jax", "plan", *flags],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
        capture_output=True,
    )
    print(plan.stdout or plan.stderr)  # exit code 1 says that it does not fit, and what would

# %% [markdown]
# ## Load and decode
#
# Of the time that is told, none is compilation: the first call of each way is not counted.

# %%
import time

import jax

import mars_jax as mj

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


def timed(drafter, rule):
    def run():
        began = time.perf_counter()
        done = mj.generate(target, drafter, prompts, verify=rule, max_new_tokens=NEW, chat=chat)
        return done, time.perf_counter() - began

    run()
    return min((run() for _ in range(3)), key=lambda pair: pair[1])


ways = {
    "no draft": ("none", mj.verify.exact()),
    "exact": (draft, mj.verify.exact()),
    "mars 0.9": (draft, mj.verify.mars(theta=0.9)),
}
found = {name: timed(*way) for name, way in ways.items()}
for name, (result, seconds) in found.items():
    speed = result.metrics.emitted / seconds
    print(
        f"{name:9} {speed:8.0f} tokens/s   tau {result.metrics.tau:.2f}   regret {result.metrics.regret:.2f} nats"
    )

# %%
print(found["mars 0.9"][0].text[0])
same = sum(a == b for a, b in zip(found["exact"][0].tokens, found["no draft"][0].tokens, strict=True))
print(f"\n{same} of {len(prompts)} texts of exact are those without a draft")

# %% [markdown]
# In bfloat16 two programs may round a tie of two tokens to either; in float32 (`mj.load(TARGET, dtype="float32")`) all
# texts are the same.
#
# ## As long as pays
#
# A draft pays in small batches, and in large ones it may not. `draft_size="auto"` measures what a step costs with the
# whole chain, with half of it and without, and takes in each step what gives most tokens a second. Texts stay the same.

# %%
auto = mj.drafters.load(DRAFT, target, draft_size="auto")
result, seconds = timed(auto, mj.verify.exact())
print(f"{result.metrics.emitted / seconds:.0f} tokens/s with {len(prompts)} rows")

# %% [markdown]
# On the command line: `python -m mars_jax.generate --target PATH --draft model:SMALL "..."`, and
# `mars-jax benchmark` for figures with controls and intervals.
