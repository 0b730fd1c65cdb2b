"""`commit_path`, compared with the cache of a chain, and every form of `write_slots`."""

import jax.numpy as jnp
import numpy as np
import pytest

from mars_jax.core import cache as cache_module
from mars_jax.core.cache import commit_path, init_cache, write_slots


def test_commit_moves_the_path_to_where_a_chain_would_have_put_it():
    rng = np.random.default_rng(0)
    cache = init_cache(2, (3, 20, 2, 4), jnp.float32)
    originals = [rng.standard_normal((3, 20, 2, 4)).astype(np.float32) for _ in range(4)]
    cache = cache.replace(k=tuple(map(jnp.asarray, originals[:2])), v=tuple(map(jnp.asarray, originals[2:])))
    start = jnp.asarray([0, 5, 11], jnp.int32)
    path = jnp.asarray([[0, 2, 5, 6], [0, 3, 3, 3], [0, 0, 0, 0]], jnp.int32)
    accepted = [3, 1, 0]
    moved = commit_path(cache, start, path)
    for old, committed in zip(originals, [*moved.k, *moved.v], strict=True):
        for row in range(3):
            s = int(start[row])
            np.testing.assert_array_equal(committed[row, : s + 1], old[row, : s + 1])
            for depth in range(1, accepted[row] + 1):
                np.testing.assert_array_equal(committed[row, s + depth], old[row, s + int(path[row, depth])])


@pytest.mark.parametrize("form", [write_slots, cache_module._write_slices, cache_module._write_rows])
def test_every_form_of_write_gives_the_same(form):
    rng = np.random.default_rng(2)
    for batch in (1, 3):
        buffer = rng.standard_normal((batch, 9, 2, 4)).astype(np.float32)
        rows = rng.standard_normal((batch, 4, 2, 4)).astype(np.float32)
        start = np.asarray([5, 0, 3], np.int32)[:batch]
        expected = buffer.copy()
        for row, first in enumerate(start):
            expected[row, first : first + 4] = rows[row]
        np.testing.assert_array_equal(form(*map(jnp.asarray, (buffer, rows, start))), expected)


def test_short_rows_are_moved_by_selects_as_by_scatters_and_gathers():
    """TPUs store scales in such short rows. A scale that is NaN or infinite affects no other slot."""
    rng = np.random.default_rng(3)
    buffer, rows = rng.standard_normal((3, 9, 2)).astype(np.float32), rng.standard_normal((3, 4, 2))
    rows[1, 2, 0], buffer[2, 1, 1] = np.nan, np.inf
    operands = jnp.asarray(buffer), jnp.asarray(rows, jnp.float32), jnp.asarray([5, 0, 3], jnp.int32)
    assert cache_module._is_short(operands[0])
    np.testing.assert_array_equal(cache_module._write_short(*operands), cache_module._write_rows(*operands))
    source = jnp.asarray([[1, 1, 8], [0, 4, 2], [7, 1, 3]], jnp.int32)
    gathered = (form(operands[0], source) for form in (cache_module._take_short, cache_module._take_rows))
    np.testing.assert_array_equal(*gathered)
