"""Tests of `--refine` and `--draft-size auto` on the command line: equal completions, and the message on stderr."""

import json

import jax
import pytest

TEXTS = "\n<|endoftext|>\n".join(f"a story of the sea and the sun and the sand {i}" for i in range(6))
PROMPTS = ["the sea", "a story of", "the sun and", "of the sand", "a sea", "the story"]


@pytest.mark.slow
def test_texts_do_not_depend_on_what_the_draft_learns_or_on_its_size(run, target, draft, tmp_path):
    texts = tmp_path / "texts.txt"
    texts.write_text(TEXTS)
    shared = ["--target", target, "--draft", f"model:{draft}", "--num-draft-tokens", 2, "--verify", "exact"]
    shared += ["--dtype", "float32", "--max-new-tokens", 12, "--batch-size", 2, "--ignore-eos", *PROMPTS]
    refined = ["--refine", texts, "--refine-every", 3]
    tokens = {}
    for name, flags in (("plain", []), ("refined", refined), ("auto", ["--draft-size", "auto"])):
        output = tmp_path / f"{name}.jsonl"
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its integer step counter with floats
            completed = run("--output", output, *flags, *shared)
        assert completed.code == 0, completed.err
        assert ("the draft was refined 2 times" in completed.err) == (name == "refined")
        rows = [json.loads(line) for line in output.read_text().splitlines()]
        assert all("log_probs" not in row for row in rows)
        tokens[name] = [row["tokens"] for row in rows]
    assert len(tokens["plain"]) == 6 and tokens["plain"] == tokens["refined"] == tokens["auto"]
