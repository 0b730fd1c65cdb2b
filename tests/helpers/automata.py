"""Random strings that an automaton accepts."""

import numpy as np

from mars_jax.constraints.automaton import DEAD


def said_by(made, rng, count, most=40):
    """Return random strings that the automaton accepts. After `most` bytes they end as soon as they can."""
    of_class = {}
    for byte, kind in enumerate(made.classes.tolist()):
        of_class.setdefault(kind, []).append(byte)
    left = np.where(made.accepting, 0, len(made.next))  # bytes to the nearest accepting state
    while (left != (left := np.minimum(left, 1 + left[made.next].min(axis=1)))).any():
        pass
    texts = []
    for _ in range(count):
        state, said = 1, bytearray()
        while True:
            kinds = np.flatnonzero(made.next[state] != DEAD).tolist()
            if made.accepting[state] and (not kinds or rng.random() < 0.2 or len(said) > most):
                break
            if len(said) > most:
                kinds = [min(kinds, key=lambda kind: left[made.next[state, kind]])]
            kind = rng.choice(kinds)
            said.append(rng.choice(of_class[kind]))
            state = int(made.next[state, kind])
        texts.append(said.decode())
    return texts
