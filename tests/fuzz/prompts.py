"""Fuzzing of prompts files, plain and as JSON lines, under several rules, and of rows to replay."""

import functools
import json
from pathlib import Path

from hypothesis import strategies as st

import mars_jax as mj
from mars_jax import drafters
from mars_jax.cli.generate.prompts import CONSTRAINTS, SPANS, read_prompts
from mars_jax.constraints.spans import checked_spans
from mars_jax.core import fake
from mars_jax.core.types import NO_TOKEN
from mars_jax.serve.requests import take_constraint
from mars_jax.verify import RuleChoice
from tests.fuzz.damage import TEXTS, damaged, damaged_bytes, damaged_json, to_text
from tests.fuzz.harness import Surface, empty

RULES = (
    RuleChoice("mars", {}),
    RuleChoice("mars", {"margin": "gap", "theta": 1.0, "base": "rejection"}),
    RuleChoice("exact", {}),
    RuleChoice("cactus", {}),
)
ROWS = (
    {
        "id": "q1", "prompt": "once upon", "temperature": 0.7, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "strict": True,
        "theta": 0.8, "max_relaxed_run": 2, "seed": 9, "max_new_tokens": 3, "draft_stop": 0.5,
    },
    {"id": 3, "prompt_tokens": [1, 2, 3], "stop_strings": ["a", "b"], "logit_bias": {"4": -1.5, "7": "-inf"}},
    {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "y"}], "regex": "[ab]+"},
    {"prompt": "p", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"prompt": "p", "choice": ["yes", "no"], "relax_in": "think", "repetition_penalty": 1.2},
    {"prompt": "p", "allowed_tokens": [1, 5], "strict_in": ["json", "<a>...</a>"], "presence_penalty": 0.5},
)  # fmt: skip
TEXT = "first line\r\n\n second\u2028half\nthird \u00e9\n".encode()


def _read(path: Path, data: bytes, rule: RuleChoice) -> None:
    path.write_bytes(data)
    for row in read_prompts(str(path), rule):
        # The same check as in `serve.requests`, after the prompt is tokenized.
        take_constraint({name: row.settings.get(name) for name in CONSTRAINTS}, {})
        for name in SPANS:
            checked_spans(row.settings.get(name, ()))


def plain(case: bytes, folder: Path) -> None:
    """Read a file of plain prompts."""
    _read(folder / "in" / "prompts.txt", case, RULES[0])


def lines(case: tuple[bytes, RuleChoice], folder: Path) -> None:
    """Read a file of JSON objects."""
    _read(folder / "in" / "prompts.jsonl", *case)


def replay(case: bytes, folder: Path) -> None:
    """Read a corpus for replay; check that it holds the tokens of its rows in order, all in the target's vocabulary."""
    path = folder / "in" / "rows.jsonl"
    path.write_bytes(case)
    corpus = drafters.load(f"replay:{path}", _target()).params.tolist()
    rows = [json.loads(line) for line in case.decode().splitlines() if line.strip()]
    expected = [token for row in rows for token in (*row.get("prompt_tokens", []), *row["tokens"])]
    assert [token for token in corpus if token != NO_TOKEN] == expected
    assert all(0 <= token < VOCAB for token in expected)


@functools.cache
def _target() -> mj.Pretrained:
    return mj.Pretrained.from_parts(fake.hash_model(vocab_size=VOCAB), (), max_positions=64)


VOCAB = 11
CORPUS = ({"tokens": [1, 2, 3, 10]}, {"prompt_tokens": [4, 5], "tokens": [6, 0], "text": "a"})
_CORPUS_LINE = st.one_of(
    *(damaged_json(row) for row in CORPUS), st.sampled_from(CORPUS).map(lambda row: json.dumps(row).encode())
)
_TEXTS = st.one_of(
    damaged_bytes(TEXT),
    st.binary(max_size=40),
    st.sampled_from(TEXTS).map(lambda t: t.encode(errors="surrogatepass")),
)
_LINE = st.one_of(*(damaged_json(row) for row in ROWS))
_PAIR = st.tuples(st.sampled_from(ROWS), st.sampled_from(ROWS).flatmap(damaged)).map(
    lambda rows: json.dumps(rows[0]).encode() + b"\n" + to_text(rows[1]).encode()
)


SURFACES = {
    "prompts file, plain": Surface(_TEXTS, plain, 1500, empty),
    "rows to replay": Surface(st.lists(_CORPUS_LINE, max_size=3).map(b"\n".join), replay, 1500, empty),
    "prompts file, JSON lines": Surface(
        st.tuples(st.one_of(_LINE, _LINE, _PAIR), st.sampled_from(RULES)), lines, 4000, empty
    ),
}
