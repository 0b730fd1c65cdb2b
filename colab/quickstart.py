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
# # mars-jax: speculative decoding with margin-aware verification
#
# A cheap draft proposes several tokens, the target checks them all in one forward pass, and MARS
# ([arXiv 2601.15498](https://arxiv.org/abs/2601.15498)) keeps the target's runner-up too where its two best tokens are
# nearly tied. This notebook runs on a CPU or a TPU: it decodes with a small family of models that comes with the
# package, loads a Hugging Face target with its EAGLE-3 head if you switch that on, sweeps the threshold theta, and
# plots speed against quality.
#
# ## Install
#
# `SOURCE` is what pip installs where the package is not there yet: a package name, a `git+https://` address, or a
# folder with a checkout. A TPU runtime needs the libtpu that fits its JAX, which the extra `tpu` names; restart the
# session if pip replaced a JAX that was loaded already.

# %%
import glob
import importlib.util
import os
import subprocess
import sys

SOURCE = "mars-jax"  # @param {type:"string"}

if importlib.util.find_spec("mars_jax") is None:
    on_tpu = glob.glob("/dev/accel*") or glob.glob("/dev/vfio/*")
    extras = "evaluate,tpu" if on_tpu else "evaluate"
    address = f"mars-jax[{extras}] @ {SOURCE}" if "://" in SOURCE else f"{SOURCE}[{extras}]"
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", address], check=True)

# %%
import html
import time

import jax
import matplotlib.pyplot as plt
from IPython.display import HTML, display

import mars_jax as mj
from mars_jax.lab.evaluate.tasks import arithmetic

PROBLEMS = int(os.environ.get("PROBLEMS", "32"))  # of the sweep below; more make its curves smoother
print(
    f"mars-jax {mj.__version__}, jax {jax.__version__}, {jax.device_count()} x {jax.devices()[0].device_kind}"
)

# %% [markdown]
# ## Decode
#
# `tiny/target` (12M parameters) and `tiny/draft` (1M) are inside the package. The rule is `mars` at theta 0.9: a
# drafted token is kept if it is the target's best, or its second best with a logit of more than 0.9 times the best.
# The first call compiles, which takes seconds.

# %%
target = mj.load("tiny/target", dtype="float32")
drafter = mj.drafters.load("model:tiny/draft", target, num_draft_tokens=5, dtype="float32")
mars = mj.verify.mars(theta=0.9)

result = mj.generate(target, drafter, ["Once upon a time"], verify=mars, max_new_tokens=120)
print(result.text[0])
m = result.metrics
print(
    f"\ntau {m.tau:.2f} tokens per target forward, {m.relaxed_share:.1%} of the accepted draft tokens relaxed"
)

# %% [markdown]
# The same step by step. Drafted tokens that the target would have said are plain, <span
# style="color:#b58900">relaxed</span> ones were kept only thanks to the margin, and <span
# style="color:#268bd2">corrected</span> ones are the target's own.

# %%
COLOURS = {"exact": "inherit", "relaxed": "#b58900", "corrected": "#268bd2"}

from mars_jax.serve.session import Session

requests = mj.make_requests(target, ["The old dog and the small cat"], max_new_tokens=120)
pieces = [
    f'<span style="color:{COLOURS[kind]}">{html.escape(text)}</span>'
    for event in Session.of(target, drafter, mars).stream(requests)
    for kind, text in event.pieces
]
display(HTML("".join(pieces).replace("\n", "<br>")))

# %% [markdown]
# It solves word problems through its chat template; the result stands after `####`.

# %%
problem = next(iter(arithmetic.generate(1, split="eval")))
print(problem.question, "\n")
print(mj.generate(target, drafter, [problem.question], verify=mars, chat=True, max_new_tokens=128).text[0])

# %% [markdown]
# ## A target from Hugging Face with its EAGLE-3 head
#
# Off by default: it downloads 17 GB, asks for a token of an account that has accepted the model's licence, and needs
# an accelerator of at least 24 GB. With it on, everything below runs on this pair.

# %%
RUN_LARGE = False  # @param {type:"boolean"}

if RUN_LARGE:
    target = mj.load("meta-llama/Llama-3.1-8B-Instruct", dtype="bfloat16")
    drafter = mj.drafters.load(
        "eagle:yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        target,
        tree=mj.drafters.Dynamic(top_k=10, depth=7, nodes=60),
    )
    told = mj.generate(target, drafter, ["Why is the sky blue?"], verify=mars, chat=True, temperature=1.0)
    print(told.text[0], f"\n\ntau {told.metrics.tau:.2f}")

# %% [markdown]
# ## Sweep theta
#
# Every threshold gets the same word problems and seeds at temperature 1. `exact` is the strict rule, which keeps the
# target's own distribution; `autoregressive` is the target alone. Thresholds are values, so only the first of each
# rule compiles, and every way is run once before it is timed. Large targets are asked to end as the small one does.

# %%
THETAS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)

problems = list(arithmetic.generate(PROBLEMS, split="eval"))
ending = " End with the result after ####." if RUN_LARGE else ""
questions = [p.question + ending for p in problems]
ways = {
    "autoregressive": ("none", mj.verify.exact()),
    "exact": (drafter, mj.verify.exact()),
    **{f"theta {theta:g}": (drafter, mj.verify.mars(theta=theta)) for theta in THETAS},
}


def run(draft, rule):
    return mj.generate(
        target,
        draft,
        questions,
        verify=rule,
        chat=True,
        temperature=1.0,
        max_new_tokens=128,
        batch_size=min(8, PROBLEMS),
    )


compiled, rows = set(), {}
for name, (draft, rule) in ways.items():
    if (kind := name.partition(" ")[0]) not in compiled:
        run(draft, rule)
        compiled.add(kind)
    began = time.perf_counter()
    found = run(draft, rule)
    seconds = time.perf_counter() - began
    rows[name] = {
        "tokens/s": found.metrics.emitted / seconds,
        "tau": found.metrics.tau,
        "right": sum(map(arithmetic.is_correct, problems, found.text)) / PROBLEMS,
        "relaxed": found.metrics.relaxed_share,
    }
    print(f"{name:16}" + "".join(f"{key} {value:8.3f}   " for key, value in rows[name].items()))

# %% [markdown]
# ## Speed against quality
#
# Up and to the right is better. With so few problems the quality axis is noisy: `mars-jax benchmark` runs
# the same comparison with controls and intervals, and `mars-jax calibrate` picks a theta whose loss stays
# below a bound with a stated confidence.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.5))
for place, (name, row) in enumerate(rows.items()):
    left.plot(row["tokens/s"], 100 * row["right"], "osD^vP*X"[place % 8], markersize=9, label=name)
left.set(xlabel="tokens/s", ylabel="problems right, %", title="speed against quality", ylim=(-3, 103))
left.grid(alpha=0.3)
left.legend(fontsize="small")

right.plot(THETAS, [rows[f"theta {theta:g}"]["tau"] for theta in THETAS], "o-", label="mars")
right.axhline(rows["exact"]["tau"], linestyle="--", color="gray", label="exact")
right.set(xlabel="theta", ylabel="tau, tokens per target forward", title="what a looser threshold accepts")
right.invert_xaxis()
right.grid(alpha=0.3)
right.legend()
plt.show()
