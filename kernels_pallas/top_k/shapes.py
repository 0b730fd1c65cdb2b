"""Block sizes of the `top_k` kernel. Dimensions: R rows, V vocabulary."""

from __future__ import annotations

from jax.typing import DTypeLike

from kernels_pallas.common import LANES, SUBLANES, BlockError, tile_rows

BLOCK_BYTES = 4 * 2**20
"""Maximum size of a block of logits, in bytes. A block contains whole rows, and two blocks are in VMEM at a time."""


def fits_in_vmem(vocab: int, k: int) -> bool:
    """Return whether a block of rows with `vocab` logits each fits in VMEM, and k entries in the lanes of a register.

    >>> fits_in_vmem(32000, 10), fits_in_vmem(262144, 10)
    (True, False)
    """
    # One lane holds the logsumexp, so at most LANES - 1 are left for the entries. The smallest block has SUBLANES rows,
    # the height of a register. As float32, each of its logits takes 4 bytes.
    return k < LANES and SUBLANES * 4 * vocab <= BLOCK_BYTES


def block_rows(rows: int, vocab: int, k: int, dtype: DTypeLike) -> int:
    """Return the number of rows per block of logits [R, V].

    Raises:
      BlockError: not even the smallest block fits.
    """
    if not fits_in_vmem(vocab, k):
        raise BlockError(
            f"the {k} largest of {vocab} tokens do not fit: the kernel takes at most {LANES - 1} of "
            f"{BLOCK_BYTES // SUBLANES // 4} tokens, so pass implementation='xla'."
        )
    # A block consists of whole tiles. It has at most 16 rows, because a scan keeps the state of all its rows in
    # registers.
    tile = tile_rows(dtype)
    return min(rows, max(tile, min(2 * SUBLANES, BLOCK_BYTES // (4 * vocab) // tile * tile)))
