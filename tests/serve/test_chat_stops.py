"""An answer of a chat also ends at the token that the chat template writes after an answer."""

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

import mars_jax as mj
from mars_jax import fake
from mars_jax.cli.generate import job
from mars_jax.cli.generate.arguments import parse
from mars_jax.cli.generate.prompts import PromptRow
from mars_jax.lab.evaluate.answers import Decoding
from mars_jax.serve.session import Session

WORDS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "?", "A", "question"]
WORDS += ["An", "answer"]
TURNS = [{"role": "user", "content": "A question"}]
CONFIGURED = WORDS.index("?")
"""The only stop token of the model's config."""
TEMPLATES = {
    "chatml": ("<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n", "<|im_end|>"),
    "llama 3": ("{{ m.role }}\n\n{{ m.content | trim }}<|eot_id|>", "<|eot_id|>"),
    "llama 2": ("{{ m.content }} {% if m.role == 'assistant' %}</s>{% endif %}", None),
    "plain": ("{{ m.role }}: {{ m.content }}\n", None),
    "refuses answers": ("{% if m.role == 'assistant' %}{{ raise_exception('no') }}{% endif %}{{ m.content }}", None),
}  # fmt: skip


def chatty(template):
    """Return a model whose tokenizer has a chat template, and whose config lacks their end tokens."""
    from transformers import PreTrainedTokenizerFast

    backend = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(WORDS[:6])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    tokenizer.chat_template = f"{{% for m in messages %}}{template}{{% endfor %}}"
    model = fake.hash_model(vocab_size=len(WORDS))
    return mj.Pretrained.from_parts(model, (), tokenizer, max_positions=64, stop_tokens=[CONFIGURED])


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_chat_ends_at_the_end_of_a_turn_and_of_a_text(name):
    template, end = TEMPLATES[name]
    target = chatty(template)
    ends = [WORDS.index(word) for word in (end, "</s>") if word is not None]
    assert target.chat_stop_tokens == (CONFIGURED, *ends)
    assert target.stop_tokens == (CONFIGURED,)


def test_only_chats_end_there_and_options_win():
    target = chatty(TEMPLATES["chatml"][0])
    chat, text = target.chat_stop_tokens, target.stop_tokens
    assert chat == (CONFIGURED, 3, 1)

    def stops(prompts, **options):
        return [request.stop_tokens for request in mj.make_requests(target, prompts, **options)]

    assert stops(["A", TURNS, [7, 8]]) == [text, chat, text]
    assert stops(TURNS, ignore_eos=True) == [()]
    assert stops(TURNS, stop_tokens=[4]) == [(4,)]
    assert stops(TURNS, stop_strings="<end_of_turn>") == [(*chat, 5)]


def test_every_interface_ends_a_chat_there():
    target = chatty(TEMPLATES["chatml"][0])
    rows = [PromptRow(where="", prompt="A"), PromptRow(where="", messages=tuple(TURNS))]
    jobs = [job.make_job_requests(target, parse(argv), rows) for argv in ([], ["--chat"])]
    stops = [[request.stop_tokens for request in requests] for requests in jobs]
    assert stops == [[target.stop_tokens, target.chat_stop_tokens], [target.chat_stop_tokens] * 2]
    assert mj.Chat(target).ask(TURNS).stop_tokens == target.chat_stop_tokens
    for chat, stop_tokens in {True: target.chat_stop_tokens, False: target.stop_tokens}.items():
        decoding = Decoding(session=Session.of(target), chat=chat)
        assert decoding.stop_tokens == decoding.requests([[7]], [0], 0.0)[0].stop_tokens == stop_tokens


def test_an_answer_is_cut_at_the_end_of_its_turn():
    target = chatty(TEMPLATES["chatml"][0])
    options = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
    [uncut] = mj.generate(target, "none", TURNS, ignore_eos=True, **options).tokens
    [cut] = mj.generate(target, "none", TURNS, **options).tokens
    end = min(uncut.index(i) for i in target.chat_stop_tokens if i in uncut)
    assert uncut[end] == WORDS.index("<|im_end|>") and cut == uncut[: end + 1]
