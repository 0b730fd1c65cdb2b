"""Tokenizers of GGUF files. Oracle: the tokenizers that the metadata was written from (ids, text, vocabulary)."""

import io
import json
import lzma
import subprocess
import sys
from pathlib import Path

import gguf
import pytest
import sentencepiece
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from mars_jax import hub
from mars_jax.hub import gguf_tokenizer
from mars_jax.hub.gguf_file import read_gguf
from mars_jax.hub.gguf_tokenizer import _SPLITS
from mars_jax.hub.tokenizer import read_tokenizer
from mars_jax.utils import assets
from mars_jax.utils.errors import MarsError
from tests.helpers.gguf_files import smollm2, write

DATA = Path(__file__).parents[1] / "data"
HARD = (
    "Il pleut à verse: 1234567 mm,\n\tand 5.6 more…  I'll say WE'LL, they'Re «here»",
    "日本語のテキスト、 🙂🙂🏽 한국어 e\u0301 é Å Ⅷ ½ ١٢٣ ﬁ",
    "def f(x):\n    return {x: [1, 22, 333]}  # don't\r\n\r\n\n\n  \t end   ",
    "   leading spaces, aaaaaaaaaaaaaaaa bbbbb -------- ====== \u00a0 \u3000 x",
    "CamelCaseWords HTTPServer iPhone ǅ ñÑ https://a.b/c/d?e=f_g&h=1 $5 <b>^~|`</b>",
    "\x00\x7f\u200b\ufeff\u0300",
    "x",
)


def stories():
    return lzma.open(DATA / "tinystories_heldout.txt.xz", "rt").read().split("<|endoftext|>")


TEXTS = (*HARD, *(story.strip() for story in stories()[:40]))


def tokens_of(path, model, tokens, types, **fields):
    """Write a GGUF file with a tokenizer and no tensors, and return its path."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level(path, tokenizer, pre, **fields):
    """Write the metadata that llama.cpp's converter writes for a tokenizer.json, with an unused row at the end."""
    data = json.loads(tokenizer.to_str())
    added = {token["id"]: 3 if token["special"] else 4 for token in data["added_tokens"]}
    tokens = [tokenizer.id_to_token(i) for i in range(tokenizer.get_vocab_size())]
    types = [added.get(i, 1) for i in range(len(tokens))]
    merges = [" ".join(pair) for pair in data["model"]["merges"]]
    fields = {"tokenizer_pre": pre, "token_merges": merges, **fields}
    return tokens_of(path, "gpt2", [*tokens, "[PAD0]"], [*types, 5], **fields)


def pieces(path, processor, **fields):
    """Write the metadata that llama.cpp's converter writes for a sentencepiece model, and return the path."""
    ids = range(processor.get_piece_size())
    types = [
        2 if processor.is_unknown(i) else 3 if processor.is_control(i) else 6 if processor.is_byte(i) else 1
        for i in ids
    ]
    tokens = [processor.id_to_piece(i) for i in ids]
    for i, piece in enumerate(tokens):
        if piece in USER_DEFINED:
            tokens[i], types[i] = USER_DEFINED[piece], 4
    scores = [processor.get_score(i) for i in ids]
    fields = {"token_scores": scores, "bos_token_id": 1, "eos_token_id": 2, "unk_token_id": 0, **fields}
    return tokens_of(path, "llama", tokens, types, **fields)


USER_DEFINED = {"<start>": "<start>", "\u2581\u2581": "  ", "\n\n": "\n\n"}


def assert_equal(tokenizer, encode, decode, texts=TEXTS):
    for text in texts:
        expected = encode(text)
        assert tokenizer(text)["input_ids"] == expected, text
        assert tokenizer.decode(expected, skip_special_tokens=True) == decode(expected), text


def test_the_packages_own_tokenizer_comes_back(tmp_path):
    folder = assets.path(assets.TARGET)
    original = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
    template = Path(f"{folder}/chat_template.jinja").read_text()
    ends = {"add_bos_token": True, "bos_token_id": 0, "eos_token_id": 0, "chat_template": template}
    tokenizer = read_tokenizer(byte_level(tmp_path / "model.gguf", original, "smollm", **ends))
    assert_equal(tokenizer, lambda text: original.encode(text).ids, original.decode)
    packaged = hub.outline(assets.TARGET).tokenizer
    turns = [{"role": "user", "content": "Who is Lily?"}]
    actual, expected = (
        t.apply_chat_template(turns, add_generation_prompt=True) for t in (tokenizer, packaged)
    )
    assert actual["input_ids"] == expected["input_ids"]
    for name in ("bos_token", "eos_token", "all_special_ids"):
        assert getattr(tokenizer, name) == getattr(packaged, name)


def test_a_later_process_reads_the_same_tokenizer_from_disk(tmp_path, monkeypatch, own_cache):
    original = tokenizers.Tokenizer.from_file(f"{assets.path(assets.TARGET)}/tokenizer.json")
    ends = {"add_bos_token": True, "add_eos_token": True, "bos_token_id": 0, "eos_token_id": 1}
    file = read_gguf(byte_level(tmp_path / "model.gguf", original, "smollm", **ends))
    built = gguf_tokenizer.plain_tokenizer(file)
    monkeypatch.setattr(gguf_tokenizer, "_build", lambda file: pytest.fail("it was built again"))
    kept, reference = gguf_tokenizer.plain_tokenizer(file), gguf_tokenizer.gguf_tokenizer(file)
    assert kept.to_str() == built.to_str()
    assert kept.encode(TEXTS[0]).ids[0] == 0 and kept.encode(TEXTS[0]).ids[-1] == 1
    assert_equal(reference, lambda text: kept.encode(text).ids, kept.decode)
    assert reference.get_vocab() == kept.get_vocab()
    [path] = (own_cache / "tokenizers").iterdir()
    path.write_text("{}")  # damaged
    with pytest.raises(pytest.fail.Exception, match="built again"):
        gguf_tokenizer.plain_tokenizer(file)


# The patterns in the tokenizer.json of each family.
_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
ORIGINAL = {
    "llama-bpe": rf"{_LETTERS}\p{{N}}{{1,3}}{_REST}",
    "qwen2": rf"{_LETTERS}\p{{N}}{_REST}",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
ORIGINAL |= {"llama3": ORIGINAL["llama-bpe"], "llama-v3": ORIGINAL["llama-bpe"]}
ORIGINAL["deepseek-r1-qwen"] = ORIGINAL["qwen2"]
ORIGINAL["qwen35"] = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ORIGINAL |= dict.fromkeys(("smaug-bpe", "dbrx", "glm4", "chatglm-bpe"), ORIGINAL["llama-bpe"])
ORIGINAL["gpt-4o"] = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def divider(pre):
    """Return the pre-tokenizer of a family's tokenizer.json."""
    if pre in ORIGINAL:
        parts = [pre_tokenizers.Split(Regex(ORIGINAL[pre]), "isolated")]
    elif pre == "deepseek-coder":
        patterns = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+")
        parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
        parts.append(pre_tokenizers.Digits(individual_digits=True))
    else:
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre in ("smollm", "refact") else []
        bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return pre_tokenizers.Sequence([*digits, bytes_only])
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(False, use_regex=False)])


@pytest.fixture(scope="module")
def trained():
    """Return a vocabulary and merges trained across word boundaries, so that any wrong split changes the ids."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    anything = pre_tokenizers.Split(Regex(r".{1,12}|\s+"), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([anything, to_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=900, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([*HARD * 5, *stories()[:60]], trainer)
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(pair) for pair in model["merges"]]


@pytest.mark.parametrize("pre", [name for name in _SPLITS if name != "default"])
def test_every_division_into_words_is_that_of_its_family(tmp_path, trained, pre):
    vocab, merges = trained
    # Tokens of the dropped merges can only match as whole words, in the families that look up whole words first.
    ignore_merges = pre in ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "tekken")
    original = tokenizers.Tokenizer(models.BPE(vocab, merges[:-200], ignore_merges=ignore_merges))
    original.pre_tokenizer, original.decoder = divider(pre), decoders.ByteLevel()
    if pre in ("qwen2", "qwen35"):
        original.normalizer = normalizers.NFC()
    original.add_special_tokens([AddedToken("<|im_end|>", special=True, normalized=False)])
    original.add_tokens([AddedToken("<think>", special=False, normalized=False)])
    tokenizer = read_tokenizer(byte_level(tmp_path / "model.gguf", original, pre, add_bos_token=False))
    texts = (*TEXTS, "So<think> 12</think><|im_end|>\n<|im_end|>", *(f" {word} " for word in vocab))
    assert_equal(tokenizer, lambda text: original.encode(text).ids, original.decode, texts)
    assert tokenizer.get_vocab() == original.get_vocab()


def test_bos_is_the_familys_where_the_file_does_not_say(tmp_path, trained):
    original = tokenizers.Tokenizer(models.BPE(*trained))
    original.add_special_tokens(["<s>", "</s>"])
    ends = {"bos_token_id": original.token_to_id("<s>"), "eos_token_id": original.token_to_id("</s>")}

    def ids(name, pre, **fields):
        tokenizer = read_tokenizer(byte_level(tmp_path / f"{name}.gguf", original, pre, **ends, **fields))
        return tokenizer("x")["input_ids"]

    [x] = ids("none", "qwen2")
    bos, eos = ends.values()
    assert ids("llama3", "llama-bpe") == ids("said", "qwen2", add_bos_token=True) == [bos, x]
    assert ids("both", "llama-bpe", add_bos_token=False, add_eos_token=True) == [x, eos]


@pytest.mark.parametrize("prefix", [True, False])
def test_pieces_merge_by_score_as_in_sentencepiece(tmp_path, prefix):
    """Test with a leading space (Llama 2) and without one (Gemma, which has tokens for runs of spaces)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for story in stories()[:60] for line in story.splitlines()]),
        model_writer=model,
        model_type="bpe",
        vocab_size=700,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        add_dummy_prefix=prefix,
        user_defined_symbols=["<start>"] if prefix else list(USER_DEFINED),
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    path = pieces(tmp_path / "model.gguf", processor, add_space_prefix=prefix, add_bos_token=False)
    tokenizer = read_tokenizer(path)
    texts = TEXTS if prefix else (*TEXTS, "a  b    c\n\n\nd <start> e<start>")
    assert_equal(tokenizer, processor.encode, processor.decode, texts)
    marked_ids = tokenizer("<start>Hi")["input_ids"]
    assert marked_ids[0] == processor.piece_to_id("<start>")
    assert tokenizer.decode(marked_ids) == ("<start> Hi" if prefix else "<start>Hi")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_smollm2s_ids_are_those_of_transformers_reader(tmp_path):
    """Replace the pre-tokenizer: transformers uses GPT-2's, but SmolLM2's tokenizer.json also splits single digits."""
    pytest.importorskip("torch")
    import transformers

    path = smollm2()
    expected = transformers.PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)
    expected.backend_tokenizer.pre_tokenizer = divider("smollm")
    texts = [*HARD, *stories()]
    actual = read_tokenizer(path)
    assert actual.get_vocab() == expected.get_vocab()
    assert actual(texts)["input_ids"] == expected(texts)["input_ids"]


KNOWN = {"tokenizer_pre": "gpt-2"}


@pytest.mark.parametrize(
    ("model", "fields", "message"),
    [
        ("gpt2", {"tokenizer_pre": "bloom"}, "has 'bloom' as its tokenizer.ggml.pre, and the supported ones"),
        ("gpt2", {}, "has None as its tokenizer.ggml.pre"),
        ("t5", {}, "has 't5' as its tokenizer.ggml.model, and the supported ones are gpt2, llama: use"),
        ("gpt2", KNOWN | {"token_merges": ["a b"]}, "no tokenizer could be read from .*: download it again"),
        ("gpt2", KNOWN | {"token_merges": ["a a"], "bos_token_id": 7}, "no tokenizer .*index out of range"),
        (
            "gpt2",
            KNOWN | {"token_merges": ["aa a"]},
            "fails .*: its files contradict each other, so download them again",
        ),
    ],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(tmp_path, model, fields, message):
    path = tokens_of(tmp_path / "model.gguf", model, ["a", "aa"], [1, 1], **fields)
    with pytest.raises(MarsError, match=message):
        read_tokenizer(path)


def test_torch_is_not_imported(tmp_path):
    path = write(tmp_path / "model.gguf", "llama")
    program = f"""
import sys
sys.modules["torch"] = None  # every import of it fails
import mars_jax as mj
target = mj.load({str(path)!r})
print(target.encode("abcd"), target.decode([2, 3]), target.params["embed"].shape)
"""
    process = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert process.stdout == "[2, 3] abcd (96, 64)\n", process.stderr
