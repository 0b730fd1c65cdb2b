"""Tests of the adapter to lm-evaluation-harness on local tasks. Oracle: PyTorch transformers, same checkpoint."""

import json
import re
import shutil

import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("torch")

import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from mars_jax.integrations.harness import MarsJax
from mars_jax.utils.errors import MarsError
from tests.cli.conftest import CONTEXT, write_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")  # the harness and its imports emit warnings

TASKS = {
    "said": {"output_type": "generate_until", "doc_to_text": "{{prompt}}", "doc_to_target": "{{answer}}"}
    | {"generation_kwargs": {"until": ["STOP"], "max_gen_toks": 12, "do_sample": False}}
    | {"metric_list": [{"metric": "exact_match"}]},
    "chosen": {"output_type": "multiple_choice", "doc_to_text": "{{prompt}}", "doc_to_target": "{{label}}"}
    | {"doc_to_choice": [" sea", " sun and the story"], "metric_list": [{"metric": "acc"}]},
    "rolled": {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
    | {"metric_list": [{"metric": "bits_per_byte"}]},
}
PROMPTS = ["the sea", "a story of", "sun"]
LONG = "the sea and the sun of a story " * 12  # longer than the context


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("lm_eval") / "target", seed=0)


@pytest.fixture(scope="module")
def oracle(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype="float32").eval()


@pytest.fixture(scope="module")
def lm(checkpoint):
    return MarsJax(target=str(checkpoint), draft="ngram", verify="exact", batch_size=2, max_gen_toks=12)


def greedy(lm, oracle, prompt):
    ids = torch.tensor([lm.tok_encode(prompt)])
    with torch.inference_mode():
        out = oracle.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)
    return lm.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def log_likelihood(oracle, ids, first):
    """Return the log-likelihood of `ids[first:]`, and whether each of these tokens is the most likely one."""
    with torch.inference_mode():
        log_p = torch.log_softmax(oracle(torch.tensor([ids])).logits[0].double(), -1)
    span = range(first, len(ids))
    return sum(log_p[i - 1, ids[i]].item() for i in span), all(log_p[i - 1].argmax() == ids[i] for i in span)


def instances(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=a, idx=0) for a in arguments]


def answers_of(model, *requests):
    return model.generate_until(instances("generate_until", *requests))


def evaluate(checkpoint, folder, rows, tasks, **options):
    """Write tasks over these rows and return the results of the harness."""
    file = folder / "docs.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(file)}}}
    shared["test_split"] = "test"
    for name in tasks:
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name} | shared | TASKS[name]))
    return simple_evaluate(
        model="mars_jax",
        model_args={"target": str(checkpoint), "draft": "ngram", "verify": "exact"},
        batch_size=2,
        tasks=list(tasks),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )


def test_tasks_of_the_harness_have_the_scores_of_transformers(checkpoint, lm, oracle, tmp_path):
    answers = [greedy(lm, oracle, p) for p in PROMPTS]
    answers[1] = "something else"
    likelier = []
    for p in PROMPTS:
        first = len(lm.tok_encode(p))
        sea, sun = (lm.tok_encode(p + choice) for choice in (" sea", " sun and the story"))
        likelier.append(int(log_likelihood(oracle, sun, first)[0] > log_likelihood(oracle, sea, first)[0]))
    labels = [likelier[0], 1 - likelier[1], likelier[2]]
    rows = [
        {"prompt": p, "answer": answer, "label": label, "text": p * 3}
        for p, answer, label in zip(PROMPTS, answers, labels, strict=True)
    ]
    results = evaluate(checkpoint, tmp_path, rows, TASKS)["results"]
    assert results["said"]["exact_match,none"] == pytest.approx(2 / 3)
    assert results["chosen"]["acc,none"] == pytest.approx(2 / 3)
    bits = sum(
        log_likelihood(oracle, [0, *lm.tok_encode(p * 3, add_special_tokens=False)], 1)[0] for p in PROMPTS
    ) / -sum(len((p * 3).encode()) for p in PROMPTS)
    assert results["rolled"]["bits_per_byte,none"] == pytest.approx(bits / 0.6931471805599453, rel=1e-4)


def test_likelihoods_are_those_of_transformers_and_say_what_is_greedy(lm, oracle):
    context = "the sea"
    greedy_text = greedy(lm, oracle, context)[:3]
    pairs = [(context, " and the sun"), ("", "a story"), (LONG, " sun"), (context, greedy_text)]
    likelihoods = lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for (prompt, ending), (log_p, is_greedy) in zip(pairs, likelihoods, strict=True):
        if prompt:
            first, ids = lm._encode_pair(prompt, ending)
        else:
            first, ids = [lm.prefix_token_id], lm.tok_encode(ending)
        sequence = [*first, *ids][-CONTEXT:]
        expected, best = log_likelihood(oracle, sequence, len(sequence) - len(ids))
        assert log_p == pytest.approx(expected, abs=1e-3) and is_greedy == best


def test_texts_longer_than_the_context_are_scored_token_by_token_once(lm, oracle):
    [actual] = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (LONG,)))
    ids = lm.tok_encode(LONG, add_special_tokens=False)
    assert len(ids) > CONTEXT
    window, total, start = CONTEXT - 1, 0.0, 0
    while start < len(ids):
        count = min(window, len(ids) - start)
        context = [lm.prefix_token_id] if start == 0 else ids[start + count - 1 - window : start]
        total += log_likelihood(oracle, [*context, *ids[start : start + count]], len(context))[0]
        start += count
    assert actual == pytest.approx(total, rel=1e-4)


def test_texts_end_at_the_first_stop_string_and_keep_their_order(lm, oracle):
    answers = [greedy(lm, oracle, p) for p in PROMPTS]
    stop = answers[0][4:6]
    stopped = answers_of(lm, *[(p, {"until": [stop], "max_gen_toks": 12}) for p in PROMPTS])
    assert stopped == [text.partition(stop)[0] for text in answers] and stopped[0] != answers[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"verify": "fast"}, "there is no rule 'fast': choose one of exact, "),
        ({"verify": "simulated", "tau": 2, "draft": "ngram"}, "verify is simulated, whose text means"),
        ({"batch_size": "auto"}, "--batch-size is auto"),
        ({"draft": "ngram", "theta": "nowhere.json"}, "theta is nowhere.json"),
        ({"draft": "ngram", "margin": "wide"}, "margin is wide: expected one of ratio, gap"),
        ({"draft": "ngram", "speed": 3}, "speed does not apply to the rule mars, which has theta, margin,"),
        ({"theta": 0.9}, "theta does not apply to the rule exact, which has no settings"),
        ({"draft": "eagle"}, "draft is eagle: expected none, ngram, model:PATH"),
    ],
)
def test_arguments_out_of_range_are_named(checkpoint, arguments, message):
    with pytest.raises(MarsError, match=message):
        MarsJax(target=str(checkpoint), **arguments)


def test_any_rule_is_an_argument(checkpoint, tmp_path):
    rule_file = tmp_path / "gates.py"
    rule_file.write_text(
        "from mars_jax import verify\n\ndef gate(level: float = 1.0):\n    return verify.mars(theta=level)\n"
    )
    draft = {"target": str(checkpoint), "draft": f"model:{checkpoint}", "num_draft_tokens": 2}
    requests = [(p, {"until": [], "max_gen_toks": 12}) for p in PROMPTS]
    # At level inf, the value that the harness would parse, the user's rule is strict.
    gated = MarsJax(**draft, verify=f"{rule_file}:gate", level=float("inf"))
    assert answers_of(gated, *requests) == answers_of(MarsJax(**draft, verify="exact"), *requests)
    blocks = MarsJax(**draft, verify="mars", base="rejection", block=True, margin="gap", theta="1.5")
    pair = blocks._session
    assert pair.rule_name == "mars(gap) over block" and pair.drafter.drafter.name.endswith("sampled)")


def test_gen_kwargs_that_mean_nothing_here_are_refused(lm):
    with pytest.raises(MarsError, match="the task sets num_beams"):
        answers_of(lm, ("the sea", {"num_beams": 4}))


def test_a_model_and_a_task_say_what_answers_are_to_be(checkpoint):
    by_regex = MarsJax(target=str(checkpoint), draft="ngram", verify="exact", regex="(sun|sea){2}!")
    request = ("the sea", {"until": [], "max_gen_toks": 12})
    first, second = answers_of(by_regex, request, ("sun", {"until": [], "choice": ["a story", "yes"]}))
    assert re.fullmatch("(sun|sea){2}!", first) and second in ("a story", "yes")
    by_choice = MarsJax(target=str(checkpoint), draft="ngram", verify="exact", choice="up|down")
    assert answers_of(by_choice, request)[0] in ("up", "down")


# Chat templates.

TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turn') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(checkpoint, tmp_path_factory):
    """Copy the checkpoint with two chat templates and a tokenizer that prepends a BOS token."""
    path = shutil.copytree(checkpoint, tmp_path_factory.mktemp("lm_eval") / "chatty")
    config = json.loads((path / "tokenizer_config.json").read_text())
    named = {"default": TEMPLATE, "short": "<eos>{{ messages[-1].content }}"}
    config["bos_token"] = "<eos>"
    config["chat_template"] = [{"name": name, "template": text} for name, text in named.items()]
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", 0)])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_a_task_goes_through_the_chat_template(chatty, oracle, tmp_path):
    model = MarsJax(target=str(chatty), draft="ngram", verify="exact")
    assert model.chat_template(True) == TEMPLATE
    texts = [model.apply_chat_template([{"role": "user", "content": p}]) for p in PROMPTS]
    assert texts[0] == "[user]the sea[assistant]"
    answers = [greedy(model, oracle, text) for text in texts]
    assert answers != [greedy(model, oracle, p) for p in PROMPTS]
    rows = [{"prompt": p, "answer": answer} for p, answer in zip(PROMPTS, answers, strict=True)]
    report = evaluate(chatty, tmp_path, rows, ["said"], apply_chat_template=True)
    assert report["results"]["said"]["exact_match,none"] == 1.0
    assert report["config"]["model"] == "mars_jax"


def test_a_template_by_its_name_and_a_turn_that_is_continued(chatty):
    model = MarsJax(target=str(chatty), draft="none", verify="exact")
    turns = [{"role": "user", "content": "the sea"}, {"role": "assistant", "content": "and the"}]
    assert model.apply_chat_template(turns, add_generation_prompt=False) == "[user]the sea[assistant]and the"
    assert model.chat_template(False) is None
    assert model.chat_template("short") == "<eos>{{ messages[-1].content }}"
    text = model.apply_chat_template(turns[:1])
    assert text == "<eos>the sea"
    # The BOS token occurs once, whether the template or the tokenizer adds it.
    assert model.tok_encode(text) == model.tok_encode("the sea") and model.tok_encode(text)[0] == 0
    assert model.tok_encode(text)[1] != 0


def test_templates_that_cannot_be_applied_are_sentences(lm, chatty):
    with pytest.raises(MarsError, match=r"no chat template 'default' \(it has none at all\)"):
        lm.apply_chat_template([{"role": "user", "content": "the sea"}])
    model = MarsJax(target=str(chatty), draft="none", verify="exact")
    with pytest.raises(MarsError, match=r"no chat template 'long' \(it has default, short\)"):
        model.chat_template("long")
    with pytest.raises(MarsError, match=r"cannot be applied \(no system turn\)"):
        model.apply_chat_template([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
