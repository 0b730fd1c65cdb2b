"""Random strings that an automaton accepts."""

import numpy as np

from mars_jax.constraints.automaton import DEAD


def accepted_strings(automaton, rng, count, max_bytes=40):
    """Return random strings that the automaton accepts. After `max_bytes` bytes they end as soon as they can."""
    of_class = {}
    for byte, kind in enumerate(automaton.classes.tolist()):
        of_class.setdefault(kind, []).append(byte)
    distance = np.where(automaton.accepting, 0, len(automaton.next))  # bytes to the nearest accepting state
    while (distance != (distance := np.minimum(distance, 1 + distance[automaton.next].min(axis=1)))).any():
        pass
    strings = []
    for _ in range(count):
        state, text = 1, bytearray()
        while True:
            kinds = np.flatnonzero(automaton.next[state] != DEAD).tolist()
            if automaton.accepting[state] and (not kinds or rng.random() < 0.2 or len(text) > max_bytes):
                break
            if len(text) > max_bytes:
                kinds = [min(kinds, key=lambda kind: distance[automaton.next[state, kind]])]
            kind = rng.choice(kinds)
            text.append(rng.choice(of_class[kind]))
            state = int(automaton.next[state, kind])
        strings.append(text.decode())
    return strings
