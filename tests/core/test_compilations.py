"""The cache of compiled programs on disk, which later processes reuse."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import sys, jax, mars_jax as mj
jax.jit(lambda x: x * 2 + 1)(3.0)  # a notebook that has compiled already
print(mj.enable_compilation_cache(sys.argv[1] if len(sys.argv) > 1 else None))
jax.jit(lambda x: x @ x.T)(jax.numpy.ones((8, 8))).block_until_ready()
"""
WITHOUT_HOME = """
import pwd, jax, mars_jax
from mars_jax.cli.program import keep_compilations
pwd.getpwuid = {}.__getitem__
keep_compilations()
print(jax.config.jax_compilation_cache_dir)
try:
    mars_jax.enable_compilation_cache()
except mars_jax.MarsError as error:
    print(error)
"""


def run(code, *args, cwd=None, **env):
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMP", "JAX_PERS", "XLA_", "HOME", "XDG_CACHE"))
    }
    command = [sys.executable, "-c", code, *args]
    process = subprocess.run(command, capture_output=True, text=True, env=inherited | env, cwd=cwd)
    assert process.returncode == 0, process.stderr
    return process.stdout.strip()


@pytest.mark.slow
def test_programs_compiled_from_now_on_are_kept(tmp_path):
    """Enable the cache after a first compilation, in the folder of the argument or of JAX's variable."""
    assert run(CODE, str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert any((tmp_path / "mine").iterdir())
    folder = run(CODE, XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "set"))
    assert folder == str(tmp_path / "set") and any((tmp_path / "set").iterdir())


def test_a_command_without_a_home_keeps_no_compilations(tmp_path):
    sentence = "no home folder to keep compilations in: give a path, or set XDG_CACHE_HOME."
    source = str(Path(__file__).parents[2])
    assert run(WITHOUT_HOME, cwd=tmp_path, PYTHONPATH=source).splitlines() == ["None", sentence]
    assert not any(tmp_path.iterdir())
