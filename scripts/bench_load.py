"""Host memory that loading and converting a checkpoint take, beside the arrays that they make.

    python scripts/bench_load.py --output scripts/results/bench_load.json

A checkpoint with random weights is generated (llama, bfloat16, several files), and read in a fresh process for each
case. On CPU the devices' memory is the host's: what counts is the process's anonymous memory (VmRSS less the pages of
mapped files, which are the kernel's to drop; the loader maps none), less what it was before, less the arrays that are
on the devices already, at its highest of all times, sampled every 2 ms. The bar is twice the largest tensor and 1 GB.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

CASES = {
    "load": {},
    "load on model=8": {"mesh": "model=8"},
    "load in float32": {"dtype": "float32"},
    "load in int8 on data=2,model=4": {"mesh": "data=2,model=4", "dtype": "int8"},
    "convert": {"convert": True},
    "load the conversion on model=8": {"mesh": "model=8", "converted": True},
}
GB = 10**9


def generate(directory: Path, gigabytes: float) -> None:
    """A llama checkpoint of about that size, in files of half a GB."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    from mars_jax.hub.config_json import to_json
    from mars_jax.models import ModelConfig
    from mars_jax.models.weights import weights

    def config(layers: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_layers=layers, num_heads=32,
            num_kv_heads=8, norm_eps=1e-5,
        )  # fmt: skip

    def size(layers: int) -> int:
        return sum(2 * int(np.prod(row.shape)) for row in weights(config(layers)))

    layers = max(1, round((gigabytes * GB - size(0 + 1) + size(2) - size(1)) / (size(2) - size(1))))
    noise = np.random.default_rng(0).standard_normal(1 << 20, np.float32).astype(ml_dtypes.bfloat16)
    files: list[dict[str, np.ndarray]] = [{}]
    where = {}

    def flush() -> None:
        name = f"model-{len(where):05}.safetensors"
        save_file(files[0], directory / name)
        where.update(dict.fromkeys(files[0], name))
        files[0] = {}

    for row in weights(config(layers)):
        files[0][row.name] = np.resize(noise, row.shape)
        if sum(x.nbytes for x in files[0].values()) > GB // 2:
            flush()
    flush()
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (directory / "config.json").write_text(json.dumps(to_json(config(layers), dtype="bfloat16")))


def anonymous() -> int:
    """Bytes of this process's memory that are not of mapped files."""
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file if line.startswith(("RssAnon", "RssShmem")))
    return sum(int(value.split()[0]) for value in lines.values()) * 1024


def measure(case: dict, checkpoint: str, converted: str) -> dict:
    """One case, in this process."""
    import jax

    from mars_jax import hub
    from mars_jax.core import mesh
    from mars_jax.placement import shardings as sharding

    load: Any = importlib.import_module("mars_jax.hub.load")  # the package has a function of that name

    if "mesh" in case:
        shardings = sharding.params_shardings(hub.read_config(checkpoint), mesh.parse_mesh(case["mesh"]))
    else:
        shardings = None
    jax.block_until_ready(jax.numpy.zeros(()))
    placed, real = [0], load.to_params

    def of(tree) -> int:
        return sum(shard.data.nbytes for x in jax.tree.leaves(tree) for shard in x.addressable_shards)

    def to_params(*args):
        made = jax.block_until_ready(real(*args))
        placed[0] += of(made)
        return made

    load.to_params = to_params
    before, highest, stop = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not stop.is_set():
            highest[0] = max(highest[0], anonymous() - before - placed[0])
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    if case.get("convert"):
        hub.convert(checkpoint, converted)
        params = ()
    else:
        source = converted if case.get("converted") else checkpoint
        params = hub.load(source, dtype=case.get("dtype"), shardings=shardings).params
    stop.set()
    thread.join()
    if case.get("converted"):  # Orbax places the arrays itself: only the end can be told
        highest[0] = max(0, highest[0] - of(params))
    return {"host_bytes": highest[0], "device_bytes": of(params)}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=4.0, help="of the checkpoint (default 4)")
    parser.add_argument("--folder", help="where to put it (default: a temporary one); what is there is used")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--output", type=Path, help="write the raw JSON here")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        folder = Path(arguments.folder)
        made = measure(CASES[arguments.case], str(folder / "checkpoint"), str(folder / "converted"))
        print(json.dumps(made))
        return 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        if not (folder / "checkpoint").exists():
            (folder / "checkpoint").mkdir(parents=True)
            generate(folder / "checkpoint", arguments.gigabytes)
        report = run(folder, arguments.only)
    if arguments.output:
        arguments.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if all(row["host_bytes"] <= row["bar_bytes"] for row in report["results"]) else 1


def run(folder: Path, only: str = "") -> dict:
    """The cases, each in a process of its own with 8 CPU devices."""
    import jax
    import numpy as np

    from mars_jax.hub.files import tensors

    checkpoint = folder / "checkpoint"
    sizes = [2 * int(np.prod(t.shape)) for file in tensors(checkpoint) for t in file.values()]
    results = []
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    for name in CASES:
        if only not in name:
            continue
        arguments = [sys.executable, __file__, "--case", name, "--folder", str(folder)]
        done = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, check=True, text=True)
        row = {"case": name, "bar_bytes": 2 * max(sizes) + GB} | json.loads(done.stdout.splitlines()[-1])
        results.append(row)
        print(f"{name}: {row['host_bytes'] / GB:.2f} GB (bar {row['bar_bytes'] / GB:.2f})", file=sys.stderr)
    return {
        "command": "python " + " ".join(sys.argv),
        "machine": {"processor": platform.machine(), "cores": os.cpu_count(), "jax": jax.__version__},
        "checkpoint_bytes": sum(sizes),
        "largest_tensor_bytes": max(sizes),
        "results": results,
    }


if __name__ == "__main__":
    sys.exit(main())
