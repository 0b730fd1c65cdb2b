"""Text of tokens as they come, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from mars_jax.hub.pretrained import Pretrained


class Detokenizer:
    """Turn a growing list of tokens into text, piece by piece; the pieces joined are the text of the whole.

    Bytes of an unfinished character are held back until it is complete. Only the tokens since the piece before
    last are decoded again, so the cost of a piece does not grow with the text.
    """

    def __init__(self, pretrained: Pretrained, prompt_tokens: Sequence[int]):
        self._decode = pretrained.decode
        # The prompt's tail gives the tokenizer the context in which the first new token joins the text.
        self._tokens = list(prompt_tokens)[-8:]
        self._context, self._read = 0, len(self._tokens)

    def feed(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the text that `tokens` complete. `last` releases what was held back."""
        self._tokens += list(tokens)
        shown = self._decode(self._tokens[self._context : self._read])
        text = self._decode(self._tokens[self._context :])
        if not last and (text.endswith("\N{REPLACEMENT CHARACTER}") or len(text) <= len(shown)):
            return ""
        self._context, self._read = self._read, len(self._tokens)
        return text[len(shown) :]
