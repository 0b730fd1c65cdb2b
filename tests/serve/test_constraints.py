"""Constraints from requests to completions. Oracles: transformers with a masking processor, `re` and `jsonschema`."""

import json
import re

import numpy as np
import pytest

import mars_jax as mj
from mars_jax import constraints, drafters
from mars_jax.cli.generate.command import main
from mars_jax.serve.prepare import guides_of

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


def transformers_tokens(target, constraint, count):
    """Return greedy tokens of PyTorch, masked to the tokens that keep a prefix valid under the constraint."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(target.path, dtype="float32")
    ids = torch.tensor([target.encode(TEXT)])
    automaton = constraint.automaton
    words = constraints.vocabulary(target.tokenizer, target.config.vocab_size)
    [stop] = target.stop_tokens

    class Mask(transformers.LogitsProcessor):
        def __call__(self, ids_so_far, scores):
            data = b"".join(words.tokens[i] for i in ids_so_far[0, ids.shape[1] :].tolist())
            state = automaton.run(data)
            allowed = [bool(t) and automaton.run(t, state) != 0 for t in words.tokens]
            allowed[stop] = bool(automaton.accepting[state])
            return scores.masked_fill(~torch.tensor(allowed)[None], -float("inf"))

    with torch.inference_mode():
        return model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, eos_token_id=stop,
            pad_token_id=0, logits_processor=transformers.LogitsProcessorList([Mask()]),
        )[0, ids.shape[1] :].tolist()  # fmt: skip


@pytest.mark.slow
def test_greedy_text_is_that_of_transformers_with_a_mask(target, capsys, tmp_path):
    """Mix constrained and free rows, refill rows, use each kind of draft, and run the command."""
    jsonschema = pytest.importorskip("jsonschema")
    free = mj.generate(target, "none", TEXT, **OPTIONS).tokens[0]
    schema, pattern = constraints.json_schema(SCHEMA), constraints.regex(PATTERN)
    expected = [transformers_tokens(target, constraint, 48) for constraint in (schema, pattern)]
    drafts = (
        drafters.load("none", target),
        drafters.load("ngram", target),
        drafters.LoadedDrafter(drafters.language_model(target.model, 4), target.params),
    )
    for drafter, size in zip(drafts, (3, 2, 3), strict=True):
        result = mj.generate(
            target, drafter, [TEXT] * 3, constraint=[schema, None, pattern], batch_size=size, **OPTIONS
        )
        assert result.tokens == [expected[0], free, expected[1]]
    by_schema, _, by_pattern = result.completions
    assert by_schema.finish_reason == "stop"
    jsonschema.validate(json.loads(by_schema.text), SCHEMA)
    assert pattern.automaton.begins(by_pattern.text.encode())
    if by_pattern.finish_reason == "stop":
        assert re.fullmatch(PATTERN, by_pattern.text)
    cut = mj.generate(target, "ngram", TEXT, json_schema=SCHEMA, max_new_tokens=12).completions[0]
    assert cut.finish_reason == "length" and cut.tokens == expected[0][:12]
    assert schema.automaton.begins(cut.text.encode()) and not schema.automaton.matches(cut.text)
    # The engine drafts forced text, so steps accept tokens even if no n-gram matches.
    assert result.completions[0].metrics.steps < len(expected[0])
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(SCHEMA))
    argv = ["--target", "tiny/draft", "--dtype", "float32", "--draft", "ngram", "--json"]
    argv += ["--max-new-tokens", "48"]
    assert main([*argv, "--json-schema", str(file), TEXT]) == 0
    assert json.loads(capsys.readouterr().out)["tokens"] == expected[0]
    constrained = [{"json_schema": SCHEMA}, {}, {"choice": ["yes, it is"]}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": TEXT} | fields) + "\n" for fields in constrained))
    assert main([*argv, "--regex", PATTERN, "--prompts-file", str(prompts)]) == 0
    outputs = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [output["tokens"] for output in outputs[:2]] == expected and outputs[2]["text"] == "yes, it is"


@pytest.mark.slow
def test_texts_end_where_nothing_may_follow_also_without_a_stop_token(target):
    result = mj.generate(target, "ngram", [TEXT] * 2, choice=["a cat", "a dog"], ignore_eos=True, **OPTIONS)
    for completion in result.completions:
        assert completion.text in ("a cat", "a dog") and completion.finish_reason == "stop"
    allowed = target.encode(" the cat sat")[1:]
    [tokens] = mj.generate(target, "ngram", TEXT, allowed_tokens=allowed, temperature=1.0, **OPTIONS).tokens
    assert set(tokens) <= {*allowed, *target.stop_tokens}


@pytest.mark.slow
def test_processed_log_probs_are_those_of_the_constrained_law(target):
    """One token decides between the two choices, and later tokens have probability 1."""
    options = {"choice": ["a cat", "a dog"], "temperature": 1.0, "log_probs": True, **OPTIONS}
    [completion] = mj.generate(target, "ngram", TEXT, **options).completions
    assert completion.text in ("a cat", "a dog")
    log_probs = completion.log_probs
    prompt = target.encode(TEXT)
    [scored] = mj.score(target, [[*prompt, *completion.tokens]])
    np.testing.assert_allclose(log_probs.log_prob, scored.log_p[len(prompt) - 1 :], atol=1e-3)
    masked, raw = np.asarray(log_probs.processed_log_prob), np.asarray(log_probs.temperature_log_prob)
    assert np.all(masked > raw - 1e-4) and masked.sum() > raw.sum() + 1
    assert masked[-1] == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"regex": "a", "choice": ["b"]}, "choice does not apply with another constraint"),
        ({"regex": ["a", "b"]}, "regex has 2 values for 1 prompts"),
        ({"regex": "a", "relax_constrained": [False, True]}, "relax_constrained has 2 values for 1 prompts"),
        ({"constraint": "a"}, "constraint is of type str: expected one of mars_jax.constraints"),
        ({"relax_constrained": True}, "relax_constrained does not apply where no text is constrained"),
        ({"strict_in": "thought"}, "the span is 'thought'"),
    ],
)
def test_bad_options_get_a_sentence(target, options, sentence):
    with pytest.raises(mj.MarsError, match=sentence):
        mj.generate(target, "ngram", TEXT, **options)


def test_spans_need_no_constraint(target):
    [request] = mj.make_requests(target, "Once upon", relax_in="b...c")
    guides = guides_of(target, [request])
    assert guides is not None and guides.span is not None and guides.constraint is None


def test_prompts_choose_whether_rules_relax_in_their_constraint():
    patterns, relax = ["a+", "b+", None], [False, True, True]
    requests = mj.make_requests(mj.load(), ["a", "b", "c"], regex=patterns, relax_constrained=relax)
    assert [request.constraint and request.constraint.relax for request in requests] == [False, True, None]
