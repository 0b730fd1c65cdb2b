"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Sequence

from mars_jax.hub.pretrained import Pretrained

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """An incremental detokenizer, whose pieces of text concatenate to the text of all tokens.

    Text that a later token may change is held back: an unfinished character, and with byte fallback a whole run of
    byte tokens, since `tokenizers` replaces every byte of a run that is not valid UTF-8. Only the tokens after the
    second-to-last piece are decoded again, so that the cost of a piece does not grow with the length of the text.
    """

    def __init__(self, pretrained: Pretrained, prompt_tokens: Sequence[int]):
        self._decode = pretrained.decode
        self._invalid_byte = pretrained.invalid_byte
        # Decode the first new token after the end of the prompt, since a tokenizer may drop the space before the very
        # first word. Drop tokens from the front of this context while it contains a partial character.
        context = list(prompt_tokens)[-8:]
        while REPLACEMENT in self._decode(context):
            context.pop(0)
        self._tokens = context
        self._context, self._read = 0, len(context)

    def feed(self, tokens: Sequence[int], *, last: bool = False) -> str:
        """Return the text that `tokens` complete. `last` releases the text that was held back."""
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
        if not text.startswith(
            context_text
        ):  # an invalid byte follows a character of the prompt in the same run of bytes
            return self._decode(self._tokens[self._read :])
        return text[len(context_text) :]

    def _may_change(self) -> bool:
        """Return True if the text ends in a run of byte tokens: an invalid byte would replace the whole run."""
        if self._invalid_byte is None:
            return False
        window = self._tokens[self._context :]
        return not self._decode([*window, self._invalid_byte]).startswith(self._decode(window))
