"""Time the steps and prompts of an 8B model on one GPU, compiled with several XLA options.

    python -m scripts.kernels.gpu_step --output scripts/results/gpu_step_h100.json

Weights are random and acceptance is simulated, as in `mars-jax check`. For each program, the report also lists the
copies, fusions and concatenations in the body of the decode loop. Each section of the report covers one group of
programs, compiled as one of `VARIANTS`. Each section runs in a child process with a time limit, so a compiler that
hangs or crashes costs only one section. The report is written after every measurement. To resume an unfinished report,
run the same command again. Finished sections are skipped, and so are variants with options that this version of XLA
does not have.

This command runs everything on a CPU, in one process:

    JAX_PLATFORMS=cpu python -m scripts.kernels.gpu_step --shape tiny --output tiny.json
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

import mars_jax as mj
from mars_jax.lab.commands.check import device_check, large
from mars_jax.lab.commands.check.large import RandomPair, TimedArm
from mars_jax.lab.planning.fit import product_weights
from mars_jax.lab.planning.outlined_models import CONFIGS
from mars_jax.models import transformer
from mars_jax.models.config import ModelConfig
from mars_jax.models.layers import ACTIVATIONS, dense
from mars_jax.models.rope import rotate
from scripts import common


class Variant(NamedTuple):
    """One way to compile the programs."""

    options: Mapping[str, Any] = MappingProxyType({})  # XLA options, for `compiler_options`
    attention: str = "auto"
    joined: bool = False  # q|k|v and gate|up are one matrix each; for plain steps only


_NO_MERGER = {"xla_gpu_dot_merger_threshold_mb": 0}
_GRAPHS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,CONDITIONAL,WHILE"
VARIANTS = {
    "default": Variant(),
    "no dot merger": Variant(_NO_MERGER),
    "no dot merger, no triton": Variant(_NO_MERGER | {"xla_gpu_enable_triton_gemm": False}),
    "no dot merger, graphs": Variant(
        _NO_MERGER | {"xla_gpu_enable_command_buffer": _GRAPHS, "xla_gpu_graph_min_graph_size": 1}
    ),
    "joined": Variant(joined=True),
    "attention xla": Variant(attention="xla"),
}


class Shape(NamedTuple):
    """Sizes of the model and of the measurements."""

    config: ModelConfig
    dtype: str
    context: int  # number of tokens in the prompt of each row
    steps: tuple[TimedArm, ...]  # with one row
    batches: tuple[TimedArm, ...]  # with `rows` rows
    rows: int
    chunks: tuple[int, ...]  # tokens per forward pass of a prefill
    copied: int  # bytes of the copied array
    side: int  # side of the square matrices in the product


_LLAMA = CONFIGS["llama-3.1-8b"]
SHAPES = {
    "8b": Shape(
        config=_LLAMA,
        dtype="bfloat16",
        context=4096,
        steps=(large.PLAIN, large.CHAIN, large.TREE),
        batches=(large.PLAIN, large.TREE),
        rows=32,
        chunks=(512, 1024, 2048, 4096),
        copied=large.COPIED,
        side=large.SIDE,
    ),
    "tiny": Shape(
        config=dataclasses.replace(
            _LLAMA, vocab_size=64, hidden_size=32, intermediate_size=48, num_layers=1, num_heads=2,
            num_kv_heads=1, head_dim=16, windows=(),
        ),
        dtype="float32",
        context=32,
        steps=(
            large.PLAIN,
            TimedArm("chain of 2", {"num_draft_tokens": 2}, 1.5),
            TimedArm("tree 2-1", {"tree": (2, 1)}, 1.5),
        ),
        batches=(large.PLAIN,),
        rows=2,
        chunks=(16, 32),
        copied=2**16,
        side=64,
    ),
}  # fmt: skip

SECTIONS = {
    "8b": [
        ("device", "default"),
        ("steps", "default"),
        ("batches", "default"),
        ("prompts", "default"),
        ("steps", "no dot merger"),
        ("steps", "no dot merger, graphs"),
        ("steps", "no dot merger, no triton"),
        ("steps", "joined"),
        ("steps", "attention xla"),
        ("batches", "no dot merger, graphs"),
        ("prompts", "attention xla"),
        ("batches", "no dot merger"),
        ("prompts", "no dot merger, no triton"),
        ("batches", "attention xla"),
        ("batches", "no dot merger, no triton"),
        ("prompts", "no dot merger"),
        ("prompts", "no dot merger, graphs"),
    ],
    # GPU options have no effect on a CPU. It is enough to test them with one group of programs; prompts compile
    # fastest.
    "tiny": [
        ("device", "default"),
        ("steps", "default"),
        ("steps", "joined"),
        ("batches", "default"),
        *(("prompts", name) for name, variant in VARIANTS.items() if not variant.joined),
    ],
}
"""(group, variant) of each section by shape, most informative first, in case the time budget runs out."""
SHORTEST = 20
"""Minimum number of seconds that must be left in the budget to start a section."""


# Joined matrices.


@contextlib.contextmanager
def joined_products() -> Iterator[None]:
    """Make the transformer use the joined matrices that `join` returns."""

    def project(config: ModelConfig, layer: dict, x: Any, rotation: Any) -> Any:
        heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_dim
        qkv = dense(x, layer["qkv"]).reshape(*x.shape[:2], -1, size)
        q, k, v = jnp.split(qkv, (heads, heads + kv_heads), axis=2)
        q, k = (rotate(y, rotation.cos, rotation.sin) for y in (q, k))
        return q.reshape(*k.shape[:3], -1, size), k, v, None

    def mlp(config: ModelConfig, layer: dict, x: Any) -> Any:
        gate, up = jnp.split(dense(x, layer["gate_up"], dtype=jnp.float32), 2, axis=-1)
        return dense((ACTIVATIONS[config.activation](gate) * up).astype(x.dtype), layer["down"])

    with mock.patch.object(transformer, "_project", project), mock.patch.object(transformer, "_mlp", mlp):
        yield


def join(params: mj.types.PyTree) -> mj.types.PyTree:
    """Return a target's params with q|k|v joined into one matrix in each layer, and gate|up into another."""
    layers = []
    for layer in params["layers"]:
        separate = {"q", "k", "v", "gate", "up"}
        joined = {name: value for name, value in layer.items() if name not in separate}
        joined["qkv"] = jnp.concatenate([layer[name] for name in "qkv"])
        joined["gate_up"] = jnp.concatenate([layer["gate"], layer["up"]])
        layers.append(joined)
    return params | {"layers": layers}


# Counts of operations.

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = (\(.*?\)|\S+) ([\w-]+)\(")
_CALLED = re.compile(r"(?:body|condition|to_apply|calls)=%?([\w.-]+)|branch_computations=\{([^}]*)\}")


def loop_operations(text: str) -> dict[str, Any]:
    """Count operations in the body of the largest loop of a compiled program.

    Args:
      text: from `compiled.as_text()`.

    Returns:
      The counts of `concatenate`, `copy`, `fusion` and, for concatenations inside fusions, `fused concatenate`; and
      the number of concatenations of each shape.

    >>> loop_operations('''
    ... %body (p: f32[2]) -> f32[2] {
    ...   %p = f32[2]{0} parameter(0)
    ...   ROOT %c = f32[2]{0} copy(%p)
    ... }
    ... ENTRY %main (x: f32[2]) -> f32[2] {
    ...   ROOT %w = f32[2]{0} while(%x), condition=%cond, body=%body
    ... }''')["copy"]
    1
    """
    computations: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            lines = computations.setdefault(header[1], [])
        lines.append(line)

    def reached(name: str, visited: set[str]) -> Iterator[tuple[str, str, bool]]:
        """Yield (shape, kind, whether it is in a fusion) for each operation that a computation runs."""
        if name in visited:
            return
        visited.add(name)
        for line in computations.get(name, []):
            if not (operation := _OPERATION.match(line)):
                continue
            yield operation[1], operation[2], False
            for computation, branches in _CALLED.findall(line):
                for callee in filter(None, [computation, *re.findall(r"[\w.-]+", branches)]):
                    inside = operation[2] == "fusion"
                    yield from (
                        (shape, kind, fused or inside) for shape, kind, fused in reached(callee, visited)
                    )

    bodies = re.findall(r" while\(.*body=%?([\w.-]+)", text)
    loops = [list(reached(body, set())) for body in bodies]
    operations = max(loops, key=len, default=[])
    counts = Counter(kind for _, kind, fused in operations if not fused)
    concatenated = Counter(
        re.sub(r"\{.*", "", shape) for shape, kind, _ in operations if kind == "concatenate"
    )
    return {name: counts[name] for name in ("concatenate", "copy", "fusion")} | {
        "fused concatenate": sum(fused for _, kind, fused in operations if kind == "concatenate"),
        "concatenated": dict(concatenated.most_common()),
    }


# Sections.


def measure(group: str, name: str, shape: Shape, path: Path) -> None:
    """Measure one section and add each measurement to the report.

    Args:
      group: "device", "steps", "prompts" or "batches".
      name: name of the variant.
      shape: one of `SHAPES`.
      path: path of the report.
    """
    variant, report = VARIANTS[name], common.earlier_report(path)
    section = report["sections"][f"{group}: {name}"] = {"status": "unfinished", "rows": []}

    def add(row: dict[str, Any]) -> None:
        section["rows"].append(row)
        print(f"{group}, {name}: {row}", flush=True)
        common.write(path, report)

    if group == "device":
        copy, product = large.copy_rate(shape.copied), large.product_rate(shape.side)
        rates = {"copy_bytes_per_second": copy, "product_flops": product}
        add(device_check.device() | rates | {"unsupported": _unsupported()})
    else:
        pair = large.random_pair(shape.config, shape.dtype, shape.context, attention=variant.attention)
        if group == "prompts":
            for chunk in shape.chunks:
                model = transformer.language_model(
                    shape.config, dtype=shape.dtype, attention=variant.attention, prefill_chunk=chunk
                )
                figures = large.attempt(functools.partial(_prompt, pair._replace(model=model), variant))
                add({"chunk": chunk} | figures)
        else:
            for arm, batch in _programs(group, variant, shape):
                figures = large.attempt(functools.partial(_steps, pair, arm, batch, variant))
                add({"arm": arm.name, "rows": batch} | figures)
    section["status"] = "complete"
    common.write(path, report)


def _programs(group: str, variant: Variant, shape: Shape) -> list[tuple[TimedArm, int]]:
    if variant.joined:
        return [(large.PLAIN, 1)]
    if group == "steps":
        return [(arm, 1) for arm in shape.steps]
    return [(arm, shape.rows) for arm in shape.batches]


def _steps(pair: RandomPair, arm: TimedArm, batch: int, variant: Variant) -> dict[str, Any]:
    if variant.joined:
        pair = pair._replace(plain=pair.plain._replace(target=join(pair.plain.target)))
    with joined_products() if variant.joined else contextlib.nullcontext():
        program = pair.steps(arm, batch)
    compiled, seconds = _compiled(program.lowered, variant)
    work = {"bytes": program.bytes, "flops": program.flops, "compile_seconds": seconds}
    return large.step_times(program, compiled) | work | {"loop": loop_operations(compiled.as_text())}


def _prompt(pair: RandomPair, variant: Variant) -> dict[str, Any]:
    lowered, prompts = pair.prompt()
    compiled, seconds = _compiled(lowered, variant)
    work = {
        "tokens": pair.context,
        "flops": 2 * product_weights(pair.config) * pair.context,
        "compile_seconds": seconds,
    }
    return large.prompt_times(compiled, pair.plain, prompts) | work


def _compiled(lowered: Any, variant: Variant) -> tuple[Any, float]:
    """Compile a program with a variant's options, and return it with the compile time in seconds."""
    began = time.perf_counter()
    compiled = lowered.compile(compiler_options=dict(variant.options))
    return compiled, round(time.perf_counter() - began, 1)


def _unsupported() -> dict[str, str]:
    """Return an error message for each variant with an option that this version of XLA lacks, keyed by variant."""
    tried = {
        name: large.attempt(
            lambda variant=variant: {"seconds": _compiled(jax.jit(lambda x: x).lower(1.0), variant)[1]}
        )
        for name, variant in VARIANTS.items()
    }
    return {name: result["failed"] for name, result in tried.items() if "failed" in result}


def measure_in_child(group: str, name: str, shape: str, path: Path, limit: float) -> None:
    """Measure one section in a child process. If the process fails, record its status in the report."""
    command = [sys.executable, __file__, "--shape", shape, "--output", str(path), "--section", group, name]
    try:
        environment = os.environ | {"PYTHONPATH": str(common.ROOT)}
        code = subprocess.run(command, timeout=limit, check=False, env=environment).returncode
        status = f"exit code {code}" if code else "complete"
    except subprocess.TimeoutExpired:
        status = f"stopped after {limit:.3g} s"
    if status != "complete":
        report = common.earlier_report(path)
        report["sections"].setdefault(f"{group}: {name}", {"rows": []})["status"] = status
        common.write(path, report)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="8b")
    parser.add_argument(
        "--output", type=Path, required=True, help="the JSON report; an existing report is continued"
    )
    parser.add_argument("--budget", type=float, default=570, help="seconds for everything (default 570)")
    parser.add_argument("--limit", type=float, default=110, help="seconds for one section (default 110)")
    parser.add_argument("--section", nargs=2, help=argparse.SUPPRESS)  # measure this section in this process
    args = parser.parse_args()
    if args.section:
        group, name = args.section
        measure(group, name, SHAPES[args.shape], args.output)
        return
    new = {"shape": args.shape, "machine": common.provenance("jaxlib"), "sections": {}}
    deadline = time.monotonic() + args.budget
    report = common.earlier_report(args.output) or new
    if (report["shape"], report["machine"]["commit"]) != (args.shape, new["machine"]["commit"]):
        parser.error(f"{args.output} is the report of another shape or commit: choose another --output")
    common.write(args.output, report)
    for group, name in SECTIONS[args.shape]:
        sections = common.earlier_report(args.output)["sections"]
        device = sections.get("device: default", {"rows": []})["rows"]
        if sections.get(f"{group}: {name}", {}).get("status") == "complete":
            continue
        if device and name in device[0]["unsupported"]:
            continue
        limit = min(args.limit, deadline - time.monotonic())
        if limit < SHORTEST:
            print("the budget is spent: run the same command again to continue")
            break
        if args.shape == "tiny":
            measure(group, name, SHAPES[args.shape], args.output)
        else:
            # JAX is not initialised in this process, so the GPU's memory is free for the child.
            measure_in_child(group, name, args.shape, args.output, limit)


if __name__ == "__main__":
    main()
