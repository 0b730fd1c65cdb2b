"""Tokenizers and chat templates are data: no code of a checkpoint runs, and their errors become a sentence."""

import dataclasses
import json
import re
import shutil
import subprocess
import sys

import jax
import pytest

import mars_jax as mj
from mars_jax import hub
from mars_jax.core import fake
from mars_jax.hub.tokenizer import read_plain, read_tokenizer
from mars_jax.lab.evaluate.answers import prompt_tokens
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError, MarsWarning
from tests.helpers.checkpoint_files import message

TEXTS = (
    "Once upon a time",
    " leading and  double spaces \n\nand lines\t",
    "<|endoftext|>in<|endoftext|> the <|im_start|> middle",
    "naïve café, 東京 🙂 \u200b\ud7ff",
    "Don't stop ! It 's (fine) .",
)


@pytest.mark.parametrize("name", ["target", "draft", "proxy"])
def test_the_plain_tokenizer_is_that_of_transformers(name):
    path = assets.FOLDER / "tiny" / name
    direct, reference = read_plain(path), read_tokenizer(path)
    for text in TEXTS:
        ids = reference(text)["input_ids"]
        assert direct.encode(text).ids == ids
        assert direct.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True)
    assert [e.ids for e in direct.encode_batch(list(TEXTS))] == reference(list(TEXTS))["input_ids"]
    assert direct.get_vocab() == reference.get_vocab()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("add_bos_token", True),
        ("bos_token", "<new>"),
        ("tokenizer_class", "LlamaTokenizerFast"),
        ("bos_token", "Once"),
    ],
)
def test_a_field_that_only_transformers_supports_is_left_to_it(checkpoint, field, value):
    edit(checkpoint / "tokenizer_config.json", **{field: value})
    assert read_plain(checkpoint) is None


def test_a_tokenizer_of_another_library_without_added_tokens_has_stop_tokens(checkpoint):
    class Tokenizer:
        eos_token_id = 5

    model = dataclasses.replace(hub.outline(str(checkpoint)), own_tokenizer=Tokenizer())
    assert model.chat_stop_tokens == tuple(dict.fromkeys([*model.stop_tokens, 5]))


@pytest.mark.slow
def test_a_text_needs_no_transformers():
    code = """
import sys, mars_jax as mj
print(mj.generate(mj.load(), "model:tiny/draft", "Once upon a time", max_new_tokens=8).text)
print("transformers" in sys.modules)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip().endswith("False") and len(process.stdout) > 20


CODE = """
import pathlib
pathlib.Path({trace!r}).write_text("the checkpoint's code ran")
from transformers import PreTrainedTokenizerFast
class Mine(PreTrainedTokenizerFast): pass
"""


EMBEDDED = assets.FOLDER / "tiny" / "draft"


@pytest.fixture
def checkpoint(tmp_path):
    return shutil.copytree(EMBEDDED, tmp_path / "model")


def edit(path, **fields) -> None:
    data = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(data | fields))


@pytest.fixture
def with_code(checkpoint, tmp_path):
    """Return the checkpoint with its own tokenizer class, and the file that its code would write."""
    trace = tmp_path / "ran"
    for name in ("tokenization_mine", "configuration_mine"):
        (checkpoint / f"{name}.py").write_text(CODE.format(trace=str(trace)))
    mapped = {"AutoTokenizer": [None, "tokenization_mine.Mine"], "AutoConfig": "configuration_mine.Mine"}
    edit(checkpoint / "tokenizer_config.json", tokenizer_class="Mine", auto_map=mapped)
    edit(checkpoint / "config.json", auto_map=mapped)
    return checkpoint, trace


@pytest.mark.slow
def test_no_code_of_a_checkpoint_runs_and_no_question_is_asked(with_code):
    checkpoint, trace = with_code
    command = [sys.executable, "-m", "mars_jax.generate", "--target", str(checkpoint), "--draft", "none"]
    run = subprocess.run([*command, "hello"], input="y\n" * 9, capture_output=True, text=True)
    assert not trace.exists()
    assert run.returncode == 2 and run.stdout == ""
    assert "(auto_map), which is never run" in run.stderr and "[y/N]" not in run.stderr
    assert run.stderr.splitlines()[-1].startswith(f"error: no tokenizer could be read from '{checkpoint}'")


def test_a_config_that_names_code_beside_a_plain_tokenizer_loads_without_it(with_code):
    checkpoint, trace = with_code
    shutil.copy(EMBEDDED / "tokenizer_config.json", checkpoint / "tokenizer_config.json")
    assert hub.outline(str(checkpoint)).encode("hello")
    mapped = {"AutoConfig": "x.Y"}
    edit(checkpoint / "tokenizer_config.json", tokenizer_class="GPT2Tokenizer", auto_map=mapped)
    assert hub.outline(str(checkpoint)).encode("hello")
    assert not trace.exists()


TEMPLATES = {
    "raises": "{{ raise_exception('roles must\nalternate') }}",
    "is malformed": "{% for m in messages %}{{ m",
    "reaches for the interpreter": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "counts too far": "{% for i in range(10 ** 9) %}x{% endfor %}",
    "calls itself": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
}


@pytest.mark.parametrize("fault", TEMPLATES)
def test_a_chat_template_that_cannot_be_applied_gets_a_sentence(checkpoint, fault):
    (checkpoint / "chat_template.jinja").write_text(TEMPLATES[fault])
    sketch = hub.outline(str(checkpoint))
    turns = Problem(task="t", id="0", turns=("hello", "and"))
    for call in (
        lambda: sketch.encode("hello", chat=True),
        lambda: prompt_tokens(sketch, turns, ["hi"], chat=True),
        lambda: mj.serve.requests.make_requests(sketch, ["hello"], chat=True),
    ):
        text = message(call)
        assert text.startswith(f"the chat template of '{checkpoint}' cannot be applied (")
        assert text.endswith("): correct it, or leave --chat out.")


@pytest.mark.parametrize("fields", [{}, {"add_prefix_space": False}], ids=["plain", "of transformers"])
def test_a_panic_of_tokenizers_is_one_sentence(checkpoint, fields):
    """The post-processor names a special token that does not exist."""
    edit(checkpoint / "tokenizer_config.json", **fields)
    template = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    processor = {"type": "TemplateProcessing", "single": template, "pair": [], "special_tokens": {}}
    edit(checkpoint / "tokenizer.json", post_processor=processor)
    target = hub.outline(str(checkpoint))
    for call in (lambda: target.encode("hi"), lambda: target.encode_many(["hi", "a"])):
        text = message(call)
        assert re.search(r"tokenizer of '.*' fails \(no entry found for key\): its files contradict", text)


def test_a_conversation_without_a_template_is_refused_in_later_turns_too(checkpoint):
    (checkpoint / "chat_template.jinja").unlink(missing_ok=True)
    config = json.loads((checkpoint / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(MarsError, match="has no chat template"):
        hub.outline(str(checkpoint)).encode_chat([{"role": "user", "content": "hello"}])


def test_a_mesh_may_be_a_text():
    loaded = mj.load("tiny/draft", mesh="data=2")
    assert loaded.mesh is not None and dict(loaded.mesh.shape) == {"data": 2}
    assert loaded.params["norm"].sharding.mesh == loaded.mesh
    assert mj.load("tiny/draft", mesh=jax.make_mesh((1,), ("model",))).mesh.size == 1  # pyright: ignore


@pytest.mark.parametrize(
    ("mesh", "expected"),
    [
        *((text, "axes among") for text in ("data", "data=0", "data=" + "9" * 5000, "data=²", "rows=2", "")),
        *((value, r"a jax\.sharding\.Mesh, or a string such as") for value in ({"data": 2}, jax.devices())),
    ],
)
def test_a_value_that_is_no_mesh_gets_a_sentence(mesh, expected):
    with pytest.raises(MarsError, match=rf"the mesh is .*: expected {expected}"):
        mj.load("tiny/draft", mesh=mesh)


def test_a_model_of_ones_own_decodes_as_a_loaded_one():
    """Include models with and without a config or a tokenizer."""
    loaded = mj.load("tiny/draft")
    parts = (loaded.model, loaded.params)
    configured = mj.Pretrained.from_parts(*parts, loaded.tokenizer, config=loaded.config)
    bare = mj.Pretrained.from_parts(
        *parts, loaded.tokenizer, max_positions=loaded.config.max_positions, stop_tokens=loaded.stop_tokens
    )
    assert configured.stop_tokens == bare.stop_tokens == loaded.stop_tokens
    options = {"max_new_tokens": 12, "stop_strings": "xyzzy"}
    expected = mj.generate(loaded, "ngram", ["Once upon a time", "The cat"], **options)
    for model in (configured, bare):
        actual = mj.generate(model, "ngram", ["Once upon a time", "The cat"], **options)
        assert actual.text == expected.text and actual.tokens == expected.tokens
    with pytest.raises(MarsError, match=r"has no config, by which the heads of 'x' are checked"):
        mj.drafters.load("eagle:x", bare)
    hashed = mj.Pretrained.from_parts(fake.hash_model(vocab_size=11), (), max_positions=48)
    with pytest.raises(MarsError, match="has no tokenizer: give from_parts one, or prompts as token ids"):
        mj.generate(hashed, "ngram", ["Once"])
    for arguments in ({}, {"config": loaded.config, "max_positions": 9}):
        with pytest.raises(MarsError, match="from_parts takes either a config or max_positions"):
            mj.Pretrained.from_parts(*parts, **arguments)


# The BOS token.

BOS = "<|endoftext|>"
ENCODERS = {
    "encode": lambda target, prompts, **options: [target.encode(prompt, **options) for prompt in prompts],
    "encode_many": lambda target, prompts, **options: target.encode_many(prompts, **options),
}


@pytest.fixture(params=["tokenizers", "transformers"])
def encoding_target(request, checkpoint):
    """Return a checkpoint whose tokenizer adds BOS, read by one of the two libraries that encode."""
    if request.param == "transformers":
        edit(checkpoint / "special_tokens_map.json", bos_token=BOS)
    target = hub.outline(checkpoint)
    assert (target._plain is None) == (request.param == "transformers")
    return target


@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)
def test_prompts_that_begin_with_the_bos_token_warn(encoding_target, encode):
    [once] = encode(encoding_target, ["Once"])
    with pytest.warns(MarsWarning, match=re.escape(f"begins with {BOS}, which the tokenizer of")):
        assert encode(encoding_target, [BOS + "Once", "Once"]) == [[0, *once], once]


@pytest.mark.parametrize("encode", ENCODERS.values(), ids=ENCODERS)
def test_a_chat_template_with_the_bos_token_gives_one(encoding_target, encode):
    [ids] = encode(encoding_target, ["Once"], chat=True)
    assert ids[0] == 0 and ids[1] != 0
