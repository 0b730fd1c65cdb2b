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
# A cheap draft proposes several tokens, and the target verifies all of them in one forward pass. MARS ([arXiv
# 2601.15498](https://arxiv.org/abs/2601.15498)) also accepts the target's runner-up if the target's two best tokens
# are nearly tied. This notebook runs on a CPU or a TPU. It decodes with small models that are part of the package,
# optionally loads a Hugging Face target with its EAGLE-3 head, sweeps the threshold theta, and plots speed against
# quality.
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
import html
import os
import time
from pathlib import Path

import jax
from IPython.display import HTML, Image, display

import mars_jax as mj
from mars_jax.lab.evaluate.scoring import score_answer
from mars_jax.lab.evaluate.tasks.catalogue import read_arithmetic
from mars_jax.lab.pictures import look, no_grid, picture, whiskers

PROBLEMS = int(os.environ.get("PROBLEMS", "32"))  # in the sweep below; more problems give smoother curves
print(
    f"mars-jax {mj.__version__}, jax {jax.__version__}, {jax.device_count()} x {jax.devices()[0].device_kind}"
)

# %% [markdown]
# ## Decode
#
# `tiny/target` (12M parameters) and `tiny/draft` (1M) are part of the package. The rule is `mars` with theta 0.9: a
# drafted token is accepted if it is the target's best token, or if it is the second best and its logit is more than
# 0.9 times the best logit. The first call compiles. Expect 20 seconds.

# %%
target = mj.load("tiny/target", dtype="float32")
drafter = mj.drafters.load("model:tiny/draft", target, num_draft_tokens=5, dtype="float32")
mars = mj.verify.mars(theta=0.9)

result = mj.generate(target, drafter, ["Once upon a time"], verify=mars, max_new_tokens=120)
print("Once upon a time" + result.text[0])
m = result.metrics
print(
    f"\ntau {m.tau:.2f} tokens per target forward, {m.relaxed_share:.1%} of the accepted draft tokens relaxed,"
)
print(f"regret {m.regret_per_token:.3f} nats per token")

# %% [markdown]
# The next cell streams the same text. Drafted tokens that equal the target's choice are plain, <span
# style="color:#b58900">relaxed</span> tokens were accepted only because of the margin, and <span
# style="color:#268bd2">corrected</span> tokens were chosen by the target.

# %%
COLOURS = {"exact": "inherit", "relaxed": "#b58900", "corrected": "#268bd2"}

prompt = "The old dog and the small cat"
pieces = [
    f'<span style="color:{COLOURS[kind]}">{html.escape(text)}</span>'
    for event in mj.generate_stream(target, drafter, [prompt], verify=mars, max_new_tokens=120)
    for kind, text in getattr(event, "pieces", ())  # the last event is the completion
]
display(HTML((f"<b>{prompt}</b>" + "".join(pieces)).replace("\n", "<br>")))

# %% [markdown]
# With its chat template, the model solves word problems. The result follows `####`.

# %%
[question] = read_arithmetic("eval", 1)[0].turns
print(question, "\n")
print(mj.generate(target, drafter, [question], verify=mars, chat=True, max_new_tokens=128).text[0])

# %% [markdown]
# ## A target from Hugging Face with its EAGLE-3 head
#
# This part is off by default. It downloads 17 GB, and needs an access token of an account that has accepted the
# model's licence and an accelerator with at least 24 GB of memory. If you turn it on, the rest of the notebook uses
# this pair.

# %%
RUN_LARGE = False  # @param {type:"boolean"}

if RUN_LARGE:
    target = mj.load("meta-llama/Llama-3.1-8B-Instruct", dtype="bfloat16")
    drafter = mj.drafters.load(
        "eagle:yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        target,
        tree=mj.drafters.Dynamic(top_k=10, depth=7, nodes=60),
    )
    answer = mj.generate(target, drafter, ["Why is the sky blue?"], verify=mars, chat=True, temperature=1.0)
    print(answer.text[0], f"\n\ntau {answer.metrics.tau:.2f}")

# %% [markdown]
# ## Sweep theta
#
# For each threshold, the same word problems are decoded with the same seeds at temperature 1. `exact` is the strict
# rule, which preserves the target's distribution; `autoregressive` is the target without a draft. Thresholds are
# runtime values, so each kind of rule compiles only once. The arms are timed in three interleaved rounds; each speed
# is the median of the rounds, shown with the lowest and the highest speed. Regret is the cost of relaxing: the
# difference in nats between the target's best logit and the logit of the emitted token. The prompts for a large
# target also state the answer format, which the small target was trained on. Expect 2 minutes.

# %%
THETAS = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5)

problems = read_arithmetic("eval", PROBLEMS)
ending = " End with the result after ####." if RUN_LARGE else ""
questions = [p.turns[0] + ending for p in problems]
arms = {
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


for kind in ("autoregressive", "exact", "theta 0.9"):
    run(*arms[kind])  # compiles
seconds, results = {name: [] for name in arms}, {}
for _ in range(3):
    for name, arm in arms.items():
        began = time.perf_counter()
        results[name] = run(*arm)
        seconds[name].append(time.perf_counter() - began)

speeds = {name: sorted(results[name].metrics.emitted / s for s in seconds[name]) for name in arms}
right = {
    name: 100
    * sum(score_answer(p, text) == [1.0] for p, text in zip(problems, results[name].text, strict=True))
    / PROBLEMS
    for name in arms
}
for name, (low, middle, high) in speeds.items():
    m = results[name].metrics
    print(
        f"{name:16} {middle:6.0f} [{low:.0f}, {high:.0f}] tokens/s   tau {m.tau:.2f}   "
        f"{right[name]:.0f}% right   regret {m.regret_per_token:.3f} nats per token"
    )

# %% [markdown]
# ## Speed against quality
#
# The panels show the gain from a lower theta (tau), the speed on this machine (with the range of the rounds), and the
# cost (share of problems solved). If two ranges overlap, the speeds do not differ measurably. With so few problems,
# the last panel is noisy. `mars-jax benchmark` runs the same comparison with controls and intervals, and `mars-jax
# calibrate` chooses a theta whose loss stays below a bound with a stated confidence.

# %%
caption = f"{PROBLEMS} word problems at temperature 1; three rounds on {jax.devices()[0].device_kind}"
with picture([Path("theta.png")], columns=3, panel=(3.4, 3), caption=caption, sharey=True) as (panels,):
    for place, (name, (low, middle, high)) in enumerate(speeds.items()):
        line = look("mars" if name.startswith("theta") else name).line
        panels[0].plot([results[name].metrics.tau], [place], **line)
        panels[1].errorbar([middle], [place], xerr=whiskers([middle], [(low, high)]), **line)
        panels[2].plot([right[name]], [place], **line)
    for panel, label in zip(
        panels, ("tau, tokens per target forward", "tokens/s", "problems right, %"), strict=True
    ):
        panel.set(xlabel=label, xlim=(0, None))
        no_grid(panel, "y")
    panels[2].set(xlim=(0, 105))
    panels[0].set_yticks(range(len(speeds)), list(speeds))
    panels[0].invert_yaxis()
display(Image("theta.png"))
