"""Kernel operations in numpy and plain Python, written from their definitions."""

import numpy as np


def top_two(logits):
    """Return (top1, id1, top2, id2, logsumexp) of float logits [..., V], each with the leading dimensions."""
    z = np.asarray(logits).astype(np.float32)
    lead, vocab = z.shape[:-1], z.shape[-1]
    rows = z.reshape(-1, vocab)
    first, second = [], []
    for row in rows:
        order = np.lexsort((np.arange(vocab), -row.astype(np.float64) + 0.0))
        first.append(order[0])
        second.append(order[1] if vocab > 1 else -1)
    first, second = np.asarray(first, np.int32), np.asarray(second, np.int32)
    index = np.arange(len(rows))
    top2 = rows[index, second] if vocab > 1 else np.full(len(rows), -np.inf, np.float32)
    top1 = rows[index, first]
    shift = np.where(np.isfinite(top1), top1, 0).astype(np.float64)
    with np.errstate(divide="ignore"):
        total = shift + np.log(np.exp(rows.astype(np.float64) - shift[:, None]).sum(axis=1))
    return tuple(x.reshape(lead) for x in (top1, first, top2, second, total))


def low_margin(z1, z2, theta, margin):
    z1, z2, theta = np.float32(z1), np.float32(z2), np.float32(theta)
    with np.errstate(invalid="ignore", over="ignore"):
        if margin == "ratio":
            return bool(z1 > 0 and z2 / z1 > theta)
        return bool(z1 - z2 < theta and not np.isinf(theta))


def accept(logits, tokens, parents, y, controls, max_depth, margin):
    """Walk the trees row by row and node by node; return a list of (path, num_accepted, next_token, relaxed)."""
    top1, id1, top2, id2, _ = top_two(logits)
    out = []
    for b in range(len(tokens)):
        named = id1[b] if y is None else np.where(y[b] < 0, id1[b], y[b])
        stops = {int(t) for t in controls.stop_tokens[b] if t >= 0}
        node, run, path, relaxed = 0, 0, [0], []
        for depth in range(max_depth):
            drafted = [(i, int(tokens[b, i])) for i in range(len(parents[b])) if parents[b, i] == node]
            drafted = [(i, x) for i, x in drafted if x >= 0]
            exact = [i for i, x in drafted if x == named[node]]
            strict = controls.strict[b]
            may_relax = (
                low_margin(top1[b, node], top2[b, node], controls.theta[b], margin)
                and (depth >= strict if controls.strict.dtype == np.int32 else not strict)
                and not {int(id1[b, node]), int(named[node])} & stops
                and run < controls.max_relaxed_run[b]
            )
            best = {int(id1[b, node]), int(id2[b, node])}
            runner_up = [i for i, x in drafted if may_relax and x in best and x not in stops]
            if exact:
                node, run = exact[0], 0
                relaxed.append(False)
            elif runner_up:
                node, run = runner_up[0], run + 1
                relaxed.append(True)
            else:
                break
            path.append(node)
        count = len(path) - 1
        path += [node] * (max_depth - count)
        relaxed += [False] * (max_depth - count)
        out.append((path, count, int(named[node]), relaxed))
    return out
