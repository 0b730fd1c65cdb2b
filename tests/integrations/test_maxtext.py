"""Test that a checkpoint trained and exported by MaxText as documented decodes like MaxText's forward pass."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import write_checkpoint

ROOT = Path(__file__).parents[2]
TINY = (
    "override_model_config=true base_emb_dim=64 base_num_query_heads=4 base_num_kv_heads=2 base_mlp_dim=128 "
    "base_num_decoder_layers=2 head_dim=16 vocab_size=256 max_target_length=64 per_device_batch_size=2 "
    "attention=dot_product dtype=float32 hardware=cpu skip_jax_distributed_system=true"
)
FORWARD = """
import json, sys
import jax
import jax.numpy as jnp
from maxtext.configs import pyconfig
from maxtext.utils.model_creation_utils import from_pretrained
import mars_jax as mj

loaded = from_pretrained(pyconfig.initialize(["", *sys.argv[1:]]))
maxtext_model = loaded[0] if isinstance(loaded, tuple) else loaded
target = mj.load("exported", dtype="float32")
prompts = [[3, 1, 4, 1, 5, 9, 2, 6], [7, 8]]
tokens = mj.generate(target, "ngram", prompts, max_new_tokens=24).tokens
greedy, gap = [], 0.0
for prompt, new in zip(prompts, tokens):
    ids = jnp.asarray([prompt + list(new)])
    positions, ones = jnp.arange(ids.shape[1])[None], jnp.ones_like(ids)
    logits = maxtext_model(ids, positions, decoder_segment_ids=ones, enable_dropout=False)[0]
    greedy.append(logits[len(prompt) - 1 : -1].argmax(-1).tolist())
    log_p = jax.nn.log_softmax(logits)[jnp.arange(ids.shape[1] - 1), ids[0, 1:]]
    gap = max(gap, float(abs(log_p - mj.score(target, ids.tolist())[0].log_p).max()))
print(json.dumps({"tokens": [list(map(int, new)) for new in tokens], "greedy": greedy, "gap": gap}))
"""


@pytest.mark.slow
def test_a_checkpoint_of_maxtext_decodes_as_its_own_forward_says(tmp_path):
    # Not `importorskip`: MaxText supports only Python 3.12.
    if importlib.util.find_spec("maxtext") is None:
        pytest.skip("could not import 'maxtext': pip install maxtext")
    page = (ROOT / "docs" / "bridges.md").read_text().partition("## MaxText checkpoints")[2]
    [_, model, train, export, generate] = re.findall(
        r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL
    )[0].replace("\\\n", "").splitlines()  # fmt: skip
    write_checkpoint(tmp_path / "tokenizer", seed=0)
    model = model.replace('"model_name', f'"{TINY} model_name')
    export = export.replace("TOKENIZER", f"{tmp_path / 'tokenizer'} --override_model_architecture")
    generate = generate.replace("mars-jax", "python -m mars_jax") + " --max-new-tokens 8"
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    env["DECOUPLE_GCLOUD"] = "TRUE"
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
    (tmp_path / "forward.py").write_text(FORWARD)
    loads = "load_parameters_path=$PWD/trained/mine/checkpoints/2/items base_output_directory=$PWD/read"
    lines = ["set -e", model, train, export, generate]
    lines += [f"python forward.py $MODEL {loads} | tail -n 1 > comparison.json"]
    process = subprocess.run(
        ["bash", "-o", "pipefail", "-c", "\n".join(lines)],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr[-3000:] + process.stdout[-1000:]
    comparison = json.loads((tmp_path / "comparison.json").read_text())
    assert comparison["tokens"] == comparison["greedy"] and len({*comparison["tokens"][0]}) > 4
    assert comparison["gap"] < 1e-5
