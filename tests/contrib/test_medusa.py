"""Medusa heads, compared with numpy over a target run from an empty cache, and their files, compared with torch."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mars_jax import contrib, drafters, verify
from mars_jax.contrib.drafters.medusa_files import load_medusa, save_medusa
from mars_jax.contrib.models import medusa_layers as heads
from mars_jax.contrib.models.medusa_layers import MedusaConfig
from mars_jax.core import decode
from mars_jax.core.tree import static_topology
from mars_jax.core.types import NO_TOKEN, Params, Visible
from mars_jax.drafters.tree_shapes import Dynamic
from mars_jax.models import ModelConfig, init_params, language_model
from mars_jax.utils.errors import MarsError
from tests.helpers import begin, committed, decode_all, draft_input, ragged
from tests.helpers.checkpoint_files import message, write
from tests.helpers.served import serving

VOCAB, BUFFER = 7, 40  # few tokens, so that random drafts are sometimes accepted
SIZES = {"vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 24, "num_layers": 2, "num_heads": 2}
OF_TARGET = ModelConfig(**SIZES)
TARGET = language_model(OF_TARGET)
CONFIG = MedusaConfig(num_heads=4, num_layers=2, hidden_size=16, vocab_size=VOCAB)


@pytest.fixture(scope="module")
def params():
    target = init_params(OF_TARGET, jax.random.key(0), scale=0.5)
    draft = heads.init_params(CONFIG, jax.random.key(1), scale=0.5)
    # Nonzero biases, as in trained heads.
    draft = jax.tree.map(lambda x: x + 0.1 if x.ndim == 1 else x, draft)
    return Params(target, draft)


@jax.jit
def _hidden(params, tokens):
    visible = Visible.causal(jnp.zeros((1,), jnp.int32), BUFFER)
    return TARGET.forward(params, tokens, visible, TARGET.init_cache(1, BUFFER)).hidden[0]


def slow_logits(params, past):
    """Return f32[H, V], computed from the whole text as in the paper."""
    hidden = np.zeros(16, np.float32)
    if len(past) > 1:
        padded = np.zeros((1, BUFFER), np.int32)
        padded[0, : len(past)] = past
        hidden = np.asarray(_hidden(params.target, jnp.asarray(padded)))[len(past) - 2]
    logits = []
    for head in jax.device_get(params.draft["heads"]):
        x = hidden
        for block in head["blocks"]:
            y = block["weight"] @ x + block["bias"]
            x = x + y / (1 + np.exp(-y))
        logits.append(head["unembed"] @ x)
    return np.stack(logits)


def begin_decoding(drafter, params, **settings):
    prompts = ragged([1, 2, 17], BUFFER, VOCAB)
    return begin(TARGET, drafter, verify.exact(), *prompts, params=params, chunk=8, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("tree", [None, (1, 1), (3, 2, 1)])
def test_every_draft_is_what_the_heads_say_of_the_text_and_changes_none_of_it(params, tree):
    drafter = contrib.medusa(CONFIG, TARGET, tree=tree)
    branching = (1,) * 4 if tree is None else tree
    decoder, state = begin_decoding(drafter, params)
    lengths_emitted, propose = set(), jax.jit(drafter.propose)
    while not bool(jnp.all(state.done)):
        drafted, _ = propose(params, state.draft, draft_input(state))
        for row, past in enumerate(committed(state)):
            if state.done[row]:
                continue
            best = np.argsort(-slow_logits(params, past), axis=1, kind="stable")
            level, expected = 1, [past[-1]]
            for depth, width in enumerate(branching):
                expected += best[depth, :width].tolist() * level
                level *= width
            assert drafted.tokens[row].tolist() == expected, (row, len(past))
        topology = drafted.parents[0].tolist(), drafted.depths[0].tolist()
        assert topology == tuple(column.tolist() for column in static_topology(branching))
        state, info = decode.jitted_step(decoder, params, state)
        lengths_emitted |= set(info.num_emitted.tolist())
    assert {1, 2, 3} <= lengths_emitted
    prompts = ragged([1, 2, 17], BUFFER, VOCAB)
    undrafted, _ = decode_all(TARGET, drafters.none(), verify.exact(), *prompts, params=params)
    assert committed(state) == committed(undrafted)


def test_nothing_is_drafted_from_the_first_unsure_head_on(params):
    stop, lasts = [np.inf, 0.7, 0.0], []
    for tree in (None, (2, 2, 1)):
        drafter = contrib.medusa(CONFIG, TARGET, tree=tree)
        _, state = begin_decoding(drafter, params, draft_stop=stop)
        drafted, _ = jax.jit(drafter.propose)(params, state.draft, draft_input(state))
        for row, past in enumerate(committed(state)):
            z = slow_logits(params, past)[: drafted.max_depth]
            p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
            unsure = np.sqrt(-(p * np.log(p)).sum(axis=1)) > stop[row]
            last = int(np.argmax(unsure)) if unsure.any() else drafted.max_depth
            lasts.append(last)
            padding = np.asarray(drafted.tokens[row]) == NO_TOKEN
            assert padding.tolist() == (np.asarray(drafted.depths[row]) > last).tolist()
    assert lasts == [4, 2, 0, 3, 2, 0]  # no stop, a stop on the way, a stop at once


@pytest.mark.slow
def test_a_sampled_chain_follows_the_distributions_it_reports(params):
    rows, past = 4000, [3, 1, 4, 1, 5]
    drafter = contrib.medusa(CONFIG, TARGET, 2, sample=True)
    prompts = jnp.broadcast_to(jnp.asarray([past + [0] * 7], jnp.int32), (rows, 12))
    lengths = jnp.full((rows,), 5, jnp.int32)
    sampling = {"temperature": 0.7, "top_k": 4}
    _, state = begin(TARGET, drafter, verify.rejection(), prompts, lengths, params=params, **sampling)
    tree, _ = jax.jit(drafter.propose)(params, state.draft, draft_input(state))
    z = slow_logits(params, past)[:2] / 0.7
    z[np.arange(2)[:, None], np.argsort(-z, axis=1)[:, 4:]] = -np.inf
    expected = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(jax.nn.softmax(tree.draft_logits[0, :2]), expected, atol=1e-5)
    frequencies = np.zeros((VOCAB, VOCAB))
    np.add.at(frequencies, (np.asarray(tree.tokens[:, 1]), np.asarray(tree.tokens[:, 2])), 1 / rows)
    # Heads must draw independently, so compare pairs, within five standard deviations of a frequency.
    np.testing.assert_allclose(frequencies, np.outer(*expected), atol=5 * 0.5 / rows**0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 5}, "5 tokens in a row needs as many Medusa heads, and there are 4"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0: expected a whole number from 1 to 128"),
        ({"tree": (8,)}, "8 children in a vocabulary of 7"),
        ({"tree": Dynamic()}, "draft no dynamic tree"),
    ],
)
def test_drafts_that_the_heads_cannot_make_are_refused(options, message):
    with pytest.raises(MarsError, match=message):
        contrib.medusa(CONFIG, TARGET, **options)


def test_heads_for_another_vocabulary_are_refused():
    with pytest.raises(MarsError, match="11 tokens and the target has 7"):
        contrib.medusa(dataclasses.replace(CONFIG, vocab_size=11), TARGET)


def write_torch(directory, draft, *, prefix="", dtype="float32", **config):
    """Write heads in the published layout."""
    table = {}
    for i, head in enumerate(draft["heads"]):
        for j, block in enumerate(head["blocks"]):
            table[f"{prefix}{i}.{j}.linear.weight"] = block["weight"]
            table[f"{prefix}{i}.{j}.linear.bias"] = block["bias"]
        table[f"{prefix}{i}.{len(head['blocks'])}.weight"] = head["unembed"]
    directory.mkdir()
    write(directory / "medusa_lm_head.pt", {k: np.asarray(v) for k, v in table.items()}, "bin", dtype)
    fields = {"medusa_num_heads": 4, "medusa_num_layers": 2, "base_model_name_or_path": "some/model"} | config
    (directory / "config.json").write_text(json.dumps(fields))
    return directory


@pytest.mark.parametrize(
    "options",
    [{}, {"prefix": "medusa_head."}, {"medusa_num_heads": 2}],  # the first published config has 2 heads of 5
    ids=["plain", "prefixed", "more heads than the config says"],
)
def test_published_heads_load(params, tmp_path, options):
    config, draft = load_medusa(write_torch(tmp_path / "heads", params.draft, **options), OF_TARGET)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, draft, params.draft)


def test_half_precision_becomes_bfloat16_unless_another_is_asked_for(params, tmp_path):
    directory = write_torch(tmp_path / "heads", params.draft, dtype="float16")
    assert load_medusa(directory, OF_TARGET)[1]["heads"][0]["unembed"].dtype == jnp.bfloat16
    full = load_medusa(directory, OF_TARGET, dtype="float32")[1]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3), full, params.draft)
    with pytest.raises(MarsError, match="dtype 'int2' is not supported"):
        load_medusa(directory, OF_TARGET, dtype="int2")


def test_saved_heads_load_as_they_were(params, tmp_path):
    saved = save_medusa(tmp_path / "heads", CONFIG, params.draft, base_model="some/model")
    assert sorted(file.name for file in saved.iterdir()) == ["config.json", "medusa_lm_head.safetensors"]
    assert json.loads((saved / "config.json").read_text())["base_model_name_or_path"] == "some/model"
    assert "3.2.weight" in load_file(saved / "medusa_lm_head.safetensors")
    config, draft = load_medusa(saved, OF_TARGET)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, draft, params.draft)
    with pytest.raises(MarsError, match="exists and is not an empty directory"):
        save_medusa(saved, CONFIG, params.draft)
    save_medusa(saved, CONFIG, params.draft, overwrite=True)
    (saved / "medusa_lm_head.safetensors").rename(saved / "model.safetensors")
    renamed = load_medusa(saved, OF_TARGET)[1]
    jax.tree.map(np.testing.assert_array_equal, renamed, params.draft)
    with pytest.raises(
        MarsError, match=r"blocks.0.weight has shape \[16, 16\], but the config needs \[8, 8\]"
    ):
        save_medusa(tmp_path / "other", dataclasses.replace(CONFIG, hidden_size=8), params.draft)


@pytest.mark.parametrize(
    ("target", "config", "message"),
    [
        ({"hidden_size": 32}, {}, "are for a hidden size of 16 and the target has 32: use the heads"),
        ({"vocab_size": 9}, {}, "are for a vocabulary of 7 and the target has 9: use the heads"),
        ({}, {"medusa_num_heads": 5}, "says 5 heads and the weights hold 4"),
        ({}, {"medusa_num_layers": 1}, "says 1 residual layers a head and the weights hold 2"),
        ({}, {"medusa_num_heads": True}, "medusa_num_heads of '.*' is True"),
    ],
)
def test_heads_of_another_target_or_config_are_refused(params, tmp_path, target, config, message):
    heads_folder = write_torch(tmp_path / "heads", params.draft, **config)
    with pytest.raises(MarsError, match=message):
        load_medusa(heads_folder, ModelConfig(**SIZES | target))


def test_tensors_that_are_not_those_of_heads_are_named(params, tmp_path):
    saved = save_medusa(tmp_path / "heads", CONFIG, params.draft)
    tensors = load_file(saved / "medusa_lm_head.safetensors")
    del tensors["1.0.linear.bias"]
    tensors["2.1.linear.bias"] = np.zeros(3, np.float32)
    tensors["norm.weight"] = np.zeros(3, np.float32)
    save_file(tensors, saved / "medusa_lm_head.safetensors")
    text = message(load_medusa, saved, OF_TARGET)
    assert "1 tensors are missing (1.0.linear.bias)" in text
    assert "1 have the wrong shape (2.1.linear.bias is [3] and not [16])" in text
    assert "1 are not part of the architecture (norm.weight)" in text


def test_a_folder_without_heads_is_refused(tmp_path):
    with pytest.raises(MarsError, match=r"holds no Medusa heads: put medusa_lm_head\.safetensors or"):
        load_medusa(tmp_path, OF_TARGET)
    with pytest.raises(MarsError, match="there is no directory"):
        load_medusa(tmp_path / "nowhere", OF_TARGET)


def test_heads_on_the_hub_are_fetched_without_the_files_that_are_not_needed(params, tmp_path, monkeypatch):
    folder = write_torch(tmp_path / "heads", params.draft)
    with serving(tmp_path / "cache", monkeypatch) as server:
        files = {file.name: file.read_bytes() for file in folder.iterdir()}
        server.repositories["some/heads"] = files | {"pytorch_model.bin": b"weights of the base model"}
        assert load_medusa("some/heads", OF_TARGET)[0] == CONFIG
    fetched = {path.rpartition("/")[2] for command, path, _ in server.asked if command == "GET"}
    assert files.keys() <= fetched and "pytorch_model.bin" not in fetched
