"""Commands on a full disk: a one-sentence error, exit code 2, and no partial file under a final name."""

import argparse
import errno
import json
import os
import subprocess
import sys

import pytest

from mars_jax.cli.program import command

FULL, QUOTA = os.strerror(errno.ENOSPC), os.strerror(errno.EDQUOT)
ERRORS = {
    "with a name": OSError(errno.ENOSPC, FULL, "rows.jsonl"),
    "without a name": OSError(errno.EDQUOT, QUOTA),
    "of tensorstore": ValueError(f"RESOURCE_EXHAUSTED: Failed to write: {FULL} [os_error_code='28']"),
    "of safetensors": Exception(f"Error while serializing: I/O error: {FULL} (os error 28)"),
    "chained": RuntimeError("the checkpoint failed"),
}
ERRORS["chained"].__cause__ = OSError(errno.ENOSPC, FULL)


def fail_with(error):
    """Run a command that raises `error`; return its exit code."""

    def body(args, out):
        raise error

    return command(lambda argv: argparse.Namespace(output="out"), body, [])


@pytest.mark.parametrize("kind", ERRORS)
def test_a_full_disk_gets_one_sentence_whatever_library_raises_it(kind, capsys):
    reason = QUOTA if kind == "without a name" else FULL
    assert fail_with(ERRORS[kind]) == 2
    sentence = f"error: cannot write to 'out': {reason}; make room, or choose another path.\n"
    assert capsys.readouterr() == ("", sentence)


def test_other_errors_of_this_package_keep_their_traceback():
    with pytest.raises(OSError, match="a bug"):
        fail_with(OSError("a bug"))


@pytest.mark.parametrize("hides", [False, True])
def test_a_bug_while_a_full_disk_is_handled_keeps_its_traceback(hides):
    bug = ZeroDivisionError("a bug")
    bug.__context__, bug.__suppress_context__ = OSError(errno.ENOSPC, FULL), hides
    with pytest.raises(ZeroDivisionError, match="a bug"):
        fail_with(bug)


def test_an_error_of_the_system_is_judged_by_its_number():
    # The file is named like the error message of a full disk.
    with pytest.raises(FileNotFoundError):
        fail_with(OSError(errno.ENOENT, os.strerror(errno.ENOENT), FULL))


LIMITED = """
import resource, sys
from mars_jax.__main__ import main
sys.dont_write_bytecode = True
limit = int(sys.argv[1])
import mars_jax, jax, orbax.checkpoint, safetensors.numpy
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
sys.argv[1:] = sys.argv[2:]
sys.exit(main())
"""
PAIR = ["--target", "tiny/target", "--draft", "model:tiny/draft", "--task", "jsonl={prompts}"]
COMMANDS = {
    "generate": (1, "generate", "--max-new-tokens", "4", "--output", "{to}/rows.jsonl", "--prompts-file", "{prompts}"),
    "convert": (1000, "convert", "tiny/target", "{to}/converted"),
    "benchmark": (1000, "benchmark", *PAIR, "--max-new-tokens", "4", "--temperatures", "0", "--output", "{to}/out"),
    "calibrate": (
        1, "calibrate", *PAIR, "--max-new-tokens", "4", "--bound", "0.9", "--confidence", "0.5",
        "--output", "{to}/theta.json",
    ),
    "distill": (
        5000, "distill", "eagle3", "--target", "tiny/target", "--data", "{documents}", "--tokens", "2048",
        "--output", "{to}/head",
    ),
}  # fmt: skip
"""For each case: the file size limit in bytes, and the command line."""


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_whose_files_may_not_grow_ends_with_one_sentence(name, tmp_path):
    limit, *argv = COMMANDS[name]
    prompts, documents, to = tmp_path / "prompts.jsonl", tmp_path / "documents.txt", tmp_path / "to"
    prompts.write_text("".join(json.dumps({"prompt": f"Once upon {i}"}) + "\n" for i in range(2)))
    documents.write_text("Once upon a time there was a cat who saw the sea. <|endoftext|>" * 400)
    to.mkdir()
    argv = [part.format(prompts=prompts, documents=documents, to=to) for part in argv]
    environment = os.environ | {"JAX_ENABLE_COMPILATION_CACHE": "0"}
    run = subprocess.run(
        [sys.executable, "-c", LIMITED, str(limit), *argv], capture_output=True, text=True, env=environment
    )
    assert run.returncode == 2, run.stderr
    assert "Traceback" not in run.stderr
    sentence = run.stderr.splitlines()[-1]
    assert sentence.startswith("error: ") and "File too large" in sentence and str(to) in sentence
    for file in to.rglob("*.json"):
        json.loads(file.read_text())
    assert not list(to.rglob("*.safetensors")) and not (to / "converted").exists()
