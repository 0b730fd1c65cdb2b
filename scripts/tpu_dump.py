"""Compile one decode loop for a TPU slice and leave its optimised HLO, and what the compiler said of it, in a folder.

    LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR ..." python scripts/tpu_dump.py --draft tree --layers 2 DIR

scripts/tpu_cost.py starts it, once for each program: libtpu takes its flags when it is loaded. It imports of mars_jax
what old checkouts have too, so that before and after are judged by the same tool; put the checkout on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import Mesh

from mars_jax import verify
from mars_jax.models import transformer
from mars_jax.planning.chips import topology
from mars_jax.planning.models import CONFIGS, eagle3

try:
    from mars_jax.core.decode import speculative_decoder
    from mars_jax.core.types import Params
    from mars_jax.placement import shardings
    from mars_jax.planning import fit
except ImportError:  # up to commit e8fc8ba
    from mars_jax.decode import speculative_decoder  # pyright: ignore
    from mars_jax.types import Params  # pyright: ignore

    from mars_jax import sharding as shardings  # pyright: ignore
    from mars_jax.planning import plan as fit  # pyright: ignore


def draft_of(kind: str, config: Any) -> Any:
    """The kinds: none, tree (EAGLE-3, dynamic, 60 nodes) and chain-K (EAGLE-3, K tokens)."""
    if kind == "none":
        return fit.draft_of("none")
    length = int(kind.partition("-")[2]) if kind.startswith("chain-") else None
    return fit.draft_of(eagle3(config), num_draft_tokens=length)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(CONFIGS))
    parser.add_argument("--draft", default="none", help="none, tree or chain-K")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()

    where, full = topology(asked.topology), CONFIGS[asked.model]
    config = dataclasses.replace(full, num_layers=asked.layers, windows=full.windows[: asked.layers])
    mesh = Mesh(np.array(where.devices), ("model",))
    draft, rule = draft_of(asked.draft, config), verify.mars()
    model = transformer.language_model(config, dtype="bfloat16")

    def placed(config: Any) -> Any:
        places = shardings.params_shardings(config, mesh)
        return shardings.abstract_params(config, "bfloat16", int8=False, shardings=places)

    params = Params(target=placed(config))
    if draft.config is not None:
        params = params._replace(draft=placed(draft.config))
    drafter = draft.make(model)
    decoder = speculative_decoder(model, drafter, rule)
    rules = [rule] if "rule" in inspect.signature(fit.lower_loop).parameters else []
    lower_loop: Any = fit.lower_loop  # of whichever commit is imported
    _, lowered = lower_loop(decoder, params, *rules, mesh, batch=asked.batch, context=asked.context)
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    asked.folder.mkdir(parents=True, exist_ok=True)
    (asked.folder / "hlo.txt").write_text(compiled.as_text())
    memory = compiled.memory_analysis()
    told = {
        "layers": full.num_layers,
        "nodes": drafter.num_nodes,
        "max_depth": drafter.max_depth,
        "compile_seconds": round(seconds, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "jax": jax.__version__,
    }
    (asked.folder / "meta.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
