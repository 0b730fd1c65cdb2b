"""Tests of datasets in the Hub's layout, read from folders by `datasets`, and of the calls that read the Hub."""

import json
from pathlib import Path

import pytest

from mars_jax.lab.evaluate.tasks import catalogue as hub
from mars_jax.lab.evaluate.tasks.catalogue import read_problems
from mars_jax.utils.errors import MarsError

GSM8K = {"question": "How many?", "answer": "3 * 4 = 12.\n#### 12"}
TESTED = {"prompt": "def a():\n", "entry_point": "a", "test": "def check(a): ..."}
ADD = {"task_id": 2, "text": "Add.", "test_setup_code": "", "test_list": ["assert a(1) == 1"]}
CASES = {
    "gsm8k": (GSM8K, "final_answer", ("12",), "0"),
    "humaneval": (TESTED | {"task_id": "HumanEval/0"}, "pass@1", (), "HumanEval/0"),
    "mbpp": (ADD, "pass@1", (), "2"),
    "mt_bench": ({"prompt_id": 7, "category": "math", "prompt": ["One?", "Two?"]}, "likelihood", (), "7"),
    "alpaca": ({"instruction": "Name it.", "input": "A dog."}, "likelihood", (), "0"),
    "cnn_dm": ({"id": "x1", "article": "Long.", "highlights": "Short."}, "rouge_l", ("Short.",), "x1"),
    "wmt19": ({"translation": {"zh": "\u4f60\u597d", "en": "Hello"}}, "bleu", ("Hello",), "0"),
}
"""By task: a row, and the metric, references and id of its problem."""
TURNS = {
    "mt_bench": ("One?", "Two?"),
    "alpaca": ("Name it.\n\nA dog.",),
    "cnn_dm": ("Summarize: Long.",),
    "wmt19": ("Translate the following Chinese text to English.\n\n\u4f60\u597d",),
}


@pytest.fixture(autouse=True)
def datasets(tmp_path, monkeypatch):
    """Import `datasets` with a temporary cache. The first of these tests pays for the import."""
    package = pytest.importorskip("datasets", reason="pip install 'mars-jax[evaluate]'")
    monkeypatch.setattr(package.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return package


@pytest.fixture
def published(tmp_path):
    """Write rows as a dataset with the config and split of the task: published(task, rows...) -> folder."""

    def call(task, *rows):
        config, split = hub.PARTS.get(task, (None, "test"))
        folder = tmp_path / task
        folder.mkdir()
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = f"- split: {split}\n    path: rows.jsonl\n"
        card = f"---\nconfigs:\n- config_name: {config or 'default'}\n  data_files:\n  {files}---\n"
        (folder / "README.md").write_text(card)
        return str(folder)

    return call


@pytest.mark.parametrize("task", CASES)
def test_the_layouts_of_the_hub_are_problems(published, task):
    row, metric, references, number = CASES[task]
    [problem] = read_problems(task, published(task, row), chat=True)
    assert (problem.metric, problem.references, problem.id) == (metric, references, number)
    assert problem.turns == TURNS.get(task, problem.turns)


def test_a_name_says_dataset_config_and_split(datasets, monkeypatch):
    calls = []

    def load(*args, **options):
        calls.append((*args, options))
        return [GSM8K]

    monkeypatch.setattr(datasets, "load_dataset", load)
    for path in ("openai/gsm8k", "openai/gsm8k:socratic", "openai/gsm8k::train", "a/b:c:d"):
        [problem] = read_problems("gsm8k", path, chat=True)
        assert problem.references == ("12",)
    names = [(name, config, options["split"]) for name, config, options in calls]
    main = ("openai/gsm8k", "main")
    assert names == [
        (*main, "test"),
        ("openai/gsm8k", "socratic", "test"),
        (*main, "train"),
        ("a/b", "c", "d"),
    ]
    assert all(options["streaming"] for _, _, options in calls)


@pytest.mark.parametrize("path", ["a/missing.jsonl", "missing", "a:b"])
def test_what_is_no_name_is_a_file(path):
    with pytest.raises(MarsError, match="there is no file"):
        read_problems("gsm8k", path, chat=True)


def test_what_datasets_cannot_read_is_said(datasets, published, monkeypatch):
    with pytest.raises(MarsError, match=r"row 0: it has no question|reference is None|turns is None"):
        read_problems("gsm8k", published("gsm8k", {"a": 1}), chat=True)

    broken = Path(published("mbpp", CASES["mbpp"][0]))
    (broken / "rows.jsonl").write_text('{"task_id": 1,\n')
    with pytest.raises(MarsError, match=r"cannot be read \(.*\): give a file of JSON lines"):
        read_problems("mbpp", str(broken), chat=True)

    def refuse(*args, **options):
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'a/b' doesn't exist on the Hub.\nMore.")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(MarsError, match=r"'a/b' cannot be read \(Dataset 'a/b' doesn't exist on the Hub\)"):
        read_problems("gsm8k", "a/b", chat=True)
