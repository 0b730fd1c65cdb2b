"""The rows of the paper's table (arXiv 2601.15498): what was decoded, by which head, on what, and what came out there.

Published figures: EAGLE-3, and EAGLE-3 with MARS at theta 0.9, at temperature 1 with K = 7 and top-k 10 trees on
H100s. Speed is over autoregression, and tau counts the correction or bonus token. The heads are published ones of
docs/heads.md, which says that they load here.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from mars_jax.specs import Dynamic

TREE = Dynamic(top_k=10, depth=8, nodes=60)
"""EAGLE's `depth=7` counts what follows the first level; here it is `dynamic:10-8-60`."""
THETA, TEMPERATURE = 0.9, 1.0
CONTEXT = 4096
"""Tokens that a row is planned for: the longest prompts of CNN/DM and an answer."""


class Task(NamedTuple):
    """A question set of the paper: its file where --data names a folder, else its dataset on the Hub."""

    file: str
    hub: str


TASKS = {
    "mt_bench": Task("mt_bench.jsonl.xz", "HuggingFaceH4/mt_bench_prompts"),
    "humaneval": Task("humaneval.jsonl.xz", "openai/openai_humaneval"),
    "gsm8k": Task("gsm8k_test.jsonl.xz", "openai/gsm8k"),
    "alpaca": Task("alpaca.jsonl.xz", "tatsu-lab/alpaca"),
    "cnn_dm": Task("cnn_dm.jsonl.xz", "abisee/cnn_dailymail"),
    "wmt19": Task("wmt19.jsonl.xz", "wmt/wmt19"),
}
"""By the benchmark's names. Each is the first 80 problems, as many as the release has of most."""


class Published(NamedTuple):
    """Of EAGLE-3, and of EAGLE-3 with MARS."""

    speed: tuple[float, float]
    tau: tuple[float, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row of the table, and what it takes to run it."""

    name: str  # of `mars_jax.lab.planning.outlined_models.CONFIGS`, for the plan
    target: str
    head: str
    slice_: str  # as `mars_jax.plan --topology`
    mesh: str | None  # on that slice
    dtype: str | None = "bfloat16"
    template: str | None = None  # a chat template, for a tokenizer that has none
    published: Published


# FastChat's `vicuna_v1.1`, which EAGLE's own evaluation of Vicuna uses.
_VICUNA = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %} USER: {{ message['content'] }}"
    "{% else %} ASSISTANT: {{ message['content'] }}</s>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %} ASSISTANT:{% endif %}"
)

ROWS = (
    Row(
        name="vicuna-13b",
        target="lmsys/vicuna-13b-v1.3",
        head="yuhuili/EAGLE3-Vicuna1.3-13B",
        slice_="v5e:2x2",
        mesh="model=4",
        template=_VICUNA,
        published=Published((3.12, 3.74), (5.64, 7.20)),
    ),
    Row(
        name="llama-3.1-8b",
        target="meta-llama/Llama-3.1-8B-Instruct",
        head="yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        slice_="v5e:2x2",
        mesh="model=4",
        published=Published((3.24, 4.00), (4.82, 6.61)),
    ),
    Row(
        name="llama-3.3-70b",
        target="meta-llama/Llama-3.3-70B-Instruct",
        head="yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",
        slice_="v5p:2x2x1",
        mesh="model=4",
        published=Published((4.40, 4.76), (5.66, 6.39)),
    ),
    Row(
        name="qwen3-8b",
        target="Qwen/Qwen3-8B",
        head="AngelSlim/Qwen3-8B_eagle3",
        slice_="v5e:2x2",
        mesh="model=4",
        published=Published((2.96, 3.23), (4.41, 5.22)),
    ),
    Row(
        name="qwen3-32b",
        target="Qwen/Qwen3-32B",
        head="AngelSlim/Qwen3-32B_eagle3",
        slice_="v5e:2x4",
        mesh="model=8",
        published=Published((3.01, 3.49), (4.21, 5.23)),
    ),
    Row(
        name="qwen3-235b-a22b",
        target="Qwen/Qwen3-235B-A22B",
        head="RedHatAI/Qwen3-235B-A22B-speculator.eagle3",
        slice_="v5p:2x2x2",
        mesh="model=8",
        published=Published((2.95, 3.42), (4.14, 5.14)),
    ),
)
