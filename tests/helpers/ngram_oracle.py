"""A slow reference of the n-gram lookup."""

from mars_jax.core.types import NO_TOKEN


def slow_lookup(tokens, count, max_ngram, min_ngram):
    for size in range(max_ngram, min_ngram - 1, -1):
        suffix = tokens[len(tokens) - size :]
        if len(suffix) < size:
            continue
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == suffix:
                continuation = tokens[end:]
                return [continuation[i % len(continuation)] for i in range(count)]
    return [NO_TOKEN] * count
