"""Steps that are forecast from a text are those of decodes: by enumeration, and by the command on real pairs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from mars_jax.lab.evaluate import forecast

VOCAB, LENGTH = 3, 4
LAW = np.random.default_rng(0)
P = {t: LAW.dirichlet(np.ones(VOCAB)) for n in range(LENGTH) for t in itertools.product(range(VOCAB), repeat=n)}
Q = {t: LAW.dirichlet(np.ones(VOCAB)) for n in range(LENGTH) for t in itertools.product(range(VOCAB), repeat=n)}


def by_token(text, depth):
    """Laws of a step: {tokens emitted: chance}, from the definition of speculative sampling (2211.17192)."""
    if depth == 0 or len(text) == LENGTH:
        return {(y,): p for y, p in enumerate(P[text])} if len(text) < LENGTH else {(): 1.0}
    p, q = P[text], Q[text]
    accept = np.minimum(1, p / q)
    rest = np.maximum(p - q, 0)
    found = {}
    for x in range(VOCAB):
        for more, chance in by_token((*text, x), depth - 1).items():
            found[(x, *more)] = found.get((x, *more), 0) + q[x] * accept[x] * chance
    refused = float(np.sum(q * (1 - accept)))
    # A token that is refused ends the step with one of the residual, marked so that it is no accepted one.
    for y in range(VOCAB):
        if rest[y] > 0:
            found[(y, "refused")] = refused * rest[y] / rest.sum()
    return found


def joint(step, depth, text=(), steps=0):
    """{(text, steps): chance} of texts of LENGTH tokens, which the limit cuts."""
    if len(text) == LENGTH:
        return {(text, steps): 1.0}
    found = {}
    for said, chance in step(text, depth).items():
        said = tuple(token for token in said if token != "refused")
        for end, more in joint(step, depth, (*text, *said)[:LENGTH], steps + 1).items():
            found[end] = found.get(end, 0) + chance * more
    return found


def by_block(text, depth):
    """The same of block verification (2403.10444, algorithm 2), over all drafts."""
    depth = min(depth, LENGTH - len(text))
    found = {}
    for draft in itertools.product(range(VOCAB), repeat=depth):
        weights, chance = [1.0], 1.0
        for n, x in enumerate(draft):
            p, q = P[(*text, *draft[:n])][x], Q[(*text, *draft[:n])][x]
            weights.append(min(1.0, weights[-1] * p / q))
            chance *= q
        # tau is the last i whose uniform is below h_i, from the longest down.
        left = 1.0
        for n in range(depth, -1, -1):
            here = (*text, *draft[:n])
            if n == depth:
                h, after = weights[n], P.get(here)
            else:
                residual = np.maximum(weights[n] * P[here] - Q[here], 0)
                total = residual.sum()
                h = total / (total + 1 - weights[n]) if total > 0 else 0.0
                after = residual / total if total > 0 else None
            h = 1.0 if n == 0 else h
            if chance * left * h > 0:
                for y in range(VOCAB) if after is not None else [None]:
                    end = (*draft[:n], *([] if y is None else [y]), *(["refused"] if n < depth else []))
                    share = 1.0 if y is None else after[y]
                    found[end] = found.get(end, 0) + chance * left * h * share
            left *= 1 - h
    return found


def ratio_of(text, depth):
    """q / p of the text's tokens, f64[LENGTH, depth]; 0 after its end."""
    flat = [Q[text[:t]][text[t]] / P[text[:t]][text[t]] for t in range(LENGTH)] + [0.0] * depth
    return np.asarray([flat[t : t + depth] for t in range(LENGTH)])


@pytest.mark.parametrize(
    ("step", "accepts"), [(by_token, forecast.by_token), (by_block, forecast.by_block)], ids=["token", "block"]
)
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_steps_given_a_text_are_those_of_the_joint_law(step, accepts, depth):
    law = joint(step, depth)
    assert sum(law.values()) == pytest.approx(1)
    for text in itertools.product(range(VOCAB), repeat=LENGTH):
        given = {steps: chance for (said, steps), chance in law.items() if said == text}
        # The decode is lossless, so that the texts have the target's law.
        assert sum(given.values()) == pytest.approx(np.prod([P[text[:t]][text[t]] for t in range(LENGTH)]))
        expected = sum(steps * chance for steps, chance in given.items()) / sum(given.values())
        found = forecast.begun(accepts(ratio_of(text, 3)), [depth]).sum()
        assert found == pytest.approx(expected)


def test_a_walk_is_counted_by_hand():
    # Drafts agree at places 0, 1 and 3; a step takes them up to its length and one token more.
    agrees = [1.0, 1.0, 0.0, 1.0, 0.0]
    accept = np.asarray([(agrees + [0.0] * 3)[t : t + 3] for t in range(5)])
    begin = forecast.begun(accept, [0, 1, 2, 3])
    assert begin.T.tolist() == [[1] * 5, [1, 0, 1, 1, 0], [1, 0, 0, 1, 0], [1, 0, 0, 1, 0]]
    everywhere = np.ones((5, 3), bool)
    # With one token the draft at place 2 is refused, and the one at place 4 only if a step begins there.
    assert forecast.refused(accept, begin, [0, 1, 2, 3], everywhere).tolist() == [0, 1, 1, 2]
    third = np.add.outer(np.arange(5), np.arange(3)) == 2
    assert forecast.refused(accept, begin, [0, 1, 2, 3], third).tolist() == [0, 1, 0, 1]


def test_ratios_have_intervals_over_problems():
    ratio, interval = forecast.ratio_of_sums(np.asarray([[8.0], [2.0]]), np.asarray([[4.0], [2.0]]))
    assert ratio.tolist() == [10 / 6] and interval.tolist() == [[1.0, 2.0]]
    ratio, interval = forecast.ratio_of_sums(np.asarray([[8.0]]), np.asarray([[0.0]]))
    assert interval is None and not np.isfinite(ratio[0])
