"""The completion of a row, cut out of the batch's arrays. B batch, T token buffer."""

from __future__ import annotations

from typing import Any

from mars_jax.core.metrics import DecodeStats, summarize
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.requests import KINDS, Completion, Request, TokenLogProbs
from mars_jax.serve.text import RowText


def token_log_probs(source: Any, row: int, first: int, count: int) -> TokenLogProbs:
    """Return log-probabilities of `count` tokens of a row, from a `StepInfo` or a `TokenRecord` on the host."""
    those = slice(first, first + count)
    names = ("log_prob", "temperature_log_prob", "processed_log_prob", "regret")
    values = {name: tuple(getattr(source, name)[row, those].tolist()) for name in names}
    return TokenLogProbs(**values, kind=tuple(KINDS[k] for k in source.kind[row, those]))


def complete(
    target: Pretrained, request: Request, row: int, final: tuple, stats: DecodeStats, seconds: float
) -> Completion:
    """Cut one row's new tokens out of the batch's final state and name why it ended.

    Args:
      target, request: whose row this is.
      row: its place in the batch.
      final: (tokens i32[B, T], length i32[B], failed bool[B]), on the host.
      stats: the row's counters, on the host.
      seconds: for `Completion.seconds`.
    """
    tokens, length, failed = final
    first = len(request.prompt_tokens)
    said = tokens[row, first : length[row]].tolist()
    # As the stream does it, so that a character cut in two reads the same both ways.
    text = RowText(target, request)
    pieces = text.feed_all(said, last=True)
    new = said[: len(pieces)]
    stopped = text.stopped or (new and new[-1] in request.stop_tokens)
    if request.constraint is not None and not stopped:
        # Without stop tokens a constrained row ends where nothing may follow.
        most = min(request.max_new_tokens, target.config.max_positions - len(request.prompt_tokens))
        stopped = len(new) < most
    failed = failed[row] and not text.stopped  # what came after a stop string is nothing of this request
    return Completion(
        request=request,
        text="".join(pieces),
        tokens=new,
        finish_reason="failed" if failed else "stop" if stopped else "length",
        metrics=summarize(stats, row),
        seconds=seconds,
        log_probs=None if stats.tokens is None else token_log_probs(stats.tokens, row, first, len(new)),
    )
