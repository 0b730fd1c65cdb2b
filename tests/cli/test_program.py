"""Behaviour shared by all commands: an unwritable stdout, quiet libraries, and progress lines."""

import importlib.util
import os
import re
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path

import pytest

import mars_jax
from mars_jax.cli import commands, program, progress, quiet
from mars_jax.cli.generate import job
from mars_jax.cli.progress import busy, heartbeat
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve import queue
from mars_jax.utils import activity
from mars_jax.utils.errors import warn
from tests.helpers import slow_but

ROOT = Path(mars_jax.__file__).parent.parent
COMMAND = f"{sys.executable} -m mars_jax.generate --draft none --max-new-tokens 4"


def shell(command, **environment):
    """Run a bash command in the root directory of the package under test."""
    return subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=os.environ | environment
    )


def test_a_switch_of_kernels_that_is_none_is_refused_before_anything_loads(monkeypatch, capsys):
    monkeypatch.setenv("MARS_JAX_PALLAS", "off")
    assert commands.main(["generate", "--list-rules"]) == 2
    message = "error: MARS_JAX_PALLAS is 'off': expected 0, which turns Pallas kernels off, or 1.\n"
    assert capsys.readouterr() == ("", message)
    monkeypatch.setenv("MARS_JAX_PALLAS", "0")
    assert commands.main(["generate", "--list-rules"]) == 0


@pytest.mark.parametrize("platforms", slow_but(["cuda", "nonsense"], "nonsense"))
def test_devices_that_are_not_there_are_one_sentence_of_every_command_and_of_load(platforms):
    """Run all calls in one process, since starting JAX is slow."""
    code = "import sys, mars_jax; from mars_jax.cli.commands import main\n"
    code += "codes = [main(['generate', '--verify', 'exact', 'hello']), main(['check'])]\n"
    code += "try: mars_jax.load('tiny/target')\nexcept mars_jax.MarsError as error: print('error:', error)\n"
    code += "sys.exit(codes != [2, 2])"
    run = shell(f'{sys.executable} -c "{code}"', JAX_PLATFORMS=platforms)
    assert run.returncode == 0, run.stderr
    lines = run.stderr.splitlines() + run.stdout.splitlines()
    problem = f"error: JAX finds none of the devices that JAX_PLATFORMS names, '{platforms}' ("
    assert len(lines) == 3 and all(line.startswith(problem) for line in lines), lines


@pytest.mark.parametrize("filters", ["ignore", "error"])
def test_a_warning_is_one_line_on_stderr_with_any_filter(filters, capsys):
    def run(argv, out):
        for sentence in ("the draft is odd", "the prompt\nis odd", "the draft is odd"):
            warn(sentence)
        print("text", file=out)

    warnings.simplefilter(filters)
    for _ in range(2):  # a second command in the same process prints them again
        assert program.program(run, []) == 0
        assert capsys.readouterr() == ("text\n", "warning: the draft is odd\nwarning: the prompt is odd\n")


# An unwritable stdout.


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "flags", slow_but(["--json 'the sea'", "--no-stream 'the sea'", "'the sea'", "--help"], "--help")
)
def test_a_full_disk_at_stdout_is_one_sentence(flags):
    run = shell(f"{COMMAND} {flags} >/dev/full")
    assert run.returncode == 2
    last = "error: cannot write to the disk: No space left on device; make room, or choose another path."
    assert run.stderr.splitlines()[-1] == last and "Traceback" not in run.stderr


@pytest.mark.slow
def test_no_file_gets_the_number_of_a_closed_stdout(tmp_path):
    """A file with descriptor 1 would receive the output of libraries that print to stdout."""
    run = shell(f"{COMMAND} 'the sea' --output {tmp_path / 'rows.jsonl'} >&-")
    assert run.returncode == 0 and (tmp_path / "rows.jsonl").read_text().count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "code", "out", "err"),
    [
        ("--json 'the sea' >&-", 2, "", "error: stdout is closed: direct it to a file or a pipe.\n"),
        ("--json 'the sea' 2>&-", 0, '{"id"', ""),
        ("--prompts-file - <&-", 2, "", ".\n"),
    ],
)
def test_a_closed_stream_is_no_traceback(flags, code, out, err):
    run = shell(f"{COMMAND} {flags}")
    assert run.returncode == code and run.stdout.startswith(out) and run.stderr.endswith(err)
    assert "Traceback" not in run.stderr


# Quiet libraries.


@pytest.fixture
def users_environment(monkeypatch):
    """Remove the variables JAX_*, TPU_* and TF_CPP* that tests set and users do not."""
    for name in [n for n in os.environ if n.startswith(("JAX_PLATFORMS", "JAX_FORCE", "TPU_", "TF_CPP"))]:
        monkeypatch.delenv(name)


@pytest.mark.slow
def test_libtpu_says_nothing_where_there_is_no_tpu(users_environment):
    if importlib.util.find_spec("libtpu") is None or quiet.may_have_tpu():
        pytest.skip("needs libtpu, and no TPU")
    command = f"{sys.executable} -m mars_jax.generate --json --max-new-tokens 4 'the sea'"
    run = shell(command)
    # On a slow machine the command prints progress lines.
    assert run.returncode == 0 and "TPU" not in run.stderr
    # A variable of libtpu enables its output again.
    code = "import os; from mars_jax.cli import quiet; quiet.quiet(); print(quiet._NO_TPU.keys() & os.environ.keys())"
    assert shell(f"{sys.executable} -c '{code}'", TPU_STDERR_LOG_LEVEL="0").stdout == "set()\n"


# A constant that XLA takes two seconds to fold, which triggers the same alarm as a slow compilation.
ALARM = """
import sys, threading, os
{start}
import jax, jax.numpy as jnp
def slow():
    return jax.lax.reduce_window(jax.lax.iota(jnp.float32, 200_000), 0.0, jax.lax.add, (3000,), (1,), "SAME")
threading.Timer(8.0, lambda: os._exit(0)).start()
jax.jit(slow).lower().compile()
"""


@pytest.mark.slow
def test_xlas_alarms_about_slow_compilations_are_quiet(users_environment, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    loud, silent = (
        shell(f"{sys.executable} -c '{ALARM.format(start=start)}'", JAX_PLATFORMS="cpu").stderr
        for start in ("", "from mars_jax.cli.quiet import quiet; quiet()")
    )
    assert "is taking > " in loud and silent == ""


def test_what_the_environment_says_stands(users_environment, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "a,b")
    quiet.quiet()
    assert os.environ["TF_CPP_MIN_LOG_LEVEL"] == "0"
    assert os.environ["TPU_WORKER_HOSTNAMES"] == "a,b" and "TPU_ACCELERATOR_TYPE" not in os.environ


@pytest.mark.parametrize(
    ("devices", "expected"),
    [([], False), (["dev/accel0"], True), (["dev/vfio/vfio"], False), (["dev/vfio/0"], True)],
)
def test_a_machine_that_may_have_a_tpu_is_left_alone(devices, expected, tmp_path, users_environment):
    for name in devices:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert quiet.may_have_tpu(tmp_path) is expected


# Progress lines.


@pytest.fixture
def fast(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS", 0.05)


def lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_a_line_now_and_then_says_what_is_being_done(fast, capsys):
    with heartbeat():
        time.sleep(0.12)
        assert lines(capsys) == []  # no activity is named yet
        with busy("loading"), activity.doing("compiling"):
            time.sleep(0.12)
    assert set(lines(capsys)) == {"loading ... (0 s); compiling ... (0 s)"}
    time.sleep(0.12)
    assert lines(capsys) == []  # the heartbeat has ended


def test_a_spinner_says_how_far_what_goes_on_inside_is(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with busy("loading"), activity.doing("downloading") as download:
        time.sleep(0.2)
        download.detail = "3 of 9 MB"
        time.sleep(0.2)
    err = capsys.readouterr().err
    assert "; downloading: 3 of 9 MB" in err and "loading ... (0 s)" in err


def test_the_time_left_is_that_of_the_rows_done_in_this_run(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("rich.console.monotonic", lambda: clock[0])
    monkeypatch.setattr(progress, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    with progress.progress("prompts") as show:
        show(90, 100, "")
        clock[0] += 20
        show(92, 100, progress.speed(40, 20, 2.0))
        assert activity.describe() == "prompts: 92 of 100, 0:01:20 left, 20 tokens/s, tau 2.00"
    with progress.progress("steps", deadline=clock[0] + 50) as show:
        show(90, 100, "")
        clock[0] += 20
        show(92, 100, "")
        assert activity.describe() == "steps: 92 of 100, 0:00:30 left"


@pytest.mark.parametrize(
    ("owner", "name", "flags", "line"),
    [
        (queue, "complete", ["--json"], r"prompts: [12] of 3, (0:00:0\d left, )?[\d,]+ tokens/s, tau 1\.00"),
        (Pretrained, "encode_many", ["--json"], r"loading \.\.\. \(\d s\); tokenizing: [12] of 3 prompts$"),
        (queue.Queue, "_first", ["--no-stream"], r"compiling \.\.\. \("),
    ],
    ids=["decoding", "tokenizing", "compiling"],
)
def test_a_command_shows_the_progress_of_each_part(run, target, fast, monkeypatch, owner, name, flags, line):
    """Delay a function of that part. The heartbeat continues even if XLA blocks the main thread for minutes."""
    inner = getattr(owner, name)

    def slow(*args, **options):
        time.sleep(0.2)
        return inner(*args, **options)

    monkeypatch.setattr(owner, name, slow)
    monkeypatch.setattr(job, "CHUNK", 1)
    settings = ("--draft", "none", "--max-new-tokens", 8, "--batch-size", 1)
    outcome = run("--target", target, *settings, *flags, "the sea", "a story", "of the sun")
    lines = outcome.err.splitlines()
    assert outcome.code == 0 and any(re.match(line, printed) for printed in lines), outcome.err
