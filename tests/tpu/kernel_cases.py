"""Functions that compile every kernel at the named shapes."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout

from kernels_pallas import AcceptControls, margin_accept, margin_stats
from tests.helpers.kernel_shapes import DRAFTS, VOCABULARIES
from tests.tpu import aot

HIDDEN = 256
"""Width of the matmul that produces the logits. The matmul fixes their layout; its width does not matter."""


class Case(NamedTuple):
    kernel: str  # "margin_stats" or "margin_accept"
    vocab: int
    draft: str
    dtype: str
    logsumexp: bool

    def __str__(self) -> str:
        return f"{self.kernel} {self.draft} {self.vocab} {self.dtype}"


def kernel_cases() -> Iterator[tuple[Case, str]]:
    """Yield each of `VOCABULARIES` with each of `DRAFTS` in float32, and the batches in bfloat16 as well.

    Batches of trees, the largest cases, come with every generation, and the others with one each.
    """
    for v, vocab in enumerate(sorted(set(VOCABULARIES.values()))):
        for d, draft in enumerate(DRAFTS):
            cases = [
                Case("margin_stats", vocab, draft, "float32", False),
                Case("margin_accept", vocab, draft, "float32", True),
            ]
            if draft.endswith("batch"):
                cases.append(Case("margin_stats", vocab, draft, "bfloat16", False))
            for k, case in enumerate(cases):
                if draft.endswith("tree-batch"):
                    yield from ((case, generation) for generation in aot.TOPOLOGIES)
                else:
                    yield case, aot.turn(v + d + k)


def one_read(report: dict[str, Any]) -> int:
    """Return the bytes that a kernel may move: the logits once, and its results.

    Each result is a tile of 512 bytes per row that is written, read and cut. A second read of the logits would be at
    least 64 KiB per row.
    """
    return report["logits_bytes"] + 10 * 2**10 * report["rows"] + 2**16


def legal_arrays(report: dict[str, Any]) -> int:
    """Return the number of arrays as large as the logits that a program may write: the matmul's output.

    For a single row, the matmul is a matrix-vector product, and its vector becomes a matrix of one row in a second
    array of half a megabyte.
    """
    return 2 if report["rows"] == 1 else 1


def compile_kernel(case: Case, generation: str) -> dict[str, Any]:
    """Compile the unembedding with the kernel, and the unembedding by itself.

    In the report, `arrays_of_logits` is 1 if only the matmul writes an array as large as the logits. `added_bytes` is
    the difference of the compiler's byte counts, which also reflects another tiling of the matmul.
    """
    draft = DRAFTS[case.draft]
    dtype = jnp.dtype(case.dtype)
    on = aot.mesh(generation)

    def shape(*dims: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    def unembed(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return jnp.einsum("bne,ev->bnv", hidden, weight, preferred_element_type=jnp.float32).astype(dtype)

    def stats(hidden, weight):
        return margin_stats(unembed(hidden, weight), logsumexp=case.logsumexp, implementation="pallas_tpu")

    def accept(hidden, weight, tokens, parents, y, controls):
        return margin_accept(
            unembed(hidden, weight),
            tokens,
            parents,
            y,
            controls,
            max_depth=draft.depth,
            logsumexp=case.logsumexp,
            implementation="pallas_tpu",
        )

    b, n = draft.batch, draft.nodes
    producer = aot.abstract(
        (shape(b, n, HIDDEN, dtype=jnp.bfloat16), shape(HIDDEN, case.vocab, dtype=jnp.bfloat16)), on
    )
    elements = b * n * case.vocab
    controls = AcceptControls(shape(b, dtype=jnp.float32), shape(b, dtype=bool), shape(b), shape(b, 4))
    draft_operands = aot.abstract((shape(b, n), shape(b, n), shape(b, n), controls), on)
    if case.kernel == "margin_stats":
        report = aot.compile_for(stats, *producer, watch=elements)
    else:
        report = aot.compile_for(accept, *producer, *draft_operands, watch=elements)
    # Let the matmul choose the layout of the logits, so that no copy into another layout counts.
    unembedding = aot.compile_for(unembed, *producer, out_shardings=Format(Layout.AUTO))
    logits = elements * dtype.itemsize
    added = report["bytes_accessed"] - unembedding["bytes_accessed"]
    return {"rows": b * n, "logits_bytes": logits, "added_bytes": added, **report}
