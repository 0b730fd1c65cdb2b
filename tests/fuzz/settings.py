"""Fuzzing of settings of rules and drafters (strings, JSON, Python values), of command lines and of resumed files."""

import contextlib
import io
import json
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from mars_jax import __version__, verify
from mars_jax.cli.commands import parser_of
from mars_jax.cli.generate.command import main
from mars_jax.cli.generate.output import missing_rows, sampling
from mars_jax.drafters.registry import definitions, parse_draft
from mars_jax.drafters.tree_shapes import parse_tree
from mars_jax.serve.requests import Request
from mars_jax.serve.rows import RowFile, digest
from mars_jax.utils.errors import MarsError
from mars_jax.verify import RuleChoice, is_own, rules
from tests.fuzz.damage import HOSTILE, NUMBERS, TEXTS, damaged, damaged_bytes, damaged_json, to_text
from tests.fuzz.harness import Surface, empty

_NAMES = sorted({name for row in rules().values() for name in row.settings} | {"block", "x", "theta "})
_WORDS = (*TEXTS, *map(str, NUMBERS), "ratio", "gap", "exact", "rejection", "false", "0.9", "٣", "1_0")
_OTHER = ("learned:x", "mars:x", "equivalent:case", "equivalent:", "a.py:b", "os:getcwd", ":", "x:y", "")
_SPECS = st.one_of(st.sampled_from(sorted(rules())), st.sampled_from(_OTHER))
_TEXT = st.sampled_from(_WORDS)
_VALUE = st.one_of(HOSTILE, _TEXT, st.lists(st.sampled_from(NUMBERS), max_size=3))


def rule_settings(case: tuple[str, dict[str, Any]], folder: Path) -> None:
    """Choose a rule from values, as Python code and benchmark files do."""
    spec, values = case
    if is_own(spec):
        return
    choice = RuleChoice(spec, {})
    for name in choice.options.keys() & values.keys():
        setting, structure = choice.setting(name)
        with contextlib.suppress(MarsError):
            setting.from_json(values[name], **structure)
    verify.load(spec, **values)


def drafts(case: tuple[str, str], folder: Path) -> None:
    """Parse a drafter and its tree."""
    parse_draft(case[0])
    parse_tree(case[1])


_FLAGS = tuple(flag for flag in parser_of("generate")._option_string_actions if flag.startswith("--"))
_GOOD = {
    "--draft": ("none", "ngram", "model:nowhere", "eagle:nowhere"),
    "--tree": ("2-1", "dynamic", "dynamic:2-2-4"),
    "--verify": tuple(sorted(rules())),
    "--rule-option": ("theta=0.5", "base=rejection", "x", "=", "theta="),
    "--logit-bias": ("3=-inf", "3", "=", "3=x"),
    "--template-arg": ("a=1", "a", "=", "a=" + "[" * 5000),
    "--mesh": ("data=2", "data=0", "x=1", "data=2,data=2"),
    "--relax-in": ("think", "a...b"),
    "--temperature": ("1.0",),
    "--max-new-tokens": ("4",),
}


def _argument(text: str) -> str:
    """Make the text a valid argument of a process: without NUL, and with only those surrogates that stand for bytes."""
    return text.replace("\0", "").replace("\ud800", "\udc80")


def _words(flag: str) -> st.SearchStrategy[list[str]]:
    values = st.sampled_from((*_GOOD.get(flag, ()) * 2, *_WORDS[:40], "0.5", "3")).map(_argument)
    separate = values.map(lambda v: [flag, v])
    return st.one_of(st.just([flag]), separate, separate, values.map(lambda v: [f"{flag}={v}"]))


_ARGV = st.tuples(
    st.lists(st.sampled_from(_FLAGS).flatmap(_words), max_size=4),
    st.lists(st.sampled_from(("hello", "hello", "", "\udc80", "-", "--", "--x")), max_size=2),
    st.sampled_from(("rows.jsonl", "rows.jsonl", "", "nowhere/rows.jsonl", ".")),
).map(lambda parts: [parts[2], *(word for words in parts[0] for word in words), *parts[1]])


def command_line(case: list[str], folder: Path) -> None:
    """Run `generate` with a target that does not exist: it must fail with one sentence and write nothing."""
    output, *arguments = case
    argv = ["--target", str(folder / "no-such-checkpoint")]
    argv += ["--output", str(folder / output) if output else "", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except SystemExit as end:  # --help and --version exit
            code = end.code
    text = err.getvalue()
    assert "Traceback" not in text, text
    if code == 0:
        assert out.getvalue()
        return
    assert code == 2 and text.startswith("error: ") and text.count("\n") == 1, (code, text)
    raise MarsError(text.removeprefix("error: ").strip())


_REQUEST = Request(prompt="p", prompt_tokens=(1, 2), id="q")
_SETTINGS = {"version": __version__, "target": "t", "seed": 3}
_RECORDED = _SETTINGS | {"fingerprints": {"target": "abc"}}
_FINGERPRINT = digest(json.dumps(_RECORDED, sort_keys=True).encode())
_ROW = {"prompt": "p", "prompt_tokens": [1, 2], "id": "q", "tokens": [3], "fingerprint": _FINGERPRINT}
_ROW["sampling"] = sampling(_REQUEST)
_EDITED_ROWS = damaged({"tokens": [3], "id": 1, "text": "x"}).map(
    lambda fields: to_text(_ROW | fields if isinstance(fields, dict) else fields).encode()
)
_ROWS = st.one_of(
    damaged_json(_ROW), damaged_json(_ROW), damaged_bytes(json.dumps(_ROW).encode() + b"\n" + b'{"prompt": ')
)


def resume(case: tuple[bytes, bytes], folder: Path) -> None:
    """Resume an --output file with its settings. Accepted or rejected, both files stay unchanged."""
    path = folder / "in" / "rows.jsonl"
    settings = folder / "in" / "rows.jsonl.settings.json"
    rows = case[0] + b"\n"
    path.write_bytes(rows)
    settings.write_bytes(case[1])
    try:
        with contextlib.closing(RowFile(path, _SETTINGS)) as file:
            file.start(_RECORDED["fingerprints"])
            missing_rows(file, [_REQUEST, _REQUEST])
    finally:
        assert (path.read_bytes(), settings.read_bytes()) == (rows, case[1])


_VALID = st.just(json.dumps(_RECORDED).encode())
_RESUMED = st.one_of(
    st.tuples(_ROWS, damaged_json(_RECORDED)),
    st.tuples(st.one_of(_ROWS, _EDITED_ROWS), _VALID),
    st.tuples(st.just(json.dumps(_ROW).encode()), damaged_json(_RECORDED)),
)


def _settings(names: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    return st.dictionaries(st.sampled_from(names), _VALUE, max_size=3)


_RULE_SETTINGS = st.one_of(
    *(st.tuples(st.just(row.name), _settings([*row.settings, "block"])) for row in rules().values()),
    st.tuples(_SPECS, _settings(_NAMES)),
)
_TREE = st.lists(
    st.sampled_from(("dynamic", ":", "-", "0", "1", "4", "8", "9999", "99999", "٣", " ", "")), max_size=7
)
_DRAFT = st.sampled_from((*definitions(), "model:x", "eagle:a:b", *TEXTS))
_DRAFTS = st.one_of(
    st.tuples(st.just("ngram"), st.one_of(_TREE.map("".join), _TEXT)),
    st.tuples(st.one_of(_DRAFT, st.text(max_size=6)), st.just("4-2-2-1")),
)
SURFACES = {
    "settings of rules, as values": Surface(_RULE_SETTINGS, rule_settings, 2000),
    "drafters and trees": Surface(_DRAFTS, drafts, 1000),
    "command lines": Surface(_ARGV, command_line, 3500),
    "output to resume": Surface(_RESUMED, resume, 500, empty),
}
