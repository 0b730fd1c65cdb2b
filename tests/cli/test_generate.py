"""The generate command as a user runs it, on a tiny random checkpoint."""

import collections
import shutil
from pathlib import Path

import pytest

from mars_jax.cli.generate.applies import check_flags
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.command import main
from mars_jax.cli.generate.job import open_job
from mars_jax.cli.generate.prompts import from_texts
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve import generation as serving
from mars_jax.serve import requests, session
from tests.cli.conftest import rows_of, timeless
from tests.helpers.checkpoint_files import edit_config, edit_weights

FEW = ["--max-new-tokens", "8"]
PLAIN = [*FEW, "--draft", "none"]
KEYS = ["id", "prompt", "text", "prompt_tokens", "tokens", "finish_reason", "steps", "tau", "proposed"]
KEYS += ["accepted_exact", "accepted_relaxed", "depth_histogram", "seconds", "tokens_per_second", "rule"]
KEYS += ["sampling", "run"]


def test_json_is_one_object_a_prompt_and_nothing_else(run, target):
    outcome = run("--target", target, *FEW, "--json", "the sea", "a story of")
    assert outcome.code == 0 and outcome.err == ""
    first, second = rows_of(outcome.out)
    assert list(first) == KEYS
    assert (first["prompt"], second["prompt"]) == ("the sea", "a story of")
    for row in (first, second):
        assert len(row["tokens"]) == 8 or row["finish_reason"] == "stop"
        assert row["rule"] == "exact"
        assert sum(row["depth_histogram"]) == row["steps"]
        assert row["tau"] == pytest.approx(len(row["tokens"]) / row["steps"])
        assert row["tokens_per_second"] == pytest.approx(len(row["tokens"]) / row["seconds"])


def test_each_prompt_is_tokenized_checked_and_prepared_once(run, target, monkeypatch):
    calls = collections.Counter()

    def count(owner, name, key):
        function = getattr(owner, name)

        def counted(*args, **options):
            calls.update(key(*args))
            return function(*args, **options)

        monkeypatch.setattr(owner, name, counted)

    count(Pretrained, "encode_many", lambda target, texts: texts)
    count(requests, "_checked", lambda target, name, value: [name])
    count(session, "prepared", lambda target, drafter, requests: ["prepared"])
    prompts = ["the sea", "a story of", "one"]
    run("--target", target, *PLAIN, "--top-k", "3", "--temperature", "1", "--json", *prompts)
    assert [calls[name] for name in (*prompts, "prepared", "top_k")] == [1, 1, 1, 1, 3]


def test_chatter_of_libraries_stays_off_stdout(run, target, monkeypatch):
    inner = session.Queue

    def chatty(*args, **options):
        print("Loading weights: 100%")
        return inner(*args, **options)

    monkeypatch.setattr(session, "Queue", chatty)
    outcome = run("--target", target, *PLAIN, "--json", "the sea")
    assert len(rows_of(outcome.out)) == 1 and "Loading weights" in outcome.err


def test_streamed_text_is_that_of_the_device_loop(run, target):
    argv = ["--target", target, *PLAIN, "the sea", "a story of"]
    texts = [row["prompt"] + row["text"] for row in rows_of(run(*argv, "--json").out)]
    lines = [text if text.endswith("\n") else text + "\n" for text in texts]
    streamed, unstreamed = run(*argv), run(*argv, "--no-stream")
    assert streamed.code == unstreamed.code == 0
    assert streamed.out == unstreamed.out == "\n".join(lines)
    assert "tokens/s" in streamed.err and "tokens/s" in unstreamed.err
    # Rows of one batch are also printed one after the other.
    assert run(*argv, "--batch-size", "2").out == streamed.out


@pytest.fixture
def drafter(target):
    """Return a function that returns the drafter that the command opens for some flags."""

    def open_drafter(*flags):
        args = parse(["--target", str(target), *FEW, *flags, "the sea"])
        prompts = from_texts(args.prompts)
        return open_job(args, check_flags(args, prompts), prompts).session.drafter

    return open_drafter


def test_a_draft_that_nobody_named_is_as_long_as_pays(drafter):
    assert drafter().sizes.lengths == (0, 3)
    assert drafter("--num-draft-tokens", "5").sizes.lengths == (0, 3, 5)
    assert drafter("--draft", "ngram").sizes is None and drafter("--theta", "0.9").sizes is None


@pytest.mark.parametrize(
    ("draft", "flags", "name"),
    [
        ("eagle", "", "eagle1(dynamic 10-7-60)"),
        ("eagle", "--tree 3-2", "eagle1(3-2)"),
        ("eagle", "--num-draft-tokens 4", "eagle1(4)"),
        ("eagle", "--verify rejection", "eagle1(5, sampled)"),
        ("eagle", "--tree dynamic --verify rejection", "eagle1(dynamic 10-7-60, sampled)"),
        ("medusa", "", "medusa(3)"),
        ("medusa", "--tree 3-2 --verify mixture", "medusa(3-2, sampled)"),
    ],
)
def test_heads_draft_by_default_what_suits_them_and_the_rule(drafter, request, draft, flags, name):
    spec = f"{draft}:{request.getfixturevalue(draft)}"
    assert drafter("--draft", spec, *flags.split()).drafter.name == name


def test_copied_drafts_under_a_lossy_rule_are_warned_of(run, target):
    err = run("--target", target, *FEW, "--theta", 0.9, "--json", "the sea").err
    assert err.startswith("note: the draft ngram copies earlier text, and mars may accept repetitions")


@pytest.mark.slow
def test_a_draft_with_another_tokenizer_drafts_and_says_so(run, target, foreign):
    flags = ["--target", target, "--verify", "exact", "--json", "the sea"]
    [reference], outcome = rows_of(run(*flags, *PLAIN).out), run(*flags, *FEW, "--draft", f"model:{foreign}")
    assert rows_of(outcome.out)[0]["tokens"] == reference["tokens"]
    assert f"note: '{foreign}' has a different tokenizer and drafts the 25" in outcome.err


def test_a_draft_with_another_tokenizer_cannot_be_refined(run, target, foreign, tmp_path):
    texts = tmp_path / "texts"
    texts.write_text("the sea\n<|endoftext|>\nthe sun\n")
    argv = ["--target", target, "--verify", "exact", "--draft", f"model:{foreign}", "--refine", texts, "x"]
    refused = run(*argv)
    assert refused.code == 2 and "--refine does not apply to --draft model:" in refused.err


def test_a_row_stops_its_own_draft(run, target, tmp_path):
    """With draft_stop 0 a row drafts nothing unless the distribution is certain; the other row still drafts."""
    file = tmp_path / "p.jsonl"
    file.write_text('{"prompt": "the sea", "draft_stop": 0}\n{"prompt": "the sea"}\n')
    argv = ["--target", target, "--draft", f"model:{target}", "--num-draft-tokens", "3", "--ignore-eos", *FEW]
    stopped, unstopped = rows_of(run(*argv, "--verify", "exact", "--json", "--prompts-file", file).out)
    assert stopped["tokens"] == unstopped["tokens"]
    assert (stopped["proposed"], stopped["steps"]) == (0, 8)
    assert (unstopped["proposed"], unstopped["steps"]) == (6, 2)


@pytest.mark.slow
def test_the_comparison_is_a_table(run, target):
    argv = ["--target", target, *FEW, "--num-draft-tokens", "3", "--compare", "the sea", "a story of"]
    table = run(*argv)
    assert table.code == 0 and "\x1b" not in table.out
    assert table.err.startswith("15 runs of 2 prompts: about ") and table.err.count("\n") == 1
    words = ("autoregressive", "exact", "mars", "speedup", "tau", "relaxed", "tokens/s", "loops")
    assert all(word in table.out for word in words)
    [comparison] = rows_of(run(*argv, "--json").out)
    baseline, exact, mars = comparison["rules"]
    assert [row["rule"] for row in (baseline, exact, mars)] == ["autoregressive", "exact", "mars"]
    assert baseline["speedup"] == 1.0 and baseline["tau"] == 1.0 and baseline["tokens"] == exact["tokens"]
    assert exact["relaxed_share"] == 0.0 <= mars["relaxed_share"] <= 1.0
    assert all(0.0 <= row["loop_rate"] <= 1.0 for row in comparison["rules"])


def test_output_equals_what_json_prints(run, target, tmp_path):
    output, argv = tmp_path / "rows.jsonl", ["--target", target, *PLAIN, "the sea", "a story of"]
    written = run(*argv, "--output", output)
    assert written.code == 0 and written.out == ""
    assert timeless(output.read_text()) == timeless(run(*argv, "--json").out)
    resumed = run(*argv, "--output", output, "--resume")
    assert resumed.code == 0 and "nothing to do" in resumed.err
    both = run(*argv, "--output", tmp_path / "other.jsonl", "--json")
    assert both.out == (tmp_path / "other.jsonl").read_text()


def test_what_a_run_wrote_is_drafted_in_the_next_one(run, refused, target, tmp_path):
    first, argv = tmp_path / "first.jsonl", ["--target", target, *FEW, "the sea", "--verify", "exact"]
    assert run(*argv, "--draft", "none", "--output", first).code == 0
    replay = [*argv, "--draft", f"replay:{first}"]
    [recorded], [replayed] = rows_of(first.read_text()), rows_of(run(*replay, "--json").out)
    assert replayed["tokens"] == recorded["tokens"] and replayed["steps"] < recorded["steps"]
    assert run(*replay, "--output", tmp_path / "second.jsonl").code == 0
    assert "nothing to do" in run(*replay, "--output", tmp_path / "second.jsonl", "--resume").err
    first.write_text(first.read_text().replace('"tokens": [', '"tokens": [1, 1, '))
    message = refused(*replay, "--output", tmp_path / "second.jsonl", "--resume")
    assert "draft" in message and "second.jsonl" in message
    assert "there is no such file" in refused(*argv, "--draft", f"replay:{tmp_path / 'nowhere.jsonl'}")


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["weights of the target", "config of the draft"])
def test_rows_of_other_weights_are_refused_by_what_differs(run, refused, target, draft, tmp_path, changed):
    """Change the weights or config at the same path, as further training of a checkpoint does."""
    target, draft = (Path(shutil.copytree(path, tmp_path / path.name)) for path in (target, draft))
    output = tmp_path / "rows.jsonl"
    argv = ["--target", target, "--draft", f"model:{draft}", *FEW, "--batch-size", 2, "--output", output]
    assert run(*argv, "the sea", "a story").code == 0

    def change(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"][-1] *= 1.01

    if changed == "weights of the target":
        edit_weights(target, change)
    else:
        edit_config(draft, rms_norm_eps=0.1)
    message = refused(*argv, "--resume", "the sea", "a story")
    part = changed.split()[-1]
    assert f"'{output}' was begun with other weights of the {part}: choose another" in message


def test_the_module_is_the_function_too(target):
    """Importing the submodule replaces the function of the same name, so the module must be callable like it."""
    import mars_jax.generate

    pretrained = mars_jax.load(str(target))
    result = mars_jax.generate(pretrained, "none", "the sea", max_new_tokens=8)
    assert result.tokens == serving.generate(pretrained, "none", "the sea", max_new_tokens=8).tokens
    assert mars_jax.generate.main is main


@pytest.mark.slow
def test_simulated_acceptance_gives_the_tau_and_says_what_the_text_is_worth(run, refused, target, draft):
    argv = ["--target", target, "--draft", f"model:{draft}", "--num-draft-tokens", 3, "--verify", "simulated"]
    argv += ["--ignore-eos", "--no-stream", "--max-new-tokens", 48, "the sea", "--tau"]
    outcome = run(*argv, 4)
    assert outcome.code == 0 and "the text means nothing" in outcome.err and "tau 4.00" in outcome.err
    assert "--tau is 5, and this draft gives 4 tokens a step at most" in refused(*argv, 5)
