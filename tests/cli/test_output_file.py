"""Files of `generate --output`: the recorded settings, and parts that join to the rows of one process."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from mars_jax.cli.generate import command
from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.output import recorded
from mars_jax.cli.generate.prompts import from_texts
from mars_jax.serve.rows import RowFile
from mars_jax.utils.errors import MarsError
from tests.cli.conftest import timeless

PAGE = Path(__file__).resolve().parents[2] / "docs" / "many-machines.md"
PROMPTS = [
    {"prompt": "Once upon a time"},
    {"prompt": "Tom had", "temperature": 0.5},
    {"prompt": "The cat", "seed": 9},
    {"prompt": "A\u2028line"},
    {"prompt": "Lily"},
]


def settings_of(*argv, prompts=("hello",)):
    args = parse([*argv, "hello"])
    rows = from_texts(list(prompts))
    check_flags(args, rows)
    return recorded(args, rows)


def begun_file(tmp_path, settings):
    """Return a file with one row of a run with these settings."""
    file = RowFile(tmp_path / "rows.jsonl", settings)
    file.start()
    file.append({"id": 0})
    file.close()
    return file.path


@pytest.fixture
def path(tmp_path):
    """Return a file with one row of a run without flags."""
    return begun_file(tmp_path, settings_of())


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["--seed", "3"], "seed at its default, not 3"),
        (["--max-relaxed-run", "0"], "max relaxed run at its default, not 0"),
        (["--dtype", "bfloat16"], 'dtype at its default, not "bfloat16"'),
        (["--draft", "ngram"], 'draft "model:tiny/draft", not "ngram"'),
        (["--tree", "8-6-4"], "tree at its default, not [8, 6, 4]"),
        (["--tree", "dynamic"], "tree at its default, not {"),
        (["--verify", "exact"], 'verify "mars", not "exact"'),
        (["--ignore-eos"], "ignore eos at its default, not true"),
    ],
)
def test_a_setting_that_differs_is_named(path, argv, expected):
    with pytest.raises(MarsError) as caught:
        RowFile(path, settings_of(*argv))
    assert f"was begun with {expected}" in str(caught.value)


def test_other_prompts_are_refused(path):
    with pytest.raises(MarsError, match="was begun with other prompts: choose another --output"):
        RowFile(path, settings_of(prompts=["hello", "world"]))


def test_an_edited_rule_is_another_rule(tmp_path):
    source = tmp_path / "own_rule.py"
    source.write_text("from mars_jax import verify\n\ndef own():\n    return verify.exact()\n")
    path = begun_file(tmp_path, settings_of("--verify", f"{source}:own"))
    source.write_text("from mars_jax import verify\n\ndef own():\n    return verify.mars()\n")
    with pytest.raises(MarsError, match="was begun with other rule source"):
        RowFile(path, settings_of("--verify", f"{source}:own"))


def test_flags_that_decide_no_row_may_change(path):
    same = "--theta 0.9 --seed 0 --batch-size 3 --resume --output x --verify mars --no-check --part 0/2"
    RowFile(path, settings_of(*same.split())).close()


# Parts.


@pytest.fixture(scope="module")
def decode(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))

    def run(name, *flags):
        argv = ["--target", str(target), "--draft", "ngram", "--prompts-file", str(folder / "in.jsonl")]
        argv += ["--temperature", "1", "--max-new-tokens", "8", "--batch-size", "2"]
        argv += ["--output", str(folder / name), *flags]
        assert command.main(argv) == 0
        return folder / name

    return run


@pytest.mark.slow
def test_joined_parts_are_the_rows_of_one_process(decode):
    """Join the parts with the command in docs/many-machines.md; `--resume` accepts the result."""
    single = decode("whole.jsonl")
    parts = [decode(f"part-{number}.jsonl", "--part", f"{number}/3") for number in range(3)]
    assert [row["id"] for row in timeless(parts[1].read_text())] == [1, 4]
    [join] = re.findall(r"^cat part.* > out\.jsonl$", PAGE.read_text(), re.MULTILINE)
    subprocess.run(["sh", "-c", join], cwd=single.parent, check=True)
    out = single.with_name("out.jsonl")
    rows = timeless(out.read_text())
    assert sorted(rows, key=lambda row: row["id"]) == timeless(single.read_text())
    joined = out.read_bytes()
    assert decode("out.jsonl", "--resume").read_bytes() == joined


def test_a_repeated_row_and_the_row_of_another_part_are_refused(decode, capsys):
    file = decode("repeated.jsonl")
    with pytest.raises(AssertionError):
        decode("repeated.jsonl", "--resume", "--part", "1/2")
    assert f"line 1 of '{file}' repeats another line or belongs to another --part" in capsys.readouterr().err
    file.write_bytes(2 * file.read_bytes())
    with pytest.raises(AssertionError):
        decode("repeated.jsonl", "--resume")
    assert f"line 6 of '{file}' repeats another line" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ("3/3", "--part is '3/3': expected I/N, such as 0/4"),
        ("a/b", "--part is 'a/b': expected I/N, such as 0/4"),
        ("2/3", "--part has none of the 1 rows: divide them into fewer parts."),
    ],
)
def test_a_part_that_cannot_be_is_refused(part, message, tmp_path, refused):
    assert message in refused("--part", part, "--output", tmp_path / "x.jsonl", "hello")
