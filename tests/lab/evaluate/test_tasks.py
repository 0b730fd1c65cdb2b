"""Tests of the task readers, on small files in the published layouts."""

import hashlib
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from mars_jax.lab.evaluate.tasks.catalogue import STORY_WORDS, read_problems
from mars_jax.utils.errors import MarsError

DATA = Path(__file__).parents[2] / "data"
COUNTS = {"humaneval": 100, "mt_bench": 80, "alpaca": 80, "cnn_dm": 20, "wmt19": 100}
COUNTS |= {"spec_bench": 60, "gsm8k": 100}


@pytest.fixture
def write(tmp_path):
    """Write rows as JSON lines: write({...}, ...) -> path."""

    def call(*rows, name="file.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return call


def turns(number, *prompts, category="", **fields):
    return {"question_id": number, "category": category, "turns": list(prompts)} | fields


def test_arithmetic_needs_no_file():
    assert len(read_problems("arithmetic", chat=True)) == 1300
    assert len(read_problems("arithmetic", chat=True, limit=3)) == 3
    with pytest.raises(MarsError, match="takes no file"):
        read_problems("arithmetic", "a.jsonl", chat=True)


def test_stories_are_cut_between_words(tmp_path):
    words = [f"w{i}" for i in range(2 * STORY_WORDS + 1)]
    long = "  ".join(words[:3]) + "\n" + " ".join(words[3:])
    path = tmp_path / "stories.txt"
    path.write_text(f"Too short.\n<|endoftext|>\n{long}\n<|endoftext|>\n{long}\n")
    first, second = read_problems("stories", str(path), chat=True)
    assert first.turns[0] == "w0  w1  w2\n" + " ".join(words[3:STORY_WORDS])
    assert (first.id, second.id, first.metric, first.continues) == ("1", "2", "likelihood", True)
    assert len(read_problems("stories", str(path), chat=False, limit=1)) == 1
    path.write_text("Too short.\n")
    with pytest.raises(MarsError, match="no document of more than 48 words"):
        read_problems("stories", str(path), chat=False)


def test_gsm8k(write):
    row = {"question": "How many?", "answer": "3 * 400 = 1200.\n#### 1,200"}
    path = write(row, row)
    chat, _ = read_problems("gsm8k", path, chat=True)
    assert chat.turns[0].startswith("How many?\n") and "####" in chat.turns[0]
    assert chat.metric == "final_answer" and chat.references == ("1200",)
    [raw] = read_problems("gsm8k", path, chat=False, limit=1)
    assert raw.turns[0].endswith("Question: How many?\nAnswer:") and raw.turns[0].count("####") == 2
    with pytest.raises(MarsError, match=r"line 1: its answer does not end in ####"):
        read_problems("gsm8k", write({"question": "How many?", "answer": "12"}), chat=True)


def test_humaneval_in_its_own_layout_has_tests(write):
    prompt = 'def one():\n    """Return 1."""\n'
    row = {"task_id": "HumanEval/0", "prompt": prompt, "entry_point": "one", "test": "def check(f): ..."}
    [raw] = read_problems("humaneval", write(row), chat=False)
    assert raw.id == "HumanEval/0" and raw.turns == (prompt,) and raw.metric == "pass@1"
    assert raw.code == (prompt, "one", "def check(f): ...")
    [chat] = read_problems("humaneval", write(row), chat=True)
    assert chat.turns[0] == f"Complete the code I provided.\n\n{prompt}"


def test_humaneval_of_the_mars_release_has_none(write):
    [problem] = read_problems(
        "humaneval", write(turns(4, "Complete it.", reference=["    return 1"])), chat=True
    )
    assert problem.metric == "none" and problem.code is None


def test_mbpp_in_both_layouts(write):
    full = {"task_id": 2, "text": "Add.", "test_setup_code": "x = 1", "test_list": ["assert a(1) == x"]}
    sanitized = {"task_id": 3, "prompt": "Add.", "test_imports": ["import math"], "test_list": ["a(1)"]}
    without_imports = sanitized | {"task_id": 4, "test_imports": []}
    first, second, third = read_problems("mbpp", write(full, sanitized, without_imports), chat=False)
    assert "Add. Your code should pass these tests:\n\nassert a(1) == x\n[BEGIN]\n" in first.turns[0]
    assert first.code is not None and first.code.test.startswith("x = 1\nassert a(1) == x\n")
    assert second.code is not None and second.code.test.startswith("import math\n")
    assert third.code is not None and third.code.test.startswith("\na(1)\n")
    assert "[BEGIN]" not in read_problems("mbpp", write(full), chat=True)[0].turns[0]


def test_the_question_sets_of_the_mars_release(write):
    path = write(turns(81, "One?", "Two?", category="writing"), turns(82, "Three?", "Four?"))
    problems = read_problems("mt_bench", path, chat=True)
    assert [(p.id, p.turns, p.metric) for p in problems] == [
        ("81", ("One?", "Two?"), "likelihood"),
        ("82", ("Three?", "Four?"), "likelihood"),
    ]
    path = write(turns(0, "Summarize: ...", category="summarization", reference=["Short."]))
    assert read_problems("cnn_dm", path, chat=True)[0].references == ("Short.",)
    assert read_problems("wmt19", path, chat=True)[0].metric == "bleu"
    assert read_problems("alpaca", path, chat=True)[0].references == ()
    with pytest.raises(MarsError, match="line 1: reference is None"):
        read_problems("cnn_dm", write(turns(0, "Summarize: ...")), chat=True)


def test_spec_bench_is_six_tasks(write):
    rows = [
        turns(1, "a", "b", category="writing"),
        turns(2, "c", category="math_reasoning", reference=["2\n#### 2"]),
        turns(3, "d", category="translation", reference=["D"]),
        turns(4, "e", "f", category="stem"),
        turns(5, "g", category="rag", reference=[["nested"]]),
    ]
    problems = read_problems("spec_bench", write(*rows), chat=True)
    assert [(p.task.partition("/")[2], p.id, p.metric) for p in problems] == [
        ("mt_bench", "1", "likelihood"),
        ("mt_bench", "4", "likelihood"),
        ("math_reasoning", "2", "last_number"),
        ("translation", "3", "bleu"),
        ("rag", "5", "likelihood"),
    ]
    assert len(read_problems("spec_bench", write(*rows), chat=True, limit=1)) == 4
    with pytest.raises(MarsError, match="category is 'chess'"):
        read_problems("spec_bench", write(turns(1, "a", category="chess")), chat=True)


def test_anybodys_prompts(write):
    rows = [{"id": "x", "prompt": "Say 12."}, {"turns": ["One?", "Two?"]}]
    first, second = read_problems("jsonl", write(*rows), chat=True)
    assert (first.id, first.turns, second.id, second.turns) == ("x", ("Say 12.",), "1", ("One?", "Two?"))
    [scored] = read_problems(
        "jsonl", write({"prompt": "?", "metric": "last_number", "reference": " 12"}), chat=True
    )
    assert scored.references == ("12",)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{}], "line 1: it has no prompt"),
        ([{"prompt": "a"}, {"prompt": 3}], "line 2: prompt is 3: expected a string"),
        ([{"turns": []}], r"line 1: turns is \[\]: expected a list of strings"),
        ([{"prompt": "a", "metric": "vibes"}], "metric is 'vibes': expected one of none"),
        ([{"prompt": "a", "metric": "final_answer", "reference": "twelve"}], "expected a whole number"),
        ([{"prompt": "a", "id": 1}, {"prompt": "b", "id": 1}], "2 problems of jsonl with the id 1"),
        ([{"prompt": "a"}, {"prompt": "b", "metric": "bleu", "reference": "b"}], "mixes metrics"),
        ([], "holds no problems"),
        ([["a"]], "line 1: it is not an object"),
    ],
)
def test_lines_that_are_no_problems(write, rows, message):
    with pytest.raises(MarsError, match=message):
        read_problems("jsonl", write(*rows), chat=True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.jsonl", None, "there is no file"),
        ("broken.jsonl.xz", b"no xz", "cannot be read"),
        ("broken.jsonl", b"{", "line 1: it is not JSON"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(MarsError, match=message):
        read_problems("jsonl", str(path), chat=True)


def test_a_task_that_there_is_not_or_without_its_file():
    with pytest.raises(MarsError, match="there is no task 'chess': choose one of stories"):
        read_problems("chess", "a", chat=True)
    with pytest.raises(MarsError, match="gsm8k needs a file: write gsm8k=PATH"):
        read_problems("gsm8k", chat=True)


def test_the_published_files():
    files = {name: str(DATA / "eval" / f"{name}.jsonl.xz") for name in COUNTS}
    files["gsm8k"] = str(DATA / "eval" / "gsm8k_test.jsonl.xz")
    assert {name: len(read_problems(name, file, chat=False)) for name, file in files.items()} == COUNTS
    parts = Counter(p.task for p in read_problems("spec_bench", files["spec_bench"], chat=True))
    assert set(parts.values()) == {10} and len(parts) == 6
    assert len(read_problems("stories", str(DATA / "tinystories_heldout.txt.xz"), chat=False)) > 250


def test_the_data_of_other_people_is_what_its_page_says():
    row = re.compile(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", re.MULTILINE)
    listed = dict(row.findall((DATA / "README.md").read_text()))
    files = {str(path.relative_to(DATA)): path for path in DATA.rglob("*.xz")}
    assert listed == {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in files.items()}
