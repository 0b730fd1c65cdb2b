"""Hostile names, files and sizes are refused in one sentence, before anything is allocated."""

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mars_jax as mj
from mars_jax import constraints, contrib, fake, hub
from mars_jax.cli import commands
from mars_jax.cli.generate.prompts import read_prompts
from mars_jax.cli.program import PATHS
from mars_jax.contrib.drafters.medusa_files import load_medusa
from mars_jax.hub.config_json import from_json
from mars_jax.hub.gguf_file import GGUFFile, read_gguf
from mars_jax.hub.gguf_tokenizer import gguf_tokenizer
from mars_jax.hub.heads.eagle_files import from_head_json
from mars_jax.lab.evaluate.tasks import catalogue
from mars_jax.models.config import ModelConfig
from mars_jax.utils import assets, limits
from mars_jax.utils.errors import MarsError
from mars_jax.verify import choose, rules

TARGET = Path(str(assets.path("tiny/target")))
pytestmark = pytest.mark.timeout(120)
LONG_NAMES = {
    "a long name": "x" * 300,
    "a long name in a path": f"nowhere/{'x' * 300}/y",
    "a long path": "/".join(["x" * 100] * 60),
    "a NUL": "a\0b",
    "half a surrogate pair": "a\ud800b",
}
FORMS = {
    "DRAFT": ["model:{}", "eagle:{}", "medusa:{}", "dflash:{}", "sprinter:{}", "replay:{}"],
    "RULE": ["learned:{}", "{}.py:rule", "equivalent:{}"],
    "NAME[=PATH]": ["jsonl={}", "stories={}", "{}"],
    **{key: ["{}"] for key in [*PATHS, "NAME", "--theta", "--thetas", "--prompts-file"]},
}
"""Forms of a value that holds a path, by metavar or flag."""
NEEDED = {
    "benchmark": ["--task", "arithmetic", "--output", "made"],
    "calibrate": ["--task", "arithmetic", "--output", "made"],
    "distill": ["--data", "texts", "--output", "made", "--target", "tiny/target"],
    "convert": ["tiny/target", "made"],
}
"""Valid values of arguments that a command requires."""
NAMED_BY_PLACE = {"source": 1, "destination": 2}
"""Positions of the arguments of `convert` in its command line."""


def path_arguments():
    """Return (command, argument, form of its value) for every argument that may hold a path."""
    cases = []
    for name in commands.COMMANDS:
        if (parser := commands.parser_of(name)) is None:
            continue
        kinds = {f"{name} {kind}": subparser for kind, subparser in parser.kinds().items()}
        for words, subparser in {name: parser, **kinds}.items():
            for action in subparser._actions:
                argument = [action.dest, *action.option_strings][-1]
                for form in FORMS.get(argument, FORMS.get(str(action.metavar), [])):
                    cases.append((words, argument, form))
    return cases


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=[pytest.mark.slow] * (i > 0)) for i, k in enumerate(LONG_NAMES)]
)
@pytest.mark.parametrize("command", dict.fromkeys(command for command, _, _ in path_arguments()))
def test_no_argument_takes_a_name_that_no_file_can_have(command, kind, tmp_path, capsys):
    Path("texts").write_text("a story\n" * 100)
    for words, argument, form in path_arguments():
        if words != command:
            continue
        argv = [*words.split(), *NEEDED.get(words.split()[0], [])]
        value = form.format(LONG_NAMES[kind])
        if argument.startswith("--"):
            argv += [argument, value]
        elif argument in NAMED_BY_PLACE:
            argv[NAMED_BY_PLACE[argument]] = value
        else:
            argv.append(value)
        assert commands.main(argv) == 2, argv
        out, err = capsys.readouterr()
        assert out == "" and err.splitlines()[-1].startswith("error: "), err
        assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["texts"]


def python_calls():
    """Return a call of every public function that takes a path, by name."""
    target = mj.load("tiny/target")
    state: Any = object()
    config: Any = target.config
    calls = {
        "load": mj.load,
        "hub.save": lambda path: hub.save(path, config, target.params),
        "hub.convert": lambda path: hub.convert("tiny/target", path),
        "hub.save_state": lambda path: hub.save_state(path, state),
        "hub.restore_state": lambda path: hub.restore_state(path, state),
        "hub.load_eagle": lambda path: hub.load_eagle(path, config, target.params),
        "contrib.load_medusa": lambda path: load_medusa(path, config),
        "contrib.save": lambda path: contrib.save(path, {"inner": np.zeros((2, 2), np.float32)}),
        "constraints.json_schema": constraints.json_schema,
    }
    drafts = [name for name, row in mj.drafters.definitions().items() if row.path]
    weighted = [name for name, rule in rules().items() if "weights" in rule.needs]
    for name in drafts:
        calls[f"drafters.{name}"] = lambda path, name=name: mj.drafters.load(f"{name}:{path}", target)
    for name in weighted:
        calls[f"verify.{name}"] = lambda path, name=name: mj.verify.load(f"{name}:{path}", target)
    calls["verify.load of a file"] = lambda path: mj.verify.load(f"{path}.py:rule", target)
    return calls


def test_no_function_takes_a_name_that_no_file_can_have(tmp_path):
    for name, call in python_calls().items():
        for value in LONG_NAMES.values():
            with pytest.raises(MarsError, match=r"^[^\n]+[:;] [^\n]+\.$") as caught:
                call(value)
            assert str(caught.value).count("x") < 200, name
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["convert", "pairs"])
def test_an_empty_argument_is_refused(command, capsys):
    assert commands.main([command, ""] + ["made"] * (command == "convert")) == 2
    assert "is empty; a shell variable may be unset: give it a value." in capsys.readouterr().err


CHECKPOINT_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "tokenizer.model", "vocab.json", "merges.txt", "chat_template.jinja", "model.safetensors",
)  # fmt: skip


@pytest.mark.parametrize("file", CHECKPOINT_FILES)
@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
def test_no_file_of_a_checkpoint_makes_a_run_wait(file, kind, tmp_path):
    directory = shutil.copytree(TARGET, tmp_path / "target")
    (directory / file).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(directory / file)
    elif kind == "device":
        (directory / file).symlink_to("/dev/zero")
    else:
        (directory / file).touch()
        os.truncate(directory / file, 1 << 40)
    with pytest.raises(MarsError, match=re.escape(str(directory))):
        hub.load(directory).encode([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("pipe", ["-", "/dev/stdin", "/dev/fd/{}"])
def test_prompts_come_through_a_pipe_that_is_open(pipe, monkeypatch):
    reader, writer = os.pipe()
    os.write(writer, b'{"prompt": "a"}\n\n{"prompt": "b"}' if pipe == "-" else b"a\r\n\nb")
    os.close(writer)
    stdin = os.dup(0)
    os.dup2(reader, 0)
    monkeypatch.setattr("sys.stdin", open(0, closefd=False))  # noqa: SIM115
    try:
        rows = read_prompts(pipe.format(reader), choose("exact", {}))
    finally:
        os.dup2(stdin, 0)
        os.close(stdin)
        os.close(reader)
    assert [row.prompt for row in rows] == ["a", "b"]


def endless_line(path):
    with path.open("wb") as file:
        file.truncate(limits.LINE_BYTES + 1)
    return read_prompts(str(path), choose("exact", {}))


def long_prompt(path):
    return hub.outline("tiny/target").encode("x" * (limits.PROMPT_BYTES + 1))


def many_files(path):
    for i in range(10):
        (path / f"{i}" / "nested").mkdir(parents=True)
        (path / f"{i}" / "rows.jsonl").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(catalogue, "DATASET_FILES", 20)
        return read_prompts(str(path), choose("exact", {}))


SMALL = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}


def head_of(**fields):
    data = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 9, **SMALL} | fields
    shapes = {"layers.0.hidden_norm.weight": (16,)}
    config = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=9, num_heads=2)
    return from_head_json(data, shapes, config)


def config_of(**fields):
    return from_json({"model_type": "qwen3_moe", "num_hidden_layers": 1, **SMALL} | fields)


def long_token(path):
    values = {"tokenizer.ggml.model": b"llama", "tokenizer.ggml.tokens": [b"a" * 5_000_000]}
    return gguf_tokenizer(GGUFFile(path, values, {}))


def gguf_header(path):
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 39))
        file.truncate(1 << 40)
    return read_gguf(path)


def config_only(path):
    """Create a checkpoint that has only a config, and return the name of an index in it."""
    path.mkdir()
    shutil.copy(TARGET / "config.json", path)
    return path / "model.safetensors.index.json"


def safetensors_header(path):
    config_only(path)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", limits.JSON_BYTES + 1))
        file.truncate(1 << 30)
    return hub.load(path)


def many_shards(path):
    names = {f"{i}": f"{i}.safetensors" for i in range(limits.SHARDS + 1)}
    config_only(path).write_text(json.dumps({"weight_map": names}))
    return hub.load(path)


def large_index(path):
    index = config_only(path)
    index.write_text("{" + " " * limits.JSON_BYTES + '"weight_map": {"model.norm.weight": "absent"}}')
    with pytest.raises(MarsError, match="lacks absent, which"):
        hub.load(path)
    os.truncate(index, limits.INDEX_BYTES + 1)
    return hub.load(path)


def generate(**options):
    return mj.generate(mj.load("tiny/target"), "none", ["a"], **options)


MODEL = fake.hash_model(vocab_size=11)
HUGE = 10**9
WHOLE = "is 1000000000: expected a whole number from"


AT_MOST = "is 1,000,000,000: expected at most"
SIZES = {
    "the index of a checkpoint": (large_index, "it has 25,165,825 bytes, and at most 25,165,824 are read"),
    "a line of a prompts file": (endless_line, "line 1: it has more than 16,777,216 bytes"),
    "a prompt": (long_prompt, "the prompt has 8,388,609 bytes: expected at most 8,388,608"),
    "a folder of prompts": (many_files, "holds more than 20 files: name a file"),
    "layers of a config": (lambda path: config_of(num_hidden_layers=HUGE), f"num_layers {AT_MOST} 1,024"),
    "experts": (lambda path: config_of(num_experts=HUGE), f"num_layers times num_experts {AT_MOST} 65,536"),
    **{
        f"{key} of a config": (
            lambda path, key=key: config_of(**{key: HUGE}),
            f"{name} {AT_MOST} {limits.DIMENSION:,}",
        )
        for key, name in (
            ("vocab_size", "vocab_size"),
            ("hidden_size", "hidden_size"),
            ("intermediate_size", "intermediate_size"),
            ("num_attention_heads", "num_heads"),
            ("head_dim", "head_dim"),
            ("moe_intermediate_size", "expert_size"),
        )
    },
    "positions": (
        lambda path: config_of(max_position_embeddings=10 * HUGE),
        f"max_positions is 10,000,000,000: expected at most {limits.POSITIONS:,}",
    ),
    "layers of a head": (lambda path: head_of(num_hidden_layers=HUGE), f"num_layers {AT_MOST} 1,024"),
    "a token of a GGUF file": (long_token, "has a token of 5,000,000 bytes: expected at most 1,024"),
    "a text of a GGUF file": (gguf_header, "its header has more than 33,554,432 bytes"),
    "a safetensors file": (safetensors_header, "its header has 16,777,217 bytes, and at most 16,777,216"),
    "the files of an index": (many_shards, "names 10,001 files: expected at most 10,000"),
    "samples": (lambda path: generate(samples=HUGE, temperature=1.0), f"samples {WHOLE} 1 to 65536"),
    "batch_size": (lambda path: generate(batch_size=HUGE), f"batch_size {WHOLE} 1 to 65536"),
    "rows of controls": (lambda path: mj.make_controls(HUGE, limit=8), f"batch {WHOLE} 1 to"),
    "max_ngram": (lambda path: mj.drafters.ngram(4, max_ngram=HUGE), f"max_ngram {WHOLE} 1 to 64"),
    "a tree": (lambda path: mj.drafters.language_model(MODEL, tree=(10,) * 9), "more than 1024 nodes"),
    "a dynamic tree": (
        lambda path: mj.drafters.Dynamic(10, 7, HUGE),
        f"nodes of a dynamic tree {WHOLE} 2 to 1024",
    ),
    "a chain": (lambda path: mj.drafters.ngram(HUGE), f"num_draft_tokens {WHOLE} 1 to 128"),
}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_above_its_limit_is_refused_with_both(name, tmp_path):
    call, expected = SIZES[name]
    with pytest.raises(MarsError, match=re.escape(expected)):
        call(tmp_path / "named.gguf")


MEASURED = """
import json, pathlib, sys, tempfile, time
import tokenizers, transformers
import mars_jax as mj
from mars_jax.utils.errors import MarsError
from tests.helpers.chat_templates import HOSTILE
from mars_jax.drafters.tree_shapes import Dynamic
from tests.test_limits import SIZES

target = mj.load("tiny/target")
target.encode([{"role": "user", "content": "hello"}])

def rendered(template):
    target.tokenizer.chat_template = template
    target.encode([{"role": "user", "content": "hello"}])

calls = {name: call for name, (call, _) in SIZES.items()}
if sys.argv[1] == "templates":
    calls = {name: (lambda path, text=text: rendered(text)) for name, text in HOSTILE.items()}
seconds = {}
for name, call in calls.items():
    with tempfile.TemporaryDirectory() as folder:
        start = time.process_time()
        try:
            call(pathlib.Path(folder, "named.gguf"))
        except MarsError:
            seconds[name] = time.process_time() - start
assert seconds.keys() == calls.keys(), calls.keys() - seconds.keys()
# Not ru_maxrss, which a new process inherits from the one that started it.
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps({"seconds": seconds, "peak": int(peak) * 1024}))
"""


@pytest.mark.slow
@pytest.mark.parametrize("inputs", ["templates", "sizes"])
def test_a_refusal_takes_little_time_and_memory(inputs, tmp_path):
    """One process refuses all of them, so its peak bounds the peak of each."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", MEASURED, inputs]
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    measured = json.loads(process.stdout.splitlines()[-1])
    assert measured["peak"] < 1.5e9
    assert {name: time for name, time in measured["seconds"].items() if time > 5} == {}
