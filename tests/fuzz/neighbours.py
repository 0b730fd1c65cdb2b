"""Files of earlier answers to draft from, and what may stand beside a GGUF file, which it is not to read."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path

from hypothesis import strategies as st

import mars_jax as mj
from mars_jax import drafters, hub
from mars_jax.core import fake
from mars_jax.core.types import NO_TOKEN
from tests.fuzz.damage import HOSTILE_JSON, TEXTS, damaged_bytes, damaged_json, to_text
from tests.fuzz.harness import Surface

VOCAB = 11
ROWS = ({"tokens": [1, 2, 3, 10]}, {"prompt_tokens": [4, 5], "tokens": [6, 0], "text": "a"})
_LINE = st.one_of(
    *(damaged_json(row) for row in ROWS), st.sampled_from(ROWS).map(lambda row: json.dumps(row).encode())
)
_ROWS = st.lists(_LINE, max_size=3).map(b"\n".join)


@functools.cache
def _target() -> mj.Pretrained:
    return mj.Pretrained.from_parts(fake.hash_model(vocab_size=VOCAB), (), max_positions=64)


def replayed(case: tuple[bytes, str], folder: Path) -> None:
    """A corpus has the tokens of its rows, in their order, and none that the target lacks."""
    data, name = case
    path = folder / "in" / name
    path.write_bytes(data)
    made = drafters.load(f"replay:{path}", _target())
    rows = [json.loads(line) for line in data.decode().splitlines() if line.strip()]
    wanted = [token for row in rows for token in (*row.get("prompt_tokens", []), *row["tokens"])]
    found = [token for token in made.params.tolist() if token != NO_TOKEN]
    assert found == wanted and all(0 <= token < VOCAB for token in found)


TOKENIZER = {"version": "1.0", "model": {"type": "BPE", "vocab": {"ab": 0, "c": 1}, "merges": []}}
BESIDE = {
    "tokenizer.json": TOKENIZER,
    "tokenizer_config.json": {"tokenizer_class": "LlamaTokenizer", "bos_token": "ab", "add_bos_token": True},
    "special_tokens_map.json": {"bos_token": "ab", "eos_token": "c"},
    "config.json": {"model_type": "qwen2", "vocab_size": 7, "eos_token_id": 3},
    "generation_config.json": {"eos_token_id": [3, 4]},
    "chat_template.jinja": "another model's",
    "added_tokens.json": {"ab": 3},
}
_BESIDE = st.dictionaries(
    st.sampled_from(sorted(BESIDE)),
    st.one_of(
        st.none(),  # a good file of another model
        HOSTILE_JSON.map(lambda value: to_text(value).encode()),
        st.sampled_from(TEXTS).map(lambda text: text.encode(errors="surrogatepass")),
        damaged_bytes(json.dumps(TOKENIZER).encode()),
    ),
    max_size=4,
)


def beside(case: tuple[dict[str, bytes | None], int | None], folder: Path) -> None:
    """The checkpoint is what the file says, whatever else its folder holds; cut short, it is refused."""
    files, size = case
    whole = (folder / "in" / "model.gguf").read_bytes()
    with tempfile.TemporaryDirectory(dir=folder / "in") as place:  # what was read of one place may be kept
        path = Path(place, "model.gguf")
        path.write_bytes(whole[:size])
        for name, data in files.items():
            good = BESIDE[name] if isinstance(BESIDE[name], str) else json.dumps(BESIDE[name])
            Path(place, name).write_bytes(good.encode() if data is None else data)
        found = hub.outline(str(path))
        assert found.encode("abcd") == [2, 3] and found.stop_tokens == (1,), case
        assert found.tokenizer.chat_template is None and found.config.vocab_size == 96, case


def _gguf(folder: Path) -> None:
    from tests.helpers.gguf_files import write  # gguf is imported there, and by no other surface

    (folder / "in").mkdir()
    write(folder / "in" / "model.gguf", "llama")


SURFACES = {
    "rows to replay": Surface(
        st.tuples(_ROWS, st.just("rows.jsonl")), replayed, 1500, lambda folder: (folder / "in").mkdir()
    ),
    "files beside a GGUF": Surface(
        st.tuples(_BESIDE, st.sampled_from((None,) * 9 + (1000,))), beside, 200, _gguf
    ),
}
