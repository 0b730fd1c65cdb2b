"""What is written is on disk before it has its name, old and new never mix, and a full disk gets a sentence."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from mars_jax import hub
from mars_jax.cli import convert as convert_command
from mars_jax.core.errors import MarsError
from mars_jax.hub import durable
from mars_jax.hub.durable import check_place
from mars_jax.models import ModelConfig, Rope, init_params
from tests.helpers import slow_but

CONFIG = ModelConfig(vocab_size=17, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
OTHER = dataclasses.replace(CONFIG, rope=Rope(theta=500.0))  # of the same shapes: a mixture would load


def params(seed: int):
    return init_params(CONFIG, jax.random.key(seed))


class Killed(BaseException):
    """The process ends here."""


def test_files_are_on_disk_before_they_have_their_names(tmp_path, monkeypatch):
    done = []
    fsync, replace, exchange = os.fsync, os.replace, durable.exchange

    def synced(descriptor):
        done.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(source, target):
        inside = [source, *Path(source).glob("*")] if Path(source).is_dir() else [source]
        done.extend(("named", os.stat(path).st_ino) for path in inside)
        replace(source, target)
        done.append(("in", os.stat(Path(target).parent).st_ino))

    def exchanged(one, other):
        done.extend(("named", os.stat(path).st_ino) for path in (one, *one.glob("*")))
        found = exchange(one, other)
        done.append(("in", os.stat(other.parent).st_ino))
        return found

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    monkeypatch.setattr(durable, "exchange", exchanged)
    source = hub.save(tmp_path / "model", CONFIG, params(0))
    hub.save(source, OTHER, params(1), overwrite=True)
    hub.convert(source, tmp_path / "converted")
    named = [(at, inode) for at, (what, inode) in enumerate(done) if what == "named"]
    assert len(named) >= 3 + 2 + 4
    for at, inode in named:
        assert ("sync", inode) in done[:at]
    for at, inode in ((at, inode) for at, (what, inode) in enumerate(done) if what == "in"):
        assert ("sync", inode) in done[at:]


@pytest.mark.parametrize("end", range(12))
def test_where_directories_cannot_change_places_old_and_new_never_mix(tmp_path, monkeypatch, end):
    monkeypatch.setattr(durable, "exchange", lambda one, other: False)
    directory = hub.save(tmp_path / "model", CONFIG, params(0))
    (directory / "notes.txt").write_text("mine")
    calls = 0

    def counted(name):
        true = getattr(os, name)

        def call(*arguments, **more):
            nonlocal calls
            calls += 1
            if calls > end:
                raise Killed
            return true(*arguments, **more)

        return call

    with monkeypatch.context() as patch:
        for name in ("fsync", "replace", "unlink"):
            patch.setattr(os, name, counted(name))
        with contextlib.suppress(Killed):
            hub.save(directory, OTHER, params(1), overwrite=True)
    assert (directory / "notes.txt").read_text() == "mine"
    if not (directory / "config.json").exists():
        with pytest.raises(MarsError, match=r"no readable config\.json"):
            hub.load(directory)
    else:
        found = hub.load(directory)
        seed = {CONFIG: 0, OTHER: 1}[found.config]
        jax.tree.map(np.testing.assert_array_equal, found.params, params(seed))
    hub.save(directory, OTHER, params(1), overwrite=True)
    assert hub.load(directory).config == OTHER


DIES = """
import json, os, sys
from pathlib import Path
import numpy as np
from mars_jax.hub import durable
from mars_jax.hub.save import write_directory

directory, file = Path(sys.argv[1]), "model.safetensors"

def write(value):
    arrays = {"w": np.full(1000, value, np.float32)}
    write_directory(directory, arrays, {"value": value})

def content():
    config = json.loads((directory / "config.json").read_text())
    return config["value"], np.frombuffer((directory / file).read_bytes()[-4:], np.float32)[0]

def dying(call, left):
    def counted(*arguments, **options):
        if not left:
            os._exit(9)
        left.pop()
        return call(*arguments, **options)
    return counted

def kill(at):
    left = [None] * at
    for name in ("fsync", "replace", "link", "unlink", "rmdir", "chmod", "chown"):
        setattr(os, name, dying(getattr(os, name), left))
    durable.exchange = dying(durable.exchange, left)

write(1)
if not durable.exchange(directory, directory):
    sys.exit("no exchange")
(directory / "notes.txt").write_text("mine")
(directory / "more").mkdir()
(directory / "more" / "notes.txt").write_text("mine too")
(directory / "link").symlink_to("nowhere")
found, at = [], 0
while True:
    child = os.fork()
    if not child:
        kill(at)
        write(2)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status in (0, 9), status
    found.append(content())
    assert (directory / "notes.txt").read_text() == "mine" and os.readlink(directory / "link") == "nowhere"
    assert (directory / "more" / "notes.txt").read_text() == "mine too"
    write(1)
    if status == 0:
        break
    at += 1
print(json.dumps([[a, float(b)] for a, b in found]))
"""


def test_a_kill_at_any_step_of_an_overwrite_leaves_the_old_or_the_new(tmp_path):
    command = [sys.executable, "-c", DIES, str(tmp_path / "model")]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.stderr.startswith("no exchange"):
        pytest.skip("directories cannot change places on this file system")
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    # Every step was tried, until one process came through; first the old, from some step on the new.
    assert len(found) > 12 and all(value == weights for value, weights in found)
    values = [value for value, _ in found]
    assert values == sorted(values) and set(values) == {1, 2}


def test_an_overwrite_keeps_what_a_directory_is(tmp_path, monkeypatch):
    """Its mode, and links to it; nothing is left beside it; and a process may write to where it is."""
    directory = hub.save(tmp_path / "model", CONFIG, params(0))
    directory.chmod(0o750)
    (tmp_path / "link").symlink_to("model")
    assert hub.save(tmp_path / "link", OTHER, params(1), overwrite=True) == tmp_path / "link"
    assert hub.load(directory).config == OTHER and directory.stat().st_mode & 0o777 == 0o750
    monkeypatch.chdir(directory)
    hub.save(directory, CONFIG, params(0), overwrite=True)
    assert hub.load(".").config == CONFIG
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "model"]


def test_what_is_written_beside_an_overwrite_is_kept(tmp_path, monkeypatch):
    directory = hub.save(tmp_path / "model", CONFIG, params(0))
    true = durable.exchange

    def exchange(one, other):
        (directory / "later.txt").write_text("mine")
        return true(one, other)

    monkeypatch.setattr(durable, "exchange", exchange)
    hub.save(directory, OTHER, params(1), overwrite=True)
    assert (directory / "later.txt").read_text() == "mine" and hub.load(directory).config == OTHER


def test_the_same_config_stays_while_weights_are_replaced(tmp_path, monkeypatch):
    directory = hub.save(tmp_path / "model", CONFIG, params(0))
    true = os.replace

    def replace(source, target):
        assert (directory / "config.json").exists()
        true(source, target)

    monkeypatch.setattr(os, "replace", replace)
    hub.save(directory, CONFIG, params(1), overwrite=True)
    jax.tree.map(np.testing.assert_array_equal, hub.load(directory).params, params(1))


@pytest.fixture
def nowhere(tmp_path):
    (tmp_path / "file").write_text("mine")
    return [tmp_path / "file" / "x", Path("/proc/mars/x"), Path("/proc/x")]


def test_a_path_that_takes_nothing_is_refused_at_once(tmp_path, nowhere, capsys):
    source = hub.save(tmp_path / "model", CONFIG, params(0))
    for path in nowhere:
        for call in (
            check_place,
            lambda path: hub.save(path, CONFIG, params(0)),
            lambda path: hub.convert(source, path),
            lambda path: hub.convert("/nowhere", path),  # before the source is looked for
        ):
            with pytest.raises(MarsError, match=r"' cannot be written \(.*\): choose another path") as caught:
                call(path)
            assert f"'{path}'" in str(caught.value)
        capsys.readouterr()
        assert convert_command.main([str(source), str(path)]) == 2
        assert capsys.readouterr().err.startswith(f"error: '{path}' cannot be written (")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "model"]


FULL = """
import resource, signal, sys
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import jax
from mars_jax import hub
from mars_jax.core.errors import MarsError
from mars_jax.hub import states
checkpoint = hub.load(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
sys.dont_write_bytecode = True  # Python would keep what is cut short, and no later import could read it
try:
    hub.convert(sys.argv[1], sys.argv[2] + "/converted")
except MarsError as error:
    print(error)
try:
    hub.save(sys.argv[2] + "/saved", checkpoint.config, checkpoint.params)
except MarsError as error:
    print(error)
try:
    states.save_state(sys.argv[2] + "/state", {"cache": jax.random.normal(jax.random.key(0), (40, 40))})
except MarsError as error:
    print(error)
"""


@pytest.mark.parametrize("most", slow_but([1, 3000], 3000))
def test_a_disk_that_takes_no_more_gets_a_sentence_and_nothing_is_left(tmp_path, most):
    source = hub.save(tmp_path / "model", CONFIG, params(0))
    (tmp_path / "to").mkdir()
    arguments = [sys.executable, "-c", FULL, str(source), str(tmp_path / "to"), str(most)]
    done = subprocess.run(arguments, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    ending = "File too large; make room, or choose another path."
    names = ("converted", "saved", "state")
    assert done.stdout.splitlines() == [f"cannot write to '{tmp_path}/to/{name}': {ending}" for name in names]
    assert os.listdir(tmp_path / "to") == []
