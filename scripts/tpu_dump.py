"""Compile one decode loop for a TPU slice and leave its optimised HLO, and what the compiler said of it, in a folder.

    LIBTPU_INIT_ARGS="--xla_jf_dump_to=DIR ..." python scripts/tpu_dump.py --draft tree DIR

scripts/tpu_cost.py starts it, once for each program: libtpu takes its flags when it is loaded. Another checkout, from
3c5a038 on, is judged by the same tool: put it on PYTHONPATH.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import common

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import numpy as np
from jax.sharding import Mesh

from mars_jax import verify
from mars_jax.contrib.models.dflash_head import DFlashConfig
from mars_jax.core.decode import speculative_decoder
from mars_jax.core.decoder import Decoder
from mars_jax.core.guide import Guides, Narrow, Tables, Tracked
from mars_jax.core.prefill import chunk_of
from mars_jax.core.types import Params, Prompts
from mars_jax.lab.planning import fit
from mars_jax.lab.planning.chips import topology
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.models import transformer
from mars_jax.models.eagle_head import EagleConfig
from mars_jax.placement import shardings


def draft_of(kind: str, config: Any) -> Any:
    """The kinds: none, tree (EAGLE-3, dynamic, 60 nodes), chain-K (EAGLE-3, K tokens), dflash (a block of 16, a tree of
    60 nodes), dflash-int8 (its matrices in 8 bits), dflash-chain (all of the block), and small-K (Llama-3.2-1B, K
    tokens); prefill drafts nothing."""
    if kind in ("none", "prefill"):
        return fit.draft_of("none")
    if kind.startswith("dflash"):
        head = DFlashConfig.outline(config)
        return fit.draft_of(head, num_draft_tokens=head.drafts if kind == "dflash-chain" else None)
    length = int(kind.partition("-")[2]) if kind.startswith(("chain-", "small-")) else None
    if kind.startswith("small-"):
        return fit.draft_of(CONFIGS["llama-3.2-1b"], num_draft_tokens=length)
    return fit.draft_of(EagleConfig.outline(config), num_draft_tokens=length)


def lower_prefill(decoder: Any, params: Any, rule: Any, mesh: Mesh, batch: int, context: int) -> Any:
    """`Decoder.init` of prompts that fill the context. Its loop, over chunks, is what is read for a step."""
    from mars_jax.core.controls import make_controls
    from mars_jax.core.types import keys_from_seeds

    def start(params: Any, prompts: Any, lengths: Any) -> Any:
        keys = keys_from_seeds(jax.numpy.arange(batch, dtype=jax.numpy.uint32))
        return decoder.init(
            params, Prompts(prompts, lengths, make_controls(batch, limit=context), rule, keys)
        )

    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    given = (
        jax.ShapeDtypeStruct((batch, context), "int32", sharding=whole),
        jax.ShapeDtypeStruct((batch,), "int32", sharding=whole),
    )
    with jax.set_mesh(mesh):
        return jax.jit(start).lower(params, *given)


def constrained(params: Any, decoder: Any, states: int, vocab: int, mesh: Mesh) -> tuple[Any, Any]:
    """Abstract tables of a constraint in the params, and a decoder whose rows all begin in it."""
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sizes = {
        "next": ((states, 128), "uint16"),
        "classes": ((2, vocab), "uint16"),
        "bits": ((states, -(-vocab // 32)), "uint32"),
        **dict.fromkeys(("rows", "forced"), ((states,), "int32")),
        **dict.fromkeys(("accepting", "closed", "strict"), ((states,), "bool")),
    }
    tables: Any = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=whole) for name, (shape, dtype) in sizes.items()
    }

    if isinstance(params.draft, dict) and "ids" in params.draft:  # a draft of a vocabulary of its own
        ids = params.draft["ids"]
        shape = (states, -(-ids.shape[0] // 32))
        bits: Any = jax.ShapeDtypeStruct(shape, "uint32", sharding=whole)
        tables["narrow"] = Narrow(ids=ids, bits=bits)

    given = params._replace(guides=Guides(constraint=Tables(**tables)))
    return given, Constrained(decoder.target, decoder.drafter, decoder.rule, decoder.prefill_chunk)


class Constrained(Decoder):
    """A decoder whose rows all begin in the third state of a constraint."""

    def init(self, params: Params, prompts: Prompts) -> Any:
        rows = jax.numpy.full(prompts.length.shape, 2, jax.numpy.int32)
        tracked = Tracked(start=rows, group=jax.numpy.ones_like(rows))
        controls = dataclasses.replace(prompts.controls, guides=Guides(constraint=tracked))
        return super().init(params, dataclasses.replace(prompts, controls=controls))


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--model", default="llama-3.1-8b", choices=sorted(CONFIGS))
    parser.add_argument(
        "--draft",
        default="none",
        help="none, tree, chain-K, small-K, dflash, dflash-int8 or dflash-chain; prefill: the prompt",
    )
    parser.add_argument("--layers", type=int, help="default: all of the model's")
    parser.add_argument("--topology", default="v5e:2x2")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--attention", default="auto", help="of the target: auto, xla or pallas")
    parser.add_argument(
        "--constraint", type=int, metavar="STATES", help="every row has one, of tables of so many states"
    )
    parser.add_argument("folder", type=Path)
    asked = parser.parse_args()

    where, full = topology(asked.topology), CONFIGS[asked.model]
    layers = asked.layers or full.num_layers
    config = dataclasses.replace(full, num_layers=layers, windows=full.windows[:layers])
    mesh = Mesh(np.array(where.devices), ("model",))
    draft, rule = draft_of(asked.draft, config), verify.mars()
    model = transformer.language_model(config, dtype="bfloat16", attention=asked.attention)

    def placed(config: Any, *, bits: int | None = None) -> Any:
        places = shardings.params_shardings(config, mesh)
        return shardings.abstract_params(config, "bfloat16", bits=bits, shardings=places)

    params = Params(target=placed(config))
    if draft.config is not None:
        params = params._replace(
            draft=placed(draft.config, bits=8 if asked.draft.endswith("-int8") else None)
        )
    drafter = draft.make(model)
    decoder = speculative_decoder(model, drafter, rule)
    if asked.constraint is not None:
        params, decoder = constrained(params, decoder, asked.constraint, config.vocab_size, mesh)
    if asked.draft == "prefill":
        lowered = lower_prefill(decoder, params, rule, mesh, asked.batch, asked.context)
    else:
        _, lowered = fit.lower_loop(decoder, params, rule, mesh, batch=asked.batch, context=asked.context)
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - started
    asked.folder.mkdir(parents=True, exist_ok=True)
    text: Any = compiled.as_text()
    (asked.folder / "hlo.txt").write_text(text)
    memory: Any = compiled.memory_analysis()
    told = {
        "layers": layers,
        "nodes": drafter.num_nodes,
        "max_depth": drafter.max_depth,
        "compile_seconds": round(seconds, 1),
        "argument_bytes": memory.argument_size_in_bytes,
        "temporary_bytes": memory.temp_size_in_bytes,
        "jax": jax.__version__,
    }
    if asked.draft == "prefill":
        with jax.set_mesh(mesh):
            told["chunk"] = min(chunk_of(asked.context, asked.batch), asked.context)
        # Halves of what each device has, where rows are passed around.
        told["parts"] = 2 * mesh.size if "collective-permute" in text else 1
    (asked.folder / "meta.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main()
