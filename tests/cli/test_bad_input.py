"""Invalid checkpoints and prompts: a one-sentence error, exit code 2, and no file written."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mars_jax import hub
from mars_jax.cli import commands
from tests.helpers.checkpoint_files import edit_config, edit_weights

FEW = ["--max-new-tokens", "8"]


@pytest.fixture
def refused_unwritten(refused, tmp_path):
    """Return `refused` with an --output flag added; the output file must not be created."""

    def call(*argv):
        output = tmp_path / "rows.jsonl"
        message = refused(*argv, "--output", output)
        assert not output.exists()
        return message

    return call


@pytest.fixture
def prompts_file(tmp_path):
    """Return a function that writes rows to a prompts file."""

    def write(*rows):
        file = tmp_path / "p.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write


def test_a_missing_path(refused_unwritten, tmp_path, target):
    missing = tmp_path / "nowhere"
    for draft in ("none", f"model:{missing}", f"eagle:{missing}", f"medusa:{missing}"):
        argv = ["--target", missing if draft == "none" else target, "--draft", draft, "hello"]
        assert f"there is no directory '{missing}'" in refused_unwritten(*argv)


def test_a_missing_file_is_refused_before_weights_load(refused_unwritten, tmp_path, target, monkeypatch):
    monkeypatch.setattr(hub, "load", None)
    for path in (tmp_path / "nowhere", tmp_path):
        argv = ["--target", target, "--draft", f"model:{target}", "--refine", path, "hello"]
        assert f"--refine is {path}, and there is no such file: check the path." in refused_unwritten(*argv)


def test_an_unknown_architecture(refused_unwritten, broken):
    edit_config(broken, architectures=["MambaForCausalLM"])
    message = refused_unwritten("--target", broken, "hello")
    assert "MambaForCausalLM is not supported" in message and "mars-jax models" in message


def test_tensors_that_do_not_fit(refused_unwritten, broken):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.extra.weight"] = np.zeros(3, np.float32)
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((3, 2), np.float32)

    edit_weights(broken, change)
    message = refused_unwritten("--target", broken, "hello")
    assert "1 tensors are missing (model.norm.weight)" in message
    assert "model.layers.0.mlp.up_proj.weight is [3, 2] and not [48, 32]" in message
    assert "not part of the architecture (model.layers.0.extra.weight)" in message


def test_heads_that_are_not_numbers(refused_unwritten, target, medusa, tmp_path):
    damaged = shutil.copytree(medusa, tmp_path / "damaged")
    tensors = load_file(damaged / "medusa_lm_head.safetensors")
    tensors["1.0.linear.bias"].fill(np.inf)
    save_file(tensors, damaged / "medusa_lm_head.safetensors")
    message = refused_unwritten("--target", target, "--draft", f"medusa:{damaged}", "hello")
    assert f"the weights of the draft '{damaged}' are not finite (heads.1.blocks.0.bias)" in message


def test_a_prompt_longer_than_the_context(refused_unwritten, target, prompts_file):
    message = refused_unwritten("--target", target, "q" * 64)
    assert "the prompt has 64 tokens" in message and "a context of 64" in message
    file = prompts_file({"prompt": "a"}, {"prompt": "q" * 64})
    message = refused_unwritten("--target", target, "--prompts-file", file)
    assert "p.jsonl, line 2: the prompt has 64 tokens" in message


def test_checksums_of_what_is_no_conversion(refused_unwritten, target):
    message = refused_unwritten("--target", target, "--no-check", "hello")
    assert f"--no-check does not apply to '{target}', which is not a conversion" in message


@pytest.mark.slow
def test_a_conversion_whose_bits_have_changed(refused_unwritten, run, target, tmp_path):
    converted = hub.convert(target, tmp_path / "made")
    file = max(converted.rglob("*.safetensors"), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1  # lowest bit of a weight; the output text does not change
    file.write_bytes(data)
    assert "is damaged, its checksum differs" in refused_unwritten("--target", converted, "hello")
    assert run("--target", converted, "--no-check", *FEW, "hello").code == 0
    message = refused_unwritten("--target", target, "--no-check", "hello")
    assert f"--no-check does not apply to '{target}', which is not a conversion" in message


def test_a_missing_tokenizer(refused, broken, prompts_file):
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (broken / file).unlink()
    assert "no tokenizer could be read" in refused("--target", broken, "hello")
    file = prompts_file({"prompt_tokens": [1]})
    assert "no text to show" in refused("--target", broken, "--draft", "none", *FEW, "--prompts-file", file)


def test_weights_that_are_not_numbers(refused, refused_unwritten, broken):
    edit_weights(broken, lambda tensors: tensors["model.norm.weight"].fill(np.nan))
    expected = f"the logits of '{broken}' are not finite"
    argv = ["--target", broken, "--draft", "none", *FEW, "hello"]
    assert expected in refused_unwritten(*argv)
    assert expected in refused(*argv)
    assert f"{expected} for 2 of 2 prompts" in refused(*argv, "world", "--json")


CLEAR = "\x1b[2J\x9b31m\u202e"
"""Control characters that clear the terminal, set a colour and reverse the text direction."""


@pytest.mark.parametrize("place", ["path", "tensor", "template", "command"])
def test_no_terminal_obeys_what_an_error_quotes(broken, capsys, place):
    argv = ["generate", "--target", str(broken), "hello"]
    if place == "path":
        argv = ["generate", "--target", f"./{CLEAR}", "hello"]
    elif place == "tensor":
        edit_weights(broken, lambda tensors: tensors.update({CLEAR: np.ones(3, np.float32)}))
    elif place == "template":
        (broken / "chat_template.jinja").write_text("{{ raise_exception('" + CLEAR + "') }}")
        argv.insert(-1, "--chat")
    else:
        argv = [CLEAR]
    assert commands.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and r"\x1b[2J\x9b31m\u202e" in err and err.rstrip("\n").isprintable()
