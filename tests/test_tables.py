"""The tables: every row compared with its factory, ranges at their ends, and the strings that name rows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mars_jax import hub
from mars_jax.drafters.registry import draft_words, drafters_that, parse_draft
from mars_jax.hub.families import FAMILIES
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.utils import assets
from mars_jax.utils import catalogue as models
from tests.helpers.checkpoint_files import message
from tests.helpers.sources import find_test

ROOT = Path(__file__).resolve().parents[1]


def test_the_tables_do_not_load_jax():
    code = "import sys, mars_jax.utils.catalogue, mars_jax.utils.settings; "
    code += "assert not {'jax', 'numpy', 'flax'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("kind", "path"), [("none", ""), ("model", "a/b"), ("eagle", "C:/heads"), ("mtp", "")]
)
def test_drafts_are_named_by_kind_and_path(kind, path):
    draft = parse_draft(f"{kind}:{path}".removesuffix(":"))
    assert draft == (kind, path) and draft.definition.name == kind


@pytest.mark.parametrize("spec", ["", "ngram:", "ngram:3", "model", "model:", "mtp:", "eagel:x", "Model:x"])
def test_other_drafts_are_refused(spec):
    suggestion = {"eagel:x": " (did you mean eagle?)", "Model:x": " (did you mean model?)"}.get(spec, "")
    expected = f"--draft is {spec}{suggestion}: expected {draft_words()}."
    assert message(parse_draft, spec, shown="--draft") == expected


def test_drafts_may_be_narrowed():
    assert draft_words().startswith("none, ngram, model:PATH, eagle:PATH, mtp[:PATH], dflash:PATH, ")
    assert "expected ngram or model:PATH." in message(parse_draft, "none", among=("ngram", "model"))
    assert drafters_that("trees") == "model:PATH, eagle:PATH, mtp[:PATH], dflash:PATH, medusa:PATH or self"


# Models by name.


@pytest.mark.parametrize("name", models.MODELS)
def test_a_model_is_what_its_row_says(name):
    """If the model is local or `plan` has its sizes, its config agrees with its row."""
    row = models.MODELS[name]
    assert row.family in FAMILIES and row.licence
    assert row.sha256 is None or (row.file and re.fullmatch("[0-9a-f]{64}", row.sha256))
    assert bool(row.repository) == (name not in assets.NAMES)
    is_local = not row.repository or (row.package and hub.is_here(name))
    config = hub.read_config(name) if is_local else CONFIGS.get(name)
    assert config is None or (config.family, config.vocab_size) == (row.family, row.vocabulary)


def test_every_draft_is_known_and_has_its_test_and_its_figure():
    pairs = models.pairs()
    for pair in pairs:
        draft = parse_draft(pair.draft)
        row = models.MODELS[pair.target]
        small = models.MODELS.get(draft.path)
        assert (small is not None) == (draft.kind == "model")
        assert small is None or small.family.split("_")[0] == row.family.split("_")[0]
        assert small is not None or draft.definition.head
        assert pair.loads in models.LOADS
        file, _, test = pair.test.partition("::")
        assert find_test(ROOT / "tests" / file, test), pair
    heads = {(pair.target, pair.draft) for pair in pairs if not pair.draft.startswith("model:")}
    assert heads == {(head.target, draft) for draft, head in models.HEADS.items()}
    assert {(pair.target, pair.draft) for pair in pairs} >= set(models.FIGURES)
    for figure in models.FIGURES.values():
        tau, page = re.fullmatch(r"tau ([\d.]+), (.*)", figure).groups()
        assert f" {tau} " in (ROOT / page).read_text(encoding="utf-8").replace(";", " ")


def test_the_page_of_heads_is_the_table():
    page = (ROOT / "docs" / "heads.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(.+?)` \| `(.+?)` \| (.+?) \| (yes|alike) \|$", page, re.MULTILINE)
    expected = [
        (models.MODELS[pair.target].repository, pair.draft.partition(":")[2], pair.layout, pair.loads)
        for pair in models.pairs()
        if pair.draft.partition(":")[2] not in models.MODELS and pair.loads != "runs"
    ]
    assert sorted(rows) == sorted(expected)


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("qwen3-8b", "qwen3-8b"),
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("/data/Qwen3-8B/", "qwen3-8b"),
        ("/data/Qwen3-8B-Q4_K_M.gguf", "qwen3-8b"),
        ("~/hub/models--Qwen--Qwen3-8B/snapshots/0123abc", "qwen3-8b"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF", "qwen2.5-coder-1.5b"),
        ("Qwen/Qwen2.5-Coder-1.5B-Instruct", "qwen2.5-coder-1.5b"),
        ("tiny/target", "tiny/target"),
        ("Qwen/Qwen3-8B-Base", None),
        ("/data/qwen3-80b.gguf", None),
        ("/mine/target", None),
        ("", None),
    ],
)
def test_a_target_is_known_by_name_repository_and_path(name, target):
    assert models.drafts_for(name) == (models.MODELS[target].drafts if target else ())
    assert {pair.target for pair in models.pairs(name)} == ({target} if target else set())
