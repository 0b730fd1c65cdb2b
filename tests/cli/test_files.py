"""Paths that are not regular files: pipes and devices, which may never end, directories, and huge sparse files."""

import os

import pytest

from mars_jax.cli import commands

FLAGS = {
    "prompts": ("generate", "--prompts-file", "{}"),
    "theta": ("generate", "--theta", "{}", "hello"),
    "schema": ("generate", "--json-schema", "{}", "hello"),
    "rule": ("generate", "--verify", "{}:gate", "hello"),
    "equivalents": ("generate", "--verify", "equivalent:{}", "--draft", "ngram", "hello"),
    "config": ("generate", "--target", "{folder}", "hello"),
    "task": ("calibrate", "--task", "jsonl={}", "--output", "{folder}/theta.json"),
    "documents": ("calibrate", "--task", "stories={}", "--output", "{folder}/theta.json"),
    "data": ("distill", "eagle3", "--data", "{}", "--output", "{folder}/made"),
}
pytestmark = pytest.mark.timeout(5, func_only=True)


DEEP = {
    **{name: FLAGS[name] for name in ("prompts", "theta", "equivalents", "config", "task")},
    "a rule's weights": ("generate", "--verify", "learned:{folder}", "hello"),
    "template": ("generate", "--chat", "--template-arg", "a={deep}", "hello"),
}


@pytest.mark.parametrize("flag", DEEP)
def test_json_that_is_nested_too_deeply_is_refused(flag, tmp_path, capsys):
    deep = '{"a": ' * 100_000
    suffix = {"prompts": ".jsonl", "task": ".jsonl"}.get(flag, ".json")
    path = tmp_path / ("config.json" if "{folder}" in " ".join(DEEP[flag]) else f"named{suffix}")
    path.write_text(deep)
    assert commands.main([arg.format(path, folder=tmp_path, deep=deep) for arg in DEEP[flag]]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("error: ") and len(err) < 1000


@pytest.mark.parametrize("kind", ["pipe", "device", "directory", "sparse"])
@pytest.mark.parametrize("flag", FLAGS)
def test_what_is_no_file_is_refused_at_once(flag, kind, tmp_path, capsys):
    suffix = {"rule": ".py", "task": ".jsonl", "documents": ".txt"}.get(flag, ".json")
    path = tmp_path / ("config.json" if flag == "config" else f"named{suffix}")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        path.touch()
        os.truncate(path, 1 << 40)
    argv = [arg.format(path, folder=tmp_path) for arg in FLAGS[flag]]
    assert commands.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines()[-1].startswith("error: ") and str(tmp_path) in err
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
