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
# # Meshes: one program on many devices
#
# One axis of a mesh shards the rows of a batch; another shards heads, hidden units and the vocabulary. The tokens are
# the same as on one device. A TPU v5e-8 has eight devices. On a machine with only a CPU, JAX simulates eight devices,
# so this notebook runs anywhere.
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

if not (on_tpu or on_gpu):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import jax

import mars_jax as mj

count = jax.device_count()
print(f"mars-jax {mj.__version__}, jax {jax.__version__}, {count} x {jax.devices()[0].device_kind}")

# %% [markdown]
# ## Rows over `data`, the model over `model`
#
# Weights are streamed to their devices tensor by tensor. An array that cannot be sharded evenly is replicated on
# every device; `replication_notes` lists these arrays. Expect a minute.

# %%
prompts = ["Once upon a time", "One day, a cat", "Tim and Sue went", "The old dog"]
text = "data=2,model=2" if count >= 4 else f"data={count}"
mesh = mj.sharding.parse_mesh(text)
target = mj.load("tiny/target", dtype="float32", mesh=mesh)
draft = mj.drafters.load("model:tiny/draft", target, num_draft_tokens=3, dtype="float32")
print(mj.sharding.replication_notes(target.config, mesh) or "everything divides")
jax.debug.visualize_array_sharding(target.params["layers"][0]["up"])

# %%
options = {"verify": mj.verify.exact(), "max_new_tokens": int(os.environ.get("NEW_TOKENS", "48"))}
divided = mj.generate(target, draft, prompts, **options)
single = mj.load("tiny/target", dtype="float32")
single_draft = mj.drafters.load("model:tiny/draft", single, num_draft_tokens=3, dtype="float32")
expected = mj.generate(single, single_draft, prompts, **options)
same = sum(a == b for a, b in zip(divided.tokens, expected.tokens, strict=True))
for prompt, text in zip(prompts, divided.text, strict=True):
    print(f"{prompt}|{text}\n")
print(f"{same} of {len(prompts)} texts are those of one device")

# %% [markdown]
# ## A trainer's axes
#
# If the axes of a mesh have other names, assign roles to them once. Trainers shard weights over all axes. `place`
# reshards the weights for decoding once per update, so that the decode steps need not gather them. Expect half a
# minute.

# %%
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

mj.sharding.name_axes(data="fsdp", model="tp")
shape = (2, 2) if count >= 4 else (count, 1)
trainers = Mesh(
    np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape),
    ("fsdp", "tp"),
    axis_types=(AxisType.Auto,) * 2,
)
trained = jax.tree.map(
    lambda x: jax.device_put(x, NamedSharding(trainers, P("fsdp") if x.ndim == 2 else P())), single.params
)
placed = mj.sharding.place(trained, single.config, trainers)
print(trained["layers"][0]["up"].sharding.spec, "->", placed["layers"][0]["up"].sharding.spec)
policy = mj.Pretrained.from_parts(single.model, placed, single.tokenizer, config=single.config, mesh=trainers)
result = mj.generate(policy, "ngram", prompts, **options)
same = sum(a == b for a, b in zip(result.tokens, expected.tokens, strict=True))
print(f"{same} of {len(prompts)} texts are those of one device")

# %% [markdown]
# ## Several hosts
#
# Every process runs the same command. On Cloud TPU and Slurm the processes find each other; elsewhere, use
# `--coordinator`:
#
#     python -m mars_jax.generate --mesh data=2,model=4 --coordinator HOST:PORT --num-processes 2 --process-id 0 ...
#
# `benchmark`, `calibrate` and `lm_eval` accept the same flags. Only the first process writes output.
