"""Compiled programs that are kept on disk for later processes."""

import os
import subprocess
import sys

import pytest

CODE = """
import sys, jax, mars_jax as mj
jax.jit(lambda x: x * 2 + 1)(3.0)  # a notebook that has compiled already
print(mj.enable_compilation_cache(sys.argv[1] if len(sys.argv) > 1 else None))
jax.jit(lambda x: x @ x.T)(jax.numpy.ones((8, 8))).block_until_ready()
"""


def run(*args, **env):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_COMP", "JAX_PERS", "XLA_"))
    }
    done = subprocess.run(
        [sys.executable, "-c", CODE, *args], capture_output=True, text=True, env=clean | env
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.slow
def test_programs_compiled_from_now_on_are_kept(tmp_path):
    """The process has compiled before. The folder is the argument, or the one that JAX's variable sets."""
    assert run(str(tmp_path / "mine")) == str(tmp_path / "mine")
    assert any((tmp_path / "mine").iterdir())
    told = run(XDG_CACHE_HOME=str(tmp_path), JAX_COMPILATION_CACHE_DIR=str(tmp_path / "told"))
    assert told == str(tmp_path / "told") and any((tmp_path / "told").iterdir())
