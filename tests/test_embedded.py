"""The family that ships with the package: its size, its agreement with transformers, and its abilities."""

import json

import numpy as np
import pytest

import mars_jax as mj
from mars_jax.hub.files import resolve
from mars_jax.lab.evaluate.scoring import score_answer
from mars_jax.lab.evaluate.tasks.catalogue import read_arithmetic
from mars_jax.utils import assets
from tests.helpers import slow_but
from tests.helpers.checkpoint_files import message

PROMPT = "Once upon a time"
CHAIN = f"model:{assets.DRAFT}"


@pytest.fixture(scope="module")
def family():
    return {name: mj.load(name, dtype="float32") for name in assets.MODELS}


def test_it_is_small_enough_to_ship():
    def size(name):
        return sum(file.stat().st_size for file in assets.path(name).iterdir())

    assert sum(map(size, assets.MODELS)) <= 40e6
    assert size(assets.EAGLE3) <= 8e6 and size(assets.DFLASH) <= 8e6
    assert sum(map(size, (assets.SPRINTER, assets.TRISPEC, assets.VIA_SD))) <= 5e3
    for name, millions in ((assets.TARGET, 12), (assets.DRAFT, 1), (assets.PROXY, 5)):
        config = json.loads((assets.path(name) / "config.json").read_text())
        assert config["torch_dtype"] == "bfloat16" and config["max_position_embeddings"] >= 1024
        weights = (assets.path(name) / "model.safetensors").stat().st_size / 2 / 1e6
        assert 0.9 * millions < weights < 1.2 * millions
    tokenizers = [(assets.path(name) / "tokenizer.json").read_bytes() for name in assets.MODELS]
    assert len(set(tokenizers)) == 1


@pytest.mark.parametrize("name", slow_but(assets.MODELS, assets.DRAFT))
def test_transformers_loads_it_unchanged_and_continues_alike(family, name):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    reference = AutoModelForCausalLM.from_pretrained(assets.path(name), dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(assets.path(name))
    loaded = family[name]
    assert type(loaded.tokenizer) is type(tokenizer)
    ids = tokenizer(PROMPT)["input_ids"]
    assert ids == loaded.encode(PROMPT)
    assert ids[0] == loaded.config.bos_token_id == loaded.stop_tokens[0] == tokenizer.eos_token_id
    with torch.no_grad():
        sequences = reference.generate(torch.tensor([ids]), max_new_tokens=48, do_sample=False)
    expected = sequences[0, len(ids) :].tolist()
    result = mj.generate(loaded, "none", [PROMPT], max_new_tokens=48)
    assert result.tokens[0] == expected
    assert result.text[0] == tokenizer.decode(expected, skip_special_tokens=True)


def test_a_folder_of_the_same_name_hides_it_only_with_a_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / assets.TARGET).mkdir(parents=True)
    assert resolve(assets.TARGET) == assets.path(assets.TARGET)
    (tmp_path / assets.TARGET / "config.json").write_text("{}")
    assert resolve(assets.TARGET).resolve() == tmp_path / assets.TARGET


def test_what_the_wheel_leaves_out_is_asked_for_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(assets, "path", lambda name: tmp_path / name if name in assets.NAMES else None)
    text = message(resolve, assets.DFLASH)
    assert text.startswith("'tiny/dflash' is not in the wheel") and "pip install -e ., or name a copy" in text


def test_its_chat_is_turns_of_user_and_assistant(family):
    tokenizer = family[assets.TARGET].tokenizer
    contents = {"How many?": "user", "Two.": "assistant", "Sure?": "user"}
    turns = [{"role": role, "content": content} for content, role in contents.items()]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    end = tokenizer.eos_token
    assert text == f"{end}User: How many?\nAssistant: Two.{end}User: Sure?\nAssistant:"
    ids = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids.count(tokenizer.bos_token_id) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("draft", "least"), [(f"eagle:{assets.EAGLE3}", 3.7), (f"dflash:{assets.DFLASH}", 2.2), (CHAIN, 2.2)]
)
def test_the_draft_and_the_head_are_worth_having_and_change_nothing(family, draft, least):
    target = family[assets.TARGET]
    prompts = [PROMPT, "One day, a girl named Sue", "The little dog was sad because"]
    undrafted = mj.generate(target, "none", prompts, max_new_tokens=64)
    drafter = mj.drafters.load(draft, target, dtype="float32")
    drafted = mj.generate(target, drafter, prompts, max_new_tokens=64)
    assert drafted.tokens == undrafted.tokens and drafted.metrics.tau > least


@pytest.mark.slow
def test_it_does_arithmetic_it_has_not_seen(family):
    problems, target = read_arithmetic("eval", 32), family[assets.TARGET]
    chain = mj.drafters.load(CHAIN, target, dtype="float32")
    result = mj.generate(target, chain, [p.turns[0] for p in problems], chat=True, max_new_tokens=96)
    # scripts/eval_embedded.py of 5336526 scores 99% of 1,000; a guessed number would almost never be right.
    assert np.mean([score_answer(p, t) for p, t in zip(problems, result.text, strict=True)]) >= 0.9
    assert all(c.finish_reason == "stop" for c in result.completions)
