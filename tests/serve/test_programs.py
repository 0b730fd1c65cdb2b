"""Programs that later processes load without tracing: same output, and a key that describes them completely."""

import dataclasses
import os
import pickle
import subprocess
import sys

import pytest

from mars_jax.models import ModelConfig, language_model
from mars_jax.serve.programs import description

CODE = """
import mars_jax as mj
from mars_jax.cli.program import keep_compilations
from mars_jax.serve import programs
programs._RECENT, compiled, compile_program = 0, [], programs._compile
programs._compile = lambda key, *args: compiled.append(key) or compile_program(key, *args)
keep_compilations()
output = mj.generate(mj.load(), "none", ["The sea"], max_new_tokens=8)
print(len(compiled), output.text)
"""
CONFIG = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)


def run(cache, **env):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMP", "JAX_PERS", "XLA_"))}
    command = [sys.executable, "-c", CODE]
    env = inherited | env | {"XDG_CACHE_HOME": str(cache)}
    output = subprocess.run(command, capture_output=True, text=True, env=env, check=True).stdout
    num_compiled, _, text = output.partition(" ")
    return int(num_compiled), text


@pytest.mark.slow
def test_a_second_process_compiles_nothing_and_writes_the_same(tmp_path):
    num_compiled, text = run(tmp_path)
    assert num_compiled == 2  # prefill and steps
    assert run(tmp_path) == (0, text)
    # A damaged file is compiled again, and so is a program under other settings.
    damaged, *_ = (tmp_path / "mars_jax" / "compiled" / "programs").iterdir()
    damaged.write_bytes(damaged.read_bytes()[:-100])
    assert run(tmp_path) == (1, text)
    assert run(tmp_path, JAX_DEFAULT_MATMUL_PRECISION="highest")[0] == 2


def test_a_description_covers_what_functions_close_over():
    model = language_model(CONFIG)
    assert description(model) == description(language_model(dataclasses.replace(CONFIG)))
    assert description(model) != description(language_model(dataclasses.replace(CONFIG, norm_eps=1e-3)))
    assert description(model) != description(language_model(CONFIG, attention="xla"))
    with pytest.raises(pickle.PicklingError, match="is not part of the key"):
        description(model._replace(unembed=lambda params, hidden: hidden))
