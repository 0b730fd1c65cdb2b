"""Constraints from requests to completions. Oracles: transformers with a masking processor, `re` and `jsonschema`."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

import mars_jax as mj
from mars_jax import constraints, drafters
from mars_jax.cli.generate.command import main
from mars_jax.core.mesh import parse_mesh

TEXT = "Once upon a time"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
    },
    "required": ["name", "age", "kind"],
}
PATTERN = r" ?(the [a-z]{2,9}, ){1,3}and [a-z ]{3,20}\."
OPTIONS = {"max_new_tokens": 48}


@pytest.fixture(scope="module")
def target():
    return mj.load("tiny/draft", dtype="float32")


def by_transformers(target, constraint, count):
    """Return greedy tokens of PyTorch, masked to the tokens that keep a prefix valid under the constraint."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path, dtype="float32")
    ids = torch.tensor([target.encode(TEXT)])
    made, words = constraint.automaton, constraints.vocabulary(target.tokenizer, target.config.vocab_size)
    [stop] = target.stop_tokens

    class Mask(transformers.LogitsProcessor):
        def __call__(self, said, scores):
            data = b"".join(words.tokens[i] for i in said[0, ids.shape[1] :].tolist())
            state = made.run(data)
            may = [bool(t) and made.run(t, state) != 0 for t in words.tokens]
            may[stop] = bool(made.accepting[state])
            return scores.masked_fill(~torch.tensor(may)[None], -float("inf"))

    with torch.inference_mode():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=stop,
            pad_token_id=0, logits_processor=transformers.LogitsProcessorList([Mask()]),
        )[0, ids.shape[1] :].tolist()  # fmt: skip


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers_with_a_mask(target, capsys, tmp_path):
    """Mix constrained and free rows with each kind of draft, with refilled rows, and in the command."""
    jsonschema = pytest.importorskip("jsonschema")
    free = mj.generate(target, "none", TEXT, **OPTIONS).tokens[0]
    schema, pattern = constraints.json_schema(SCHEMA), constraints.regex(PATTERN)
    wanted = [by_transformers(target, one, 48) for one in (schema, pattern)]
    drafts = (
        drafters.load("none", target),
        drafters.load("ngram", target),
        drafters.LoadedDrafter(drafters.language_model(target.model, 4), target.params),
    )
    for drafter, size in zip(drafts, (3, 2, 3), strict=True):
        found = mj.generate(
            target, drafter, [TEXT] * 3, constraint=[schema, None, pattern], batch_size=size, **OPTIONS
        )
        assert found.tokens == [wanted[0], free, wanted[1]]
    one, _, other = found.completions
    assert one.finish_reason == "stop" and jsonschema.validate(json.loads(one.text), SCHEMA) is None
    assert pattern.automaton.begins(other.text.encode())
    if other.finish_reason == "stop":
        assert re.fullmatch(PATTERN, other.text)
    cut = mj.generate(target, "ngram", TEXT, json_schema=SCHEMA, max_new_tokens=12).completions[0]
    assert cut.finish_reason == "length" and cut.tokens == wanted[0][:12]
    assert schema.automaton.begins(cut.text.encode()) and not schema.automaton.matches(cut.text)
    # Forced text is drafted, so an n-gram draft is accepted even if no n-gram matches.
    assert found.completions[0].metrics.steps < len(wanted[0])
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    argv = ["--target", "tiny/draft", "--dtype", "float32", "--draft", "ngram", "--max-new-tokens", "48"]
    argv += ["--json"]
    assert main([*argv, "--json-schema", str(file), TEXT]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == wanted[0]
    rows = [
        {"prompt": TEXT, "json_schema": SCHEMA},
        {"prompt": TEXT},
        {"prompt": TEXT, "choice": ["yes, it is"]},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("\n".join(map(json.dumps, rows)))
    assert main([*argv, "--regex", PATTERN, "--prompts-file", str(prompts)]) == 0
    made = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["tokens"] for one in made[:2]] == wanted and made[2]["text"] == "yes, it is"


@pytest.mark.slow
def test_texts_end_where_nothing_may_follow_also_without_a_stop_token(target):
    found = mj.generate(target, "ngram", [TEXT] * 2, choice=["a cat", "a dog"], ignore_eos=True, **OPTIONS)
    for one in found.completions:
        assert one.text in ("a cat", "a dog") and one.finish_reason == "stop"
    allowed = target.encode(" the cat sat")[1:]
    [one] = mj.generate(target, "ngram", TEXT, allowed_tokens=allowed, temperature=1.0, **OPTIONS).tokens
    assert set(one) <= {*allowed, *target.stop_tokens}


@pytest.mark.slow
def test_a_stream_says_the_same_and_log_probs_are_of_which_law_they_say(target):
    """Streamed pieces join to the completion while rows refill, and log-probabilities belong to the documented laws.

    `log_prob` is the raw target's; `processed_log_prob` is that of the constrained law. One token decides between
    the two choices, and tokens after it have probability 1.
    """
    options = {"constraint": [constraints.choice(["a cat", "a dog"]), None], "temperature": 1.0, **OPTIONS}
    found = mj.generate(target, "ngram", [TEXT] * 2, log_probs=True, **options).completions
    said = ["", ""]
    for event in mj.generate_stream(target, "ngram", [TEXT] * 2, batch_size=1, **options):
        if hasattr(event, "text"):
            said[event.index] += event.text
    assert said == [one.text for one in found] and found[0].text in ("a cat", "a dog")
    told = found[0].log_probs
    prompt = target.encode(TEXT)
    [scored] = mj.score(target, [[*prompt, *found[0].tokens]])
    np.testing.assert_allclose(told.log_prob, scored.log_p[len(prompt) - 1 :], atol=1e-3)
    masked, raw = np.asarray(told.processed_log_prob), np.asarray(told.temperature_log_prob)
    assert (
        np.all(masked > raw - 1e-4)
        and masked.sum() > raw.sum() + 1
        and masked[-1] == pytest.approx(0, abs=1e-5)
    )


@pytest.mark.slow
def test_a_head_that_drafts_from_a_vocabulary_of_its_own_changes_no_text():
    """With the embedded EAGLE-3 head, greedy text equals decoding without a draft, and some drafts are accepted."""
    target = mj.load("tiny/target", dtype="float32")
    options = {"constraint": [constraints.json_schema(SCHEMA), None], **OPTIONS}
    want = mj.generate(target, "none", [TEXT] * 2, **options).tokens
    head = drafters.load("eagle:tiny/eagle3", target, num_draft_tokens=4)
    assert head.draft_ids is not None
    found = mj.generate(target, head, [TEXT] * 2, **options)
    assert found.tokens == want
    assert found.completions[0].metrics.steps < len(want[0])


@pytest.mark.slow
def test_a_mesh_changes_nothing(target):
    """Both rows and vocabulary are sharded."""
    options = {"constraint": [constraints.json_schema(SCHEMA), None] * 2, **OPTIONS}
    want = mj.generate(target, "ngram", [TEXT] * 4, **options).tokens
    divided = mj.load("tiny/draft", dtype="float32", mesh=parse_mesh("data=2,model=2"))
    assert mj.generate(divided, "ngram", [TEXT] * 4, **options).tokens == want


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"regex": "a", "choice": ["b"]}, "choice does not apply with another constraint"),
        ({"regex": ["a", "b"]}, "regex has 2 values for 1 prompts"),
        ({"constraint": "a"}, "constraint is of type str: expected one of mars_jax.constraints"),
        ({"relax_constrained": True}, "relax_constrained does not apply where no text is constrained"),
        ({"relax_in": "think"}, "relax_in does not apply to the rule exact, which relaxes nothing"),
        ({"strict_in": "thought"}, "the span is 'thought'"),
    ],
)
@pytest.mark.parametrize("ask", [mj.generate, mj.generate_iter, mj.generate_stream])
def test_bad_options_get_a_sentence(target, ask, options, sentence):
    with pytest.raises(mj.MarsError, match=sentence):
        ask(target, "ngram", TEXT, **options)


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--regex", "a("], "the pattern 'a(' is no regular expression"),
        (["--json-schema", "none.json"], "cannot be read"),
        (["--relax-constrained"], "--relax-constrained does not apply without --regex, --json-schema"),
        (["--verify", "exact", "--relax-in", "think"], "--relax-in does not apply to the rule exact"),
        (["--strict-in", "thought"], "the span is 'thought'"),
    ],
)
def test_bad_flags_get_a_sentence(flags, sentence, capsys):
    assert main([*flags, TEXT]) == 2
    assert sentence in capsys.readouterr().err


def test_prompts_choose_whether_rules_relax_in_their_constraint():
    target = mj.load()
    made = mj.make_requests(
        target, ["a", "b", "c"], regex=["a+", "b+", None], relax_constrained=[False, True, True]
    )
    assert [request.constraint and request.constraint.relax for request in made] == [False, True, None]
    with pytest.raises(mj.MarsError, match="relax_constrained has 2 values for 3 prompts"):
        mj.make_requests(target, ["a", "b", "c"], regex="a+", relax_constrained=[False, True])
