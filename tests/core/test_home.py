"""Unknown users, and users without a home folder."""

import pwd
import sys

import pytest

from mars_jax.cli import commands
from mars_jax.cli.generate.repl import editing

NOBODY = "~no-such-user/model"


@pytest.mark.parametrize(
    "argv",
    [
        ("generate", "--draft", f"medusa:{NOBODY}", "hello"),
        ("convert", "tiny/target", NOBODY),
        ("convert", NOBODY, "{folder}/made"),
    ],
    ids=" ".join,
)
def test_the_home_of_an_unknown_user_gets_one_sentence(argv, tmp_path, capsys):
    assert commands.main([arg.format(folder=tmp_path) for arg in argv]) == 2
    text = f"error: '{NOBODY}' begins with ~no-such-user, and no home folder is known for that: give the whole path.\n"
    assert capsys.readouterr() == ("", text)
    assert not any(tmp_path.iterdir())


def test_without_a_home_nothing_is_kept_and_no_folder_is_called_tilde(monkeypatch, tmp_path):
    """Simulate a process without HOME, whose user is not in the user database, as in many containers."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with editing(sys.stderr, ()):
        pass
    assert not any(tmp_path.iterdir())
