"""Generated programs: what passes, and what the limits stop."""

from __future__ import annotations

import os
import time

import pytest

from mars_jax.evaluate.scoring.sandbox import passes

pytest.importorskip("resource")


def test_a_program_passes_that_comes_to_its_end():
    assert passes("import math, collections, typing, re\nassert math.pi > 3\nprint('x' * 100)")
    assert passes("if __name__ == '__main__':\n    assert input is not None")
    assert passes("open('own.txt', 'w').write('x'); assert open('own.txt').read() == 'x'")


@pytest.mark.parametrize(
    "program",
    ["assert False", "def", "1 / 0", "import sys; sys.exit(0)", "import os; os._exit(0)", "input()", "\0"],
)
def test_a_program_that_does_not_come_to_its_end_fails(program):
    assert not passes(program)


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_an_endless_program_is_stopped(program):
    began = time.monotonic()
    assert not passes(program, seconds=2)
    assert time.monotonic() - began < 30  # not 60; a busy machine takes its time to start a process


def test_a_memory_hog_is_stopped():
    assert not passes("x = bytearray(1 << 30)", memory=1 << 29)
    assert not passes("x = []\nwhile True: x.append('y' * (1 << 20))", memory=1 << 29)


def test_files_outside_stay_as_they_are(tmp_path):
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    for attack in (
        f"open({str(outside)!r}, 'w').write('theirs')",
        f"open({str(outside)!r}, 'a').write('theirs')",
        f"import os; os.close(os.open({str(outside)!r}, os.O_RDWR | os.O_TRUNC))",
        f"import pathlib; pathlib.Path({str(outside)!r}).unlink()",
        f"import os; os.rename({str(outside)!r}, 'here')",
        f"import os; os.truncate({str(outside)!r}, 0)",
        f"import os; os.symlink({str(tmp_path)!r}, 'link'); open('link/outside.txt', 'w')",
        f"import os; open({os.path.join('..', '..', str(outside))!r}, 'w')",
        f"import os, shutil; shutil.rmtree({str(tmp_path)!r})",
    ):
        assert not passes(attack), attack
        assert outside.read_text() == "mine"
    assert not passes(f"open({str(tmp_path / 'new.txt')!r}, 'x')")
    assert os.listdir(tmp_path) == ["outside.txt"]


def test_a_large_file_is_stopped():
    assert not passes("open('own.txt', 'w').write('x' * 100_000)", file_bytes=10_000)


@pytest.mark.parametrize(
    "program",
    [
        "import subprocess, sys; subprocess.run([sys.executable, '-c', ''])",
        "import os; os.system('true')",
        "import os; os.fork()",
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import os; os.kill(os.getppid(), 0)",
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
    ],
)
def test_other_processes_and_the_network_are_out_of_reach(program):
    body = f"try:\n    {program}\nexcept PermissionError:\n    pass\nelse:\n    raise AssertionError"
    assert passes(body)


def test_the_environment_stays_here(monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    assert passes("import os; assert 'SECRET_TOKEN' not in os.environ and 'HOME' not in os.environ")


def test_the_verdict_does_not_hang_on_the_order_of_a_set():
    program = "assert list({'a', 'b', 'c', 'd', 'e', 'f'})[0] == %r"
    assert sum(passes(program % letter) for letter in "abcdef") == 1
