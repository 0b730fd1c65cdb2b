"""Forecast the steps of a draft along a text that the target wrote, at every length, without decoding again.

A step that begins after t tokens of the text accepts its k-th drafted token with a probability `accept[t, k]`, given
the text and that those before it were accepted. Under `exact` it is 1 where the draft says what the text says, else 0.
Under rejection a drafted token x of q is kept with min(1, p(x) / q(x)), so the joint probability of emitting y and
having kept the draft there is min(p(y), q(y)), while y is emitted with p(y): given y, it was kept with min(1, q(y) /
p(y)). What is emitted after it depends on the text alone, by the target's distribution, so given the whole text these
events are independent, and the places where steps begin are a Markov chain.

T new tokens of a text, K places of the longest draft, N lengths. Oracles: an enumeration of all texts and steps, and
decodes, in tests/lab/evaluate/test_forecast.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000


def by_token(ratio: np.ndarray) -> np.ndarray:
    """Chances f64[T, K] with which `verify.rejection` accepts the text's tokens, given the text.

    Args:
      ratio: f64[T, K]; q / p of the text's token, in [0, inf].

    Source: Leviathan et al. 2211.17192, appendix A.1, by Bayes' rule.

    >>> by_token(np.asarray([[0.5, 2.0]])).tolist()
    [[0.5, 1.0]]
    """
    return np.minimum(ratio, 1.0)


def by_block(ratio: np.ndarray) -> np.ndarray:
    """Chances f64[T, K] with which `verify.rejection(block=True)` accepts the text's tokens, given the text and that
    those before were accepted.

    A block keeps its first i tokens with a weight w_i = min(1, w_{i - 1} p / q), and emits what follows by p; so the
    text's token is kept with q w_i / (w_{i - 1} p) = min(1, q / (w_{i - 1} p)).

    Args:
      ratio: as for `by_token`.

    Source: Sun et al. 2403.10444, by Bayes' rule.

    >>> by_block(np.asarray([[2.0, 0.5]])).tolist()
    [[1.0, 1.0]]
    """
    accept, weight = np.zeros(ratio.shape), np.ones(len(ratio))
    for k in range(ratio.shape[1]):
        with np.errstate(divide="ignore", invalid="ignore"):
            accept[:, k] = np.minimum(ratio[:, k] / weight, 1.0)
            weight = np.minimum(1.0, weight / ratio[:, k])
        # After a token that is surely refused nothing is accepted, whatever the weight.
        weight = np.where(weight > 0, weight, 1.0)
    return accept


def begun(accept: np.ndarray, lengths: Sequence[int]) -> np.ndarray:
    """Chances f64[T, N] that a step begins after t tokens of the text, with drafts of each length; their sums are the
    expected steps.

    Args:
      accept: f64[T, K]; see the module.
      lengths: of drafts, each at most K.

    Here every draft is accepted, so with one token each every second place begins a step:

    >>> begun(np.ones((4, 2)), [0, 1, 2]).sum(axis=0).tolist()
    [4.0, 2.0, 2.0]
    """
    places, deepest = accept.shape
    reached = np.cumprod(np.pad(accept, ((0, 0), (1, 0)), constant_values=1.0), axis=1)  # [T, K + 1]
    stopped = reached - np.pad(reached[:, 1:], ((0, 0), (0, 1)))  # after exactly n of a draft without end
    depth = np.arange(deepest + 1)[None]
    length = np.asarray(lengths)[:, None]
    begin = np.zeros((places + deepest + 1, len(lengths)))
    begin[0] = 1.0
    for t in range(places):
        after = np.where(depth < length, stopped[t], np.where(depth == length, reached[t], 0.0))  # [N, K + 1]
        begin[t + 1 : t + deepest + 2] += (after * begin[t][:, None]).T
    return begin[:places]


def refused(accept: np.ndarray, begin: np.ndarray, lengths: Sequence[int], where: np.ndarray) -> np.ndarray:
    """Expected refusals f64[N], those `where` bool[T, K] holds, with drafts of each length.

    Args:
      accept, lengths: as for `begun`.
      begin: what it gave.
      where: entry [t, k] is of the k-th token that is drafted after t tokens of the text.
    """
    reached = np.cumprod(np.pad(accept[:, :-1], ((0, 0), (1, 0)), constant_values=1.0), axis=1)  # [T, K]
    inside = np.add.outer(np.arange(len(accept)), np.arange(accept.shape[1])) < len(accept)
    within = np.cumsum(reached * (1 - accept) * (where & inside), axis=1)
    within = np.pad(within, ((0, 0), (1, 0)))  # of no draft at all nothing is refused
    return np.sum(begin * within[:, list(lengths)], axis=0)


def ratio_of_sums(
    above: np.ndarray, below: np.ndarray, seed: int = 0
) -> tuple[np.ndarray, np.ndarray | None]:
    """Ratios f64[N] of sums over n problems, and their 95% intervals f64[N, 2] by the bootstrap over problems.

    Args:
      above, below: f64[n, N] each.
      seed: of the resampling.

    Returns:
      NaN where the sum below is 0; no interval of one problem.

    >>> ratio_of_sums(np.asarray([[6.0], [2.0]]), np.asarray([[3.0], [1.0]]))[0].tolist()
    [2.0]
    """
    count = len(above)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = above.sum(axis=0) / below.sum(axis=0)
        if count == 1:
            return ratio, None
        weights = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), size=RESAMPLES)
        resampled = (weights @ above) / (weights @ below)
    low, high = np.nanquantile(np.where(np.isfinite(ratio), resampled, 0.0), [0.025, 0.975], axis=0)
    return ratio, np.stack([low, high], axis=1)
