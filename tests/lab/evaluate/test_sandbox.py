"""Generated programs: what passes, what the limits stop, and what no program gets, in every mode of this machine."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from mars_jax.core.errors import MarsError
from mars_jax.lab.evaluate.scoring import sandbox, scores, walls
from mars_jax.lab.evaluate.tasks.problems import Code, Problem
from tests.lab.evaluate import attacks
from tests.lab.evaluate.honest import HONEST, WITHOUT_WALLS

pytest.importorskip("resource")
ROOT = str(Path(__file__).parents[3]) + os.sep
PACKAGES = ["mars_jax", "mars_jax.core", "mars_jax.lab.evaluate"]
MODES = {candidate.name: candidate for candidate in walls.ALL}


def works(candidate):
    return sandbox._run("import os; os.makedirs('a/b')", candidate, seconds=10)


@pytest.fixture(scope="module", params=[*MODES, sandbox.HOOK])
def mode(request):
    candidate = MODES.get(request.param)
    if candidate is not None and not works(candidate):
        pytest.skip(f"no {request.param} on this machine")
    return candidate


@pytest.fixture
def confined(mode):
    if mode is None:
        pytest.skip("the hook does not promise it")
    return mode


@pytest.fixture
def passes(mode):
    return lambda program, **limits: sandbox._run(program, mode, **{"seconds": 10} | limits)


@pytest.fixture
def outside(tmp_path):
    (tmp_path / "outside.txt").write_text("mine")
    return tmp_path


# What a program may do.


def honest(mode):
    return HONEST | (WITHOUT_WALLS if mode is None else {})


def test_honest_programs_pass_one_after_the_other(passes, mode):
    """One process for all of them; which one is to blame says the next test, alone."""
    assert passes("\n".join(honest(mode).values()), seconds=60)


@pytest.mark.slow
@pytest.mark.parametrize("name", HONEST)
def test_an_honest_program_passes(passes, mode, name):
    assert passes(honest(mode)[name])


@pytest.mark.parametrize(
    "program",
    [
        "assert False",
        "def",
        "1 / 0",
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "input()",
        "\0",
        "if __name__ == '__main__':\n    exit(1)",
        "if __name__ == '__main__':\n    exit(0)\nassert False",
    ],
)
def test_a_program_that_does_not_come_to_its_end_fails(passes, program):
    assert not passes(program)


def test_a_long_program_passes(passes):
    assert passes("x = 1\n" * 20_000)  # more than a pipe holds
    assert not passes("x = 1\n" * 20_000 + "assert False")


def test_the_verdict_does_not_hang_on_the_order_of_a_set(passes):
    program = "assert list({'a', 'b', 'c', 'd', 'e', 'f'})[0] == %r"
    assert sum(passes(program % letter) for letter in "abcdef") == 1


# Bounds.


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
def test_an_endless_program_is_stopped(passes, program):
    assert not passes(program, seconds=1)  # the second one passes where it is let come to its end


def test_a_memory_hog_is_stopped(passes):
    assert not passes("x = bytearray(1 << 28)", memory=1 << 28)
    assert not passes("x = []\nwhile True: x.append('y' * (1 << 20))", memory=1 << 28)


def test_a_large_file_is_stopped(passes):
    assert not passes("open('own.txt', 'w').write('x' * 100_000)", file_bytes=10_000)


def test_many_files_are_stopped(confined, passes):
    program = "for i in range(80):\n    open(str(i), 'w').write('x' * (1 << 20))"
    if confined.name == "bubblewrap" and not walls._sized("bwrap"):
        pytest.skip("this bubblewrap is too old to bound a folder")
    assert not passes(program) and passes(program.replace("80", "40"))


def test_many_processes_are_stopped(confined, passes):
    program = """
import ctypes, os, time
c, started = ctypes.CDLL(None), 0
while started < 200:
    child = c.fork()
    if child == 0:
        time.sleep(30)
        c._exit(0)
    if child < 0:
        break
    started += 1
assert 0 < started <= %d, started
"""
    assert passes(program % sandbox.PROCESSES)


# What no program gets.


EACH = """
ended = []
for name, source in {programs!r}.items():
    try:
        exec(source, {{"__name__": "__main__"}})
    except Exception:
        continue
    ended.append(name)
"""
"""Attacks one after the other, in one process."""


@pytest.mark.parametrize(
    "names",
    [list(attacks.WRITES), *(pytest.param([name], marks=pytest.mark.slow) for name in attacks.WRITES)],
    ids=lambda names: names[0] if len(names) == 1 else "all",
)
def test_nothing_outside_is_written(passes, outside, names):
    # The folder of the program and `outside` may have a parent in common.
    near = Path(tempfile.gettempdir()) / f"mars-jax-near-{random.randrange(1 << 62)}"
    near.mkdir()
    programs = {name: attacks.WRITES[name].format(outside=outside, name=near.name) for name in names}
    try:
        if len(names) == 1:
            passes(programs[names[0]])
        else:
            assert passes(EACH.format(programs=programs))  # so each was tried
        assert os.listdir(near) == []
    finally:
        for file in near.iterdir():
            file.unlink()
        near.rmdir()
    assert os.listdir(outside) == ["outside.txt"]
    assert (outside / "outside.txt").read_text() == "mine"


def test_nothing_outside_is_seen(passes, outside):
    home = str(Path.home())
    # Python itself may be installed there.
    known = {
        "",
        *(os.path.relpath(path, home).split(os.sep)[0] for path in walls.visible() if path.startswith(home)),
    }
    programs = {
        name: program.format(outside=outside, home=home, known=known, pid=os.getpid())
        for name, program in attacks.SEES.items()
    }
    assert passes(EACH.format(programs=programs) + "assert not ended, ended")


@pytest.mark.parametrize("name", attacks.FORGES)
def test_no_pass_is_forged(passes, name):
    assert not passes(attacks.FORGES[name])


def running(mark):
    """Processes with a word among their arguments."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def gone(mark, seconds=5.0):
    """Whether they end; the kernel takes a moment to bury them."""
    until = time.monotonic() + seconds
    while running(mark) and time.monotonic() < until:
        time.sleep(0.05)
    left = running(mark)
    for number in left:
        os.kill(number, signal.SIGKILL)
    return not left


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="needs Linux's list of processes")
@pytest.mark.parametrize("name", attacks.OUTLIVES)
def test_nothing_outlives_the_verdict(passes, name):
    mark = f"300.{random.randrange(10**9)}"
    passes(attacks.OUTLIVES[name].format(seconds=mark), seconds=1)
    assert gone(mark)


@pytest.mark.skipif(not os.path.exists("/proc/self/cmdline"), reason="needs Linux's list of processes")
@pytest.mark.slow
def test_nothing_outlives_this_process(mode, tmp_path):
    """Killed, it can end no group: walls fall with it, and without walls the bound on time does it."""
    mark = "program of a parent that was killed"
    deaf = "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\n"
    program = f"{deaf if mode else ''}import time; time.sleep(300)"
    code = (
        f"import sys, types\nfor name in {PACKAGES}:\n    sys.modules[name] = types.ModuleType(name)\n"
        f"    sys.modules[name].__path__ = [{ROOT!r} + name.replace('.', '/')]\n"  # without jax
        "from mars_jax.lab.evaluate.scoring import sandbox, walls\n"
        f"walls.interpreter = lambda old=walls.interpreter: [*old(), '-X', {mark!r}]\n"
        f"chosen = {{w.name: w for w in walls.ALL}}.get({mode and mode.name!r})\n"
        f"sandbox._run({program!r}, chosen, seconds=3)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        until = time.monotonic() + 60
        while not running(mark) and time.monotonic() < until:
            time.sleep(0.05)
        assert running(mark)
    finally:
        parent.kill()
        parent.wait()
    assert gone(mark, 10)


@pytest.mark.parametrize("name", attacks.CONNECTS)
def test_the_network_is_out_of_reach(passes, name):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        passes(attacks.CONNECTS[name].format(port=port, swapped=socket.htons(port)))
        with pytest.raises(TimeoutError):
            server.accept()


REFUSED = [
    "import subprocess, sys; subprocess.run([sys.executable, '-c', ''])",
    "import os; os.system('true')",
    "import os; os.fork()",
    "import socket; socket.create_connection(('127.0.0.1', 9))",
    "import os; os.kill(os.getppid(), 0)",
    "import resource; resource.setrlimit(resource.RLIMIT_CPU, (9, 9))",
    "import gc; gc.get_objects()",
    "import sys; sys.settrace(print)",
    "import sys; sys.setprofile(print)",
]


def test_what_is_refused_says_so(passes):
    body = "try:\n    {}\nexcept PermissionError:\n    pass\nelse:\n    raise AssertionError"
    assert passes("\n".join(body.format(program) for program in REFUSED))


def test_the_environment_stays_here(passes, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "hush")
    home = str(Path.home())
    assert passes(f"import os; assert 'SECRET_TOKEN' not in os.environ and os.environ['HOME'] != {home!r}")


def test_nothing_but_the_folder_can_be_written_behind_walls(confined, passes):
    program = """
import ctypes, os, sys
folders = ['/', '/usr', '/usr/lib', '/etc', '/dev', '/dev/shm', '/home', '/proc', '/run', '/var', '/var/tmp']
folders += [sys.prefix, sys.base_prefix, os.path.dirname(os.__file__), os.path.dirname(sys.executable)]
def refused():
    for folder in folders:
        try:
            open(folder + '/new', 'w')
        except OSError:
            continue
        raise SystemExit(folder)
refused()
c = ctypes.CDLL(None)
REMOUNT, BIND = 32, 4096
def mounts():
    for folder in (b'/', b'/usr', b'/usr/lib', b'/dev'):
        assert c.mount(None, folder, None, ctypes.c_ulong(REMOUNT | BIND), None) != 0, folder
        assert c.umount2(folder, 2) != 0, folder
mounts()
assert os.getuid() != 0 and c.setuid(0) != 0 or c.chroot(b'/usr') != 0
c.unshare(0x10000000 | 0x00020000)  # users and mounts, where the kernel lets it
mounts()
refused()
"""
    assert passes(program)


def test_a_program_is_alone_behind_walls(confined, passes):
    assert passes(
        "import os\nassert os.getpid() < 10 and not os.path.exists('/proc')\n"
        f"import ctypes\nassert ctypes.CDLL(None).kill({os.getpid()}, 0) != 0"
    )


def test_keyrings_are_out_of_reach_behind_walls(confined, passes):
    """By number: the C library has no functions of these names. -3 is the keyring of the session."""
    calls = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}.get(os.uname().machine)
    if calls is None:
        pytest.skip("the numbers of this machine's system calls are not listed here")
    add, request, control = calls
    program = f"""
import ctypes, errno
c = ctypes.CDLL(None, use_errno=True)
for call in ({add}, b"user", b"mars", b"x", 1, -3), ({request}, b"user", b"mars", None, 0), ({control}, 0, -3, 0):
    assert c.syscall(*call) == -1 and ctypes.get_errno() == errno.EPERM
assert c.getppid() >= 0
"""
    assert passes(program)


# Machines without walls.


@pytest.fixture
def without(monkeypatch):
    """Sets what a machine offers."""

    def offer(*candidates):
        monkeypatch.setattr(walls, "ALL", candidates)
        sandbox._walls.cache_clear()

    yield offer
    sandbox._walls.cache_clear()


NOTHING = walls.Walls("bubblewrap", lambda folder: None), walls.Walls("unshare", lambda folder: None)
FORBIDDEN = (
    walls.Walls("bubblewrap", lambda folder: ["/bin/false"]),
    MODES["unshare"],  # which is not used where bubblewrap is installed
)


@pytest.mark.parametrize(
    ("offered", "cure"),
    [
        (NOTHING, r"install bubblewrap \(apt-get install bubblewrap"),
        (FORBIDDEN, "sysctl -w kernel.unprivileged"),
    ],
)
def test_without_walls_code_is_refused_with_the_cure(without, offered, cure):
    without(*offered)
    problem = Problem(task="t", id="0", turns=("",), metric="pass@1", code=Code("", "", ""))
    for call in (
        sandbox.confinement,
        lambda: sandbox.passes("pass"),
        lambda: scores.score(problem, "pass", run_code=True),
        lambda: scores.check_metrics([problem], run_code=True),
    ):
        with pytest.raises(MarsError, match=f"{cure}.*or add --allow-unconfined-code") as caught:
            call()
        assert str(caught.value).count(". ") == 0 and str(caught.value).endswith(".")


def test_without_walls_the_second_flag_accepts_the_hook(without):
    without(*NOTHING)
    assert sandbox.confinement(unconfined=True) == sandbox.HOOK
    assert sandbox.passes("import os; os.mkdir('a')", unconfined=True)
    assert not sandbox.passes("open('/etc/hostname')", unconfined=True)


def test_what_is_not_installed_is_not_used(monkeypatch):
    monkeypatch.setattr(walls.shutil, "which", lambda name: None)
    assert [candidate.command("") for candidate in walls.ALL] == [None, None]


def test_walls_are_used_where_they_are_also_with_the_second_flag(without, mode):
    if mode is None:
        pytest.skip("about walls")
    without(mode)
    assert sandbox.confinement() == sandbox.confinement(unconfined=True) == mode.name
    assert sandbox.passes(
        "import os; assert os.getpid() < 10 and os.getcwd().startswith('/tmp')", unconfined=True
    )


def test_a_machine_is_asked_once(without):
    asked = []
    without(walls.Walls("bubblewrap", lambda folder: asked.append(folder)))
    for _ in range(3):
        sandbox.confinement(unconfined=True)
    before = len(asked)
    sandbox.confinement(unconfined=True)
    assert len(asked) == before


def test_the_folders_that_are_seen_hold_no_home(monkeypatch):
    seen = walls.visible()
    assert "/usr" in seen
    for folder in seen:
        assert not Path.home().is_relative_to(folder), folder
    monkeypatch.setattr(sys, "prefix", str(Path.home()))
    assert str(Path.home()) not in walls.visible()
