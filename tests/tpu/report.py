"""Compile every kernel and decode step ahead of time and write down what the TPU compiler says.

    python -m tests.tpu.report kernels
    python -m tests.tpu.report decode
    python -m tests.tpu.report eagle

Writes `reports/SECTION.json`, where an entry replaces the one of the same name.
Nothing is executed, so there are no run times.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from tests.tpu import aot, decode_cases, kernel_cases

REPORTS = Path(__file__).with_name("reports")


def kernel_entries() -> Iterator[tuple[str, Any]]:
    """(name, function that compiles) of every kernel, shape and generation."""
    for generation in aot.TOPOLOGIES:
        for case in kernel_cases.kernel_cases():
            yield (
                f"{generation} {kernel_cases.name(case)}",
                lambda case=case, generation=generation: kernel_cases.compile_kernel(case, generation),
            )


def decode_entries() -> Iterator[tuple[str, Any]]:
    """(name, function that compiles) of every decode step and place."""
    for case in decode_cases.CASES:
        for generation, chips in decode_cases.PLACES:
            yield (
                f"{generation} x{chips} {case.name}",
                lambda case=case, place=(generation, chips): decode_cases.compile_step(case, *place),
            )


def eagle_entries() -> Iterator[tuple[str, Any]]:
    """(name, function that compiles) of the published pairs of a target and an EAGLE-3 head."""
    for case in decode_cases.EAGLE_CASES:
        yield (
            f"{case.generation} x{case.chips} {case.name} with EAGLE-3",
            lambda case=case: decode_cases.compile_eagle(case),
        )


def read(section: str) -> dict[str, Any]:
    """The committed report: the versions it was made with, and its entries by name."""
    path = REPORTS / f"{section}.json"
    return json.loads(path.read_text()) if path.exists() else {"versions": {}, "entries": {}}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("section", choices=("kernels", "decode", "eagle"))
    parser.add_argument("--only", default="", help="compile only the entries whose name contains this")
    parser.add_argument(
        "--missing", action="store_true", help="compile only the entries that are not there yet"
    )
    chosen = parser.parse_args()
    entries = {"kernels": kernel_entries, "decode": decode_entries, "eagle": eagle_entries}[chosen.section]
    for name, compile_entry in entries():
        if chosen.only in name and not (chosen.missing and name in read(chosen.section)["entries"]):
            entry = compile_entry()
            report = read(chosen.section)
            report["versions"] = {p: importlib.metadata.version(p) for p in ("jax", "jaxlib", "libtpu")}
            report["entries"][name] = entry
            path = REPORTS / f"{chosen.section}.json"
            path.write_text(json.dumps(report, indent=1, sort_keys=True) + "\n")
            print(name, json.dumps(entry), flush=True)


if __name__ == "__main__":
    main()
