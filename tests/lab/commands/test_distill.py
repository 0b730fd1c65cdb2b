"""Tests of `mars-jax distill`: each kind trains, resumes, is written in its layout, and drafts losslessly."""

import json
import re
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

import mars_jax as mj
from mars_jax import hub
from mars_jax.contrib.rules import diversed_training
from mars_jax.core.axes import parse_mesh
from mars_jax.lab.commands import distill, distill_run
from mars_jax.lab.evaluate.tasks.catalogue import read_arithmetic
from mars_jax.lab.training import data, distillation, eagle_training, features
from mars_jax.lab.training.objectives import forward_kl
from mars_jax.models import init_params
from mars_jax.models.config import Delta, ModelConfig

TEXT = "\n<|endoftext|>\n".join(f"a story of the sea and the sun, number {i}, of the sand" for i in range(40))
pytestmark = pytest.mark.usefixtures("standard_promotion")
SIZES = ("--tokens", 512, "--step-tokens", 128, "--length", 32, "--learning-rate", 0.01)


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def call(capsys):
    def call(*argv):
        code = distill.main([str(a) for a in argv])
        return code, capsys.readouterr().err

    return call


KINDS = {
    "eagle3": "--draft-vocab 200 --steps-ahead 2 --feature-layers 0,0,0",
    "eagle1": "--intermediate-size 16",
    "mtp": "--steps-ahead 2",
    "medusa": "--heads 2",
    "dflash": "--block-size 4 --head-layers 1 --feature-layers 0,0 --markov-rank 4 --confidence",
    "model": "",
}


@pytest.fixture
def recurrent_target(target, tmp_path):
    """Return a checkpoint with a recurrent layer and an attention layer, and the tokenizer of `target`."""
    delta = Delta(layers=(0,), key_heads=1, value_heads=2, key_dim=8, value_dim=6)
    sizes = {
        name: getattr(hub.read_config(target), name)
        for name in ("vocab_size", "hidden_size", "intermediate_size")
    }
    options = {
        "family": "qwen3_5_text",
        "delta": delta,
        "attention_gate": True,
        "norm_plus_one": True,
        "qk_norm": True,
    }
    config = ModelConfig(num_layers=2, num_heads=2, **sizes, **options)
    path = hub.save(tmp_path / "recurrent", config, init_params(config, jax.random.key(0), scale=0.4))
    for file in target.glob("*token*"):
        shutil.copy(file, path)
    return path


@pytest.fixture
def drafts_losslessly(run, target):
    """Return a check that decoding with a draft and without one gives the same tokens."""

    def check(draft, target=target):
        rows = []
        shared = ("--target", target, "--dtype", "float32", "--max-new-tokens", 12, "--json")
        for flags in (("--draft", draft, "--verify", "exact"), ("--draft", "none")):
            result = run(*flags, *shared, "the sea", "a story of")
            assert result.code == 0, result.err
            rows.append([json.loads(line)["tokens"] for line in result.out.splitlines()])
        assert rows[0] == rows[1]

    return check


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_each_kind_trains_and_drafts_losslessly(kind, call, drafts_losslessly, text, target, draft, tmp_path):
    output = tmp_path / "made"
    flags = (*KINDS[kind].split(), *(("--from", draft) if kind == "model" else ()))
    code, err = call(kind, "--target", target, "--data", text, "--output", output, *SIZES, *flags)
    assert code == 0, err
    figures = [json.loads(line) for line in (tmp_path / "made-training/log.jsonl").read_text().splitlines()]
    assert len(figures) == 4 and "accept_1" in figures[0]
    drafts_losslessly(f"{kind.rstrip('13')}:{output}")


@pytest.mark.parametrize("kind", ["eagle3", "eagle1", "mtp", "medusa", "dflash"])
@pytest.mark.slow
def test_heads_of_recurrent_targets_train_and_draft_losslessly(
    kind, call, drafts_losslessly, text, recurrent_target, tmp_path
):
    flags = ("--target", recurrent_target, "--data", text, "--output", tmp_path / "made", *SIZES)
    code, err = call(kind, *flags, *KINDS[kind].split())
    assert code == 0, err
    drafts_losslessly(f"{kind.rstrip('13')}:{tmp_path / 'made'}", recurrent_target)


@pytest.mark.slow
def test_a_recurrent_draft_model_is_refused_before_the_training(
    call, text, target, recurrent_target, tmp_path
):
    flags = ("--target", target, "--from", recurrent_target, "--data", text, "--output", tmp_path / "made")
    code, err = call("model", *flags, *SIZES)
    assert code == 2 and "has recurrent layers, whose state cannot drop" in err.splitlines()[-1]


@pytest.fixture
def dump(call, text, target, tmp_path, monkeypatch):
    """Write three shards of features and return their folder."""
    monkeypatch.setattr(distill_run, "SHARD", 14)
    flags = ("--target", target, "--feature-layers", "0,0,0", "--length", 32, "--data", text)
    code, err = call("features", *flags, "--output", tmp_path / "features")
    assert code == 0 and err.count("14 texts") == 2 and "12 texts" in err, err
    # Existing shards are not rewritten.
    assert "texts" not in call("features", *flags, "--output", tmp_path / "features")[1]
    return tmp_path / "features"


@pytest.fixture
def train_head(call, dump, target):
    """Return a function that trains a head on the features and returns its folder."""

    def train(output, *flags):
        sizes = ("--steps-ahead", 2, "--step-tokens", 64, "--tokens", 256, "--layout", "speculators")
        code, err = call("eagle3", "--target", target, "--features", dump, *sizes, *flags, "--output", output)
        assert code == 0, err
        return output

    return train


@pytest.fixture
def head(train_head, tmp_path):
    return train_head(tmp_path / "made", "--feature-layers", "0,0,0", "--draft-vocab", 200)


@pytest.mark.slow
def test_a_head_trains_on_features_that_were_written_before(head, drafts_losslessly, tmp_path):
    held_out = [json.loads(x) for x in (tmp_path / "made-training/held_out.jsonl").read_text().splitlines()]
    assert [row["tokens"] for row in held_out] == [256] and held_out[0]["tau"] >= 1
    assert json.loads((head / "config.json").read_text())["speculators_model_type"] == "eagle3"
    drafts_losslessly(f"eagle:{head}")


@pytest.mark.slow
def test_a_head_trained_further_at_a_tiny_rate_stays_the_same(train_head, head, tmp_path):
    train_head(tmp_path / "again", "--from", head, "--learning-rate", 1e-12)
    old, new = (load_file(folder / "model.safetensors") for folder in (head, tmp_path / "again"))
    jax.tree.map(np.testing.assert_array_equal, new, old)


@pytest.mark.slow
def test_features_of_other_layers_are_refused(call, dump, target, tmp_path):
    flags = ("--target", target, "--features", dump, "--feature-layers", "0,0,1")
    code, err = call("eagle3", *flags, "--output", tmp_path / "other")
    assert code == 2 and "are of the layers [0, 0, 0]" in err


@pytest.mark.slow
def test_the_learned_parts_of_systems_train_and_load(call, run, text, tmp_path, monkeypatch):
    monkeypatch.setattr(distill_run, "read_arithmetic", lambda split: read_arithmetic(split, 8))
    monkeypatch.setattr(distill_run, "EVALUATIONS", 2)
    monkeypatch.setattr(diversed_training, "ROLLOUTS", 4)
    monkeypatch.setattr(diversed_training, "ANSWER_TOKENS", 8)
    monkeypatch.setattr(diversed_training, "UPDATES", 2)
    small = ("--target", "tiny/target", "--from", "tiny/draft")
    sizes = ("--data", text, "--tokens", 256, "--step-tokens", 64, "--length", 32)
    for kind in ("sprinter", "via_sd", "diversed"):
        code, err = call(kind, *small, *(() if kind == "diversed" else sizes), "--output", tmp_path / kind)
        assert code == 0, err
        flags = ("--draft", f"{kind}:{tmp_path / kind}")
        if kind == "diversed":
            flags = ("--draft", "model:tiny/draft", "--verify", f"{kind}:{tmp_path / kind}")
        decoded = run("--target", "tiny/target", *flags, "--max-new-tokens", 4, "--json", "the sea")
        assert decoded.code == 0, decoded.err
        assert len(json.loads(decoded.out)["tokens"]) == 4


@pytest.mark.slow
def test_features_are_of_the_targets_answers(call, tmp_path):
    """At temperature 0, each token of the embedded model's answer is the recorded top token of the position before."""
    question = "Tom has 3 apples. He eats 1. How many are left?"
    path = tmp_path / "question.txt"
    path.write_text(question)
    code, err = call("features", "--data", path, "--chat", "--length", 48, "--output", tmp_path / "made")
    assert code == 0 and "1 texts" in err, err
    record = features.read_shard(tmp_path / "made" / "00000")
    target = mj.load(dtype="bfloat16")
    prompt = target.encode(question, chat=True)
    tokens = record.tokens[0][record.segments[0] == 0].tolist()
    assert tokens[: len(prompt)] == prompt and len(tokens) > len(prompt)
    same = record.top[0, len(prompt) - 1 : len(tokens) - 1, 0] == tokens[len(prompt) :]
    assert np.mean(same) > 0.85  # bfloat16 rounding depends on the shapes, so ties may differ


@pytest.mark.slow
def test_features_of_a_recurrent_target_do_not_depend_on_other_documents(call, recurrent_target, tmp_path):
    records = []
    for first in ("the sea and the sun", "the sun and the sea"):
        (tmp_path / "text.txt").write_text(f"{first}\n<|endoftext|>\na story")
        output = tmp_path / first.replace(" ", "-")
        flags = ("--target", recurrent_target, "--data", tmp_path / "text.txt", "--length", 32)
        code, err = call("features", *flags, "--output", output)
        assert code == 0, err
        records.append(features.read_shard(output / "00000"))
    segments = records[0].segments[0]
    assert len(segments) == 32 and set(segments) == {0, 1, features.PADDING}
    np.testing.assert_array_equal(records[1].segments[0], segments)
    assert not np.array_equal(records[0].features[0, segments == 0], records[1].features[0, segments == 0])
    for one, other in zip(*records, strict=True):
        np.testing.assert_array_equal(one[0, segments == 1], other[0, segments == 1])


@pytest.mark.parametrize("kind", distill.KINDS)
def test_the_help_of_a_kind_has_its_own_flags(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    def help_text(*flags):
        with pytest.raises(SystemExit):
            distill.main(flags)
        return capsys.readouterr().out

    row = distill.KINDS[kind]
    assert row.help in help_text("--help")
    kind_help = help_text(kind, "--help")
    flags = set(row.flags)
    assert {flag for flag in distill._FLAGS if re.search(rf"^  {flag}\b", kind_help, re.MULTILINE)} == flags
    assert "--mesh" in flags or "--process-id" not in kind_help


@pytest.mark.slow
def test_the_target_writes_the_text_itself(call, text, target, tmp_path):
    output = tmp_path / "made"
    flags = ("--write", 5, "--heads", 1, *SIZES[:2], "--step-tokens", 64, "--length", 24)
    code, err = call("medusa", "--target", target, "--data", text, "--output", output, *flags)
    assert code == 0, err
    rows = (tmp_path / "made-training/written.jsonl").read_text().splitlines()
    texts = [json.loads(row)["text"] for row in rows]
    assert len(texts) == 5 and all(text.startswith("a story of the") for text in texts)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle3", "model"])
def test_a_target_divided_over_a_mesh_teaches_the_same(kind, target, draft, tmp_path):
    def train(mesh):
        pretrained = mj.load(str(target), dtype="float32", mesh=mesh)
        stream = data.make_stream([TEXT] * 4, pretrained.tokenizer.backend_tokenizer)
        config = pretrained.config
        if kind == "eagle3":
            options = {"layers": (0, 0, 0), "steps": 2, "divergence": forward_kl}
            task = eagle_training.new_eagle3(config, pretrained.params, **options)
        else:
            small = mj.load(str(draft), dtype="float32")
            task = distillation.small_model(config, small.config, small.params, divergence=forward_kl)
        sizes = {"tokens": 256, "step_tokens": 128, "length": 32}
        work = tmp_path / ("mesh" if mesh else "one")
        return task.init(), distillation.train(task, pretrained.params, [stream], work, mesh=mesh, **sizes)

    (initial, single), (_, meshed) = train(None), train(parse_mesh("data=2,model=2"))
    for start, a, b in zip(*map(jax.tree.leaves, (initial, single, meshed)), strict=True):
        # The mesh sums bfloat16 gradients in another order. Adam's first steps have the same size for any gradient.
        moved, apart = (np.linalg.norm(np.asarray(x) - np.asarray(y)) for x, y in ((a, start), (a, b)))
        assert apart < 0.1 * moved
    losses = []
    for name in ("one", "mesh"):
        rows = (tmp_path / name / "log.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss"] for row in rows])
    np.testing.assert_allclose(*losses, rtol=2e-2)
    assert all(len(x.sharding.device_set) == 4 for x in jax.tree.leaves(meshed))


SMALL = ("--tokens", 128, "--step-tokens", 64, "--length", 32)


def files(path):
    return {p.name: p.read_bytes() for p in path.iterdir()}


@pytest.mark.slow
def test_a_training_of_other_settings_is_refused(call, text, target, tmp_path):
    output, work = tmp_path / "made", tmp_path / "made-training"
    argv = ("medusa", *SMALL, "--target", target, "--data", text, "--output", output, "--heads", 1)
    assert call(*argv)[0] == 0
    first = files(output)
    shutil.rmtree(output)
    text.write_text(TEXT + "\n<|endoftext|>\nmore of the sand")
    for flags, difference in (
        (("--heads", 2), "heads 1, not 2"),
        (("--loss", "tv"), 'loss "kl", not "tv"'),
        ((), "other data: "),
    ):
        code, err = call(*argv, *flags)
        assert code == 2 and f"error: --work '{work}' was begun with {difference}" in err
        assert not output.exists()
    text.write_text(TEXT)
    assert call(*argv)[0] == 0
    assert files(output) == first


@pytest.mark.slow
def test_a_kill_during_writing_leaves_nothing_half(call, text, target, draft, tmp_path, monkeypatch):
    output = tmp_path / "made"
    argv = ("model", *SMALL, "--target", target, "--from", draft, "--data", text, "--output", output)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(distill_run, "_copy_tokenizer", killed)
        assert call(*argv)[0] == 130
    assert not output.exists()
    assert call(*argv)[0] == 0
    assert {"tokenizer.json", "model.safetensors"} <= files(output).keys()
    assert not list(tmp_path.glob(".made*"))


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("eagle3", "there is no text to learn from: give --data or --features"),
        ("eagle3 --features none", "'none' has no features"),
        ("eagle3 --data TEXT --from none", "there is no directory 'none'"),
        ("eagle3 --data TEXT --feature-layers 0,x", "--feature-layers is 0,x: expected layer numbers"),
        ("features --data TEXT --output TEXT", "text.txt' is a file: name a folder."),
        ("features --data TEXT --feature-layers 0,99", "feature layer 99 does not exist"),
        ("medusa --data TEXT --draft-vocab 30", "unrecognized arguments: --draft-vocab 30"),
        ("eagle3 --features FOLDER --write 3", "--write does not apply to --features"),
        ("eagle3 --features FOLDER --data TEXT", "is the text of a draft vocabulary"),
        ("eagle3 --data TEXT --from tiny/eagle3 --draft-vocab 64", "does not apply to a head of --from"),
        ("eagle3 --data TEXT --layout vllm", "--layout is vllm: expected eagle or speculators"),
        ("model --data TEXT", "needs a checkpoint to start from"),
        ("eagle1 --data TEXT --tokens -1", "--tokens is -1.0: expected a number above 0"),
        ("medusa --data TEXT --heads 1000000", "--heads is 1000000: expected a whole number from 1 to 128"),
        ("eagle1 --data TEXT --loss hinge", "the loss 'hinge' is not known"),
        ("eagle1 --data TEXT --output FOLDER", "exists and is not an empty directory"),
    ],
)
def test_bad_input_is_refused_before_the_weights_load(
    flags, sentence, call, text, target, tmp_path, monkeypatch
):
    monkeypatch.setattr(hub, "load", None)
    output = () if "--output" in flags else ("--output", tmp_path / "made")
    paths = {"TEXT": text, "FOLDER": tmp_path}
    code, err = call(*(paths.get(word, word) for word in flags.split()), "--target", target, *output)
    assert code == 2
    assert err.splitlines()[-1].startswith("error: ") and sentence in err
    # The work folder does not exist either: it would record these flags.
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("dflash --block-size 1000000000", "blocks of 1000000000: expected 2 to 129"),
        ("eagle3 --draft-vocab 999", "a draft vocabulary of 999: expected 1 to"),
        ("eagle1 --step-tokens 64 --length 64 --mesh data=2", "cannot be divided among 2 devices"),
    ],
)
def test_what_does_not_fit_the_target_gets_a_sentence(flags, sentence, call, text, target, tmp_path):
    code, err = call(*flags.split(), "--data", text, "--target", target, "--output", tmp_path / "made")
    assert code == 2 and sentence in err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


@pytest.mark.parametrize("flag", ["--output", "--work"])
@pytest.mark.parametrize("path", ["text.txt/x", "/proc/x"])
def test_a_path_that_takes_nothing_is_refused_before_the_training(flag, path, call, text, target, tmp_path):
    flags = {"--output": tmp_path / "made", flag: tmp_path / path}
    argv = [x for pair in flags.items() for x in pair]
    code, err = call("eagle1", "--target", target, "--data", text, *argv, *SIZES)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err
    assert f"'{flags[flag]}' cannot be written (" in err or f"'{flags[flag]}' leads through" in err, err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["text.txt"]
