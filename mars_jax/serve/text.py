"""Incremental conversion of a row's tokens to text, and completions made from the arrays of a batch.

B batch, T token buffer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax import Array

from mars_jax.core.metrics import DecodeStats, TokenRecord, summarize
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.requests import KINDS, Completion, Request, TokenLogProbs, TopTokens

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
LONGEST_PERIOD, LOOP_TOKENS = 90, 12
"""Maximum length of the phrase that a loop repeats, and minimum total length of a loop, in tokens."""


class Detokenizer:
    """An incremental detokenizer, whose pieces of text concatenate to the text of all tokens.

    Text that a later token may change is held back: an incomplete character or, with byte fallback, a whole run of byte
    tokens, because `tokenizers` replaces every byte of a run that is not valid UTF-8. For each piece, only the tokens
    after the second-to-last piece are decoded again, so that the cost does not grow with the length of the text.
    """

    def __init__(self, pretrained: Pretrained, prompt_tokens: Sequence[int]):
        self._decode = pretrained.decode
        self._invalid_byte = pretrained.invalid_byte
        # Decode new tokens together with the end of the prompt, because a tokenizer may drop a space before the first
        # word. Drop tokens from the front of this context while it contains an incomplete character.
        context = list(prompt_tokens)[-8:]
        while REPLACEMENT in self._decode(context):
            context.pop(0)
        self._tokens = context
        self._context, self._read = 0, len(context)

    def feed(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Add `tokens`, and return the text that is now complete. With `last`, also return text that was held back."""
        self._tokens += list(tokens)
        text = self.pending()
        if not last and (not text or text.endswith(REPLACEMENT) or self._may_change()):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text

    def pending(self) -> str:
        """Return the text of all tokens since the last piece, including text that later tokens may change."""
        context_text = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        # An invalid byte changes the text of the whole run of byte tokens around it, and the run may begin in the
        # context. In that case, `text` does not begin with `context_text`.
        if not text.startswith(context_text):
            return self._decode(self._tokens[self._read :])
        return text[len(context_text) :]

    def _may_change(self) -> bool:
        """Return whether the text ends in a run of byte tokens, whose text an invalid byte would change."""
        if self._invalid_byte is None:
            return False
        window = self._tokens[self._context :]
        return not self._decode([*window, self._invalid_byte]).startswith(self._decode(window))


class RowText:
    """The text of one request's tokens, piece by piece, up to the first stop string.

    The text ends before the stop string, as in OpenAI's API. The last token is the one that completes the stop string,
    as in transformers. Stop strings are searched for only in new text, not across the boundary between prompt and
    completion. Text that may be the beginning of a stop string is held back until later tokens show whether it is one.
    The pieces concatenate to the whole text.
    """

    def __init__(self, target: Pretrained, request: Request):
        self._detokenizer = Detokenizer(target, request.prompt_tokens)
        self._stops = request.stop_strings
        self._held = ""
        self.count = 0
        """Number of tokens so far, excluding tokens after a stop string."""
        self.stopped = False

    def feed(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Add `tokens`, and return the text that is now complete. After a stop string, return "".

        With `last`, also return text that was held back.
        """
        if self.stopped:
            return ""
        self.count += len(tokens)
        text = self._held + self._detokenizer.feed(tokens, last=last)
        # Characters that the detokenizer still holds back may complete a stop string.
        pending_text = self._detokenizer.pending() if self._stops else ""
        searched_text = text if pending_text.endswith(REPLACEMENT) else text + pending_text
        # End the text before the first stop string.
        stop_starts = [index for stop in self._stops if (index := searched_text.find(stop)) >= 0]
        if stop_starts:
            self.stopped, self._held = True, ""
            return searched_text[: min(stop_starts)]
        text_end = len(text)
        if not last:
            text_end -= max((_begun(text, stop) for stop in self._stops), default=0)
        self._held = text[text_end:]
        return text[:text_end]

    def feed_all(self, tokens: Sequence[int], *, last: bool = False) -> list[str]:
        """Add `tokens`; return the text of each, up to the one that completes a stop string. `last`: see `feed`."""
        pieces: list[str] = []
        for number, token in enumerate(tokens, start=1):
            if not self.stopped:
                pieces.append(self.feed([token], last=last and number == len(tokens)))
        return pieces


def _begun(text: str, stop: str) -> int:
    """Return how many characters at the end of `text` may be the beginning of a stop string.

    >>> _begun("the en", "end"), _begun("the end", "end")
    (2, 0)
    """
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)


def token_log_probs(record: TokenRecord, row: int, first: int, count: int) -> TokenLogProbs:
    """Extract the log-probabilities of `count` tokens of a row from a `TokenRecord` on the host."""
    columns = slice(first, first + count)
    score_names = ("log_prob", "temperature_log_prob", "processed_log_prob", "regret")
    field_values = {name: tuple(getattr(record, name)[row, columns].tolist()) for name in score_names}
    if (top_record := record.top) is not None:
        field_values["top"] = _pairs(top_record.tokens[row, columns], top_record.log_prob[row, columns])
        field_values["processed_top"] = _pairs(
            top_record.processed_tokens[row, columns], top_record.processed_log_prob[row, columns]
        )
    return TokenLogProbs(**field_values, kind=tuple(KINDS[k] for k in record.kind[row, columns]))


def _pairs(ids: Array, scores: Array) -> tuple[TopTokens, ...]:
    """Return the pairs (token id, log-probability) of each token, without those whose score is NaN or -inf."""
    rows = zip(ids.tolist(), scores.tolist(), strict=True)
    return tuple(tuple(pair for pair in zip(*row, strict=True) if math.isfinite(pair[1])) for row in rows)


class Rows(NamedTuple):
    """The parts of a batch's state from which completions are built."""

    tokens: np.ndarray  # i32[B, T]
    length: np.ndarray  # i32[B]
    failed: np.ndarray  # bool[B]
    done: np.ndarray  # bool[B]
    stats: DecodeStats


def complete(target: Pretrained, request: Request, row: int, rows: Rows, seconds: float) -> Completion:
    """Build the completion of one row from the batch's final state.

    Args:
      target, request: the target, and the request that the row decodes.
      row: index of the row in the batch.
      rows: state of the batch, on the host.
      seconds: value of `Completion.seconds`.
    """
    prompt_length = len(request.prompt_tokens)
    decoded_tokens = rows.tokens[row, prompt_length : rows.length[row]].tolist()
    # Detokenize piece by piece, as in streaming. Then the text is the same as the streamed text even if a character is
    # split over several tokens.
    row_text = RowText(target, request)
    pieces = row_text.feed_all(decoded_tokens, last=True)
    new_tokens = decoded_tokens[: len(pieces)]
    is_stopped = row_text.stopped or (new_tokens and new_tokens[-1] in request.stop_tokens)
    if request.constraint is not None and not is_stopped:
        # Without a stop token, a constrained row ends when its constraint allows no further token.
        max_tokens = min(request.max_new_tokens, target.config.max_positions - prompt_length)
        is_stopped = len(new_tokens) < max_tokens
    finish_reason = "stop" if is_stopped else "length"
    # A failure after a stop string does not affect the completion.
    if rows.failed[row] and not row_text.stopped:
        finish_reason = "failed"
    token_record = rows.stats.tokens
    return Completion(
        request=request,
        text="".join(pieces),
        tokens=new_tokens,
        finish_reason=finish_reason,
        metrics=summarize(rows.stats, row),
        seconds=seconds,
        log_probs=token_record and token_log_probs(token_record, row, prompt_length, len(new_tokens)),
    )


def ends_in_loop(tokens: Sequence[int], stop_tokens: Sequence[int] = ()) -> bool:
    """Return whether a completion ends in a loop: a phrase of up to 90 tokens, repeated at least three times.

    Holtzman et al. 1904.09751 count a completion as repetitive if it ends in three copies of a phrase; their code
    allows phrases of up to 90 tokens. Here, the copies must also have at least 12 tokens in total, so that "!!!" or "ha
    ha ha" does not count as a loop. If a completion is cut off inside a phrase, it ends in copies of a rotation of the
    phrase, which also count. A final stop token is ignored.

    Source: 1904.09751. Raises: nothing.

    >>> ends_in_loop([5, 6, 7, 8] * 3), ends_in_loop([1, 2, 3, 1, 2, 3, 1, 2]), ends_in_loop([9] * 11)
    (True, False, False)
    """
    text_tokens = list(tokens)
    if text_tokens and text_tokens[-1] in stop_tokens:
        text_tokens.pop()
    for period in range(1, min(LONGEST_PERIOD, len(text_tokens) // 3) + 1):
        tail_length = max(3 * period, LOOP_TOKENS)
        tail = text_tokens[-tail_length:]
        # If the tail equals itself shifted by `period`, it repeats its first `period` tokens.
        if len(tail) == tail_length and tail[period:] == tail[:-period]:
            return True
    return False
