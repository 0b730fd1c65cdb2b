"""Unknown users, and users without a home folder."""

import os
import pwd
import subprocess
import sys

import pytest

from mars_jax.cli import commands
from mars_jax.cli.generate.line_editor import editing

NOBODY = "~no-such-user/model"


@pytest.mark.parametrize(
    "argv",
    [
        ("generate", "--target", NOBODY, "hello"),
        ("generate", "--draft", f"medusa:{NOBODY}", "hello"),
        ("convert", "tiny/target", NOBODY),
        ("convert", NOBODY, "{folder}/made"),
    ],
    ids=" ".join,
)
def test_the_home_of_an_unknown_user_gets_one_sentence(argv, tmp_path, capsys):
    assert commands.main([arg.format(folder=tmp_path) for arg in argv]) == 2
    told = f"error: '{NOBODY}' begins with ~no-such-user, and no home folder is known for that: give the whole path.\n"
    assert capsys.readouterr() == ("", told)
    assert not any(tmp_path.iterdir())


@pytest.fixture
def homeless(monkeypatch, tmp_path):
    """Simulate a process without HOME, whose user is not in the user database, as in many containers."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_home_nothing_is_kept_and_no_folder_is_called_tilde(homeless):
    with editing(sys.stderr, ()):
        pass
    assert not any(homeless.iterdir())


def test_a_command_without_a_home_keeps_no_compilations(homeless):
    code = "import pwd; del pwd.getpwuid; pwd.getpwuid = {}.__getitem__\n"
    code += "from mars_jax.cli.program import keep_compilations; import jax; keep_compilations()\n"
    code += "print(jax.config.jax_compilation_cache_dir)\n"
    code += "import mars_jax\ntry: mars_jax.enable_compilation_cache()\n"
    code += "except mars_jax.MarsError as error: print(error)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMP")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=clean)
    assert found.returncode == 0, found.stderr
    said = "there is no home folder to keep compilations in: give a path, or set XDG_CACHE_HOME."
    assert found.stdout.splitlines() == ["None", said]
    assert not any(homeless.iterdir())
