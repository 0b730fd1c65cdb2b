"""Terminal output: text and statistics. The environment variable NO_COLOR turns colours off."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import IO, NoReturn

from rich.color import ColorSystem
from rich.console import Console
from rich.style import Style
from rich.text import Text

from mars_jax.serve.requests import Completion, total_metrics

STYLES = {"exact": "green", "relaxed": "bold yellow", "trusted": "magenta", "corrected": "cyan"}
"""Styles of the tokens of a `Said`, by kind."""
_MEANING = {
    "exact": "drafted, and the target's choice",
    "relaxed": "drafted, a near tie of the target",
    "trusted": "drafted, accepted without a test",
    "corrected": "the target's own",
}
# Text from a model or a file must not control the terminal. Show its control characters as replacement characters.
_CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}


class _Console(Console):
    def on_broken_pipe(self) -> NoReturn:
        """Raise the error, where rich would exit."""
        raise BrokenPipeError


def console(file: IO[str]) -> Console:
    """Return a console that writes text unchanged."""
    return _Console(
        file=file,
        highlight=False,
        markup=False,
        emoji=False,
        soft_wrap=True,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
    )


class TextPrinter:
    """A printer of prompts and their continuations, one prompt after another."""

    def __init__(self, out: Console, *, colours: bool):
        self._out = out
        self.colours = colours and out.color_system is not None
        self._last = ""

    def prompt(self, text: str, *, chat: bool) -> None:
        """Print a prompt. Its continuation follows directly, or on a new line in a chat."""
        if self._last:  # an empty line between two prompts
            text = f"\n{text}"
        self._write(f"{text}\n" if chat else text, "dim")

    def piece(self, kind: str, text: str) -> None:
        """Print the next piece of the continuation."""
        self._write(text, STYLES[kind] if self.colours else "")

    def end(self) -> None:
        """End the continuation with a newline."""
        if not self._last.endswith("\n"):
            self._write("\n")

    def _write(self, text: str, style: str = "") -> None:
        # Do not print through rich, which expands tabs and drops carriage returns.
        if not text:
            return
        self._last = text
        if self._out.is_terminal:
            text = text.translate(_CONTROLS)
        if style and self._out.color_system is not None:
            text = Style.parse(style).render(text, color_system=ColorSystem.STANDARD)
        self._out.file.write(text)
        self._out.file.flush()


def legend(width: int, *, trusts: bool = False) -> Text:
    """Return an explanation of the colours: on one line if it fits into `width` columns, otherwise one line per colour.

    Args:
      width: columns of the terminal.
      trusts: whether drafts may have `trusted` nodes, which are accepted without verification.
    """
    shown_kinds = [kind for kind in _MEANING if trusts or kind != "trusted"]
    kind_texts = [Text(kind, STYLES[kind]) + Text(f" {_MEANING[kind]}") for kind in shown_kinds]
    line = Text("   ").join(kind_texts)
    return line if line.cell_len <= width else Text("\n").join(kind_texts)


def line_of(completion: Completion, *, drafts: bool, read: int) -> str:
    """Describe an answer in one line.

    `read` is the number of its prompt tokens that were prefilled; the others were in the KV cache.
    """
    metrics, num_tokens = completion.metrics, len(completion.tokens)
    line = f"{num_tokens} tokens in {completion.seconds:.2f} s, {completion.tokens_per_second:.1f} tokens/s"
    if drafts:
        line += f", tau {metrics.tau:.2f}, {metrics.accepted} of {metrics.proposed} drafted accepted"
    if metrics.accepted_relaxed:
        line += f" ({metrics.accepted_relaxed} relaxed)"
    return f"{line}; read {read} of {len(completion.request.prompt_tokens)} prompt tokens"


def statistics(completions: Sequence[Completion], seconds: float, rule: str, *, drafts: bool) -> str:
    """Return the totals of a run as lines of text."""
    metrics = total_metrics(completions)
    rate = metrics.emitted / max(seconds, 1e-9)
    lines = [
        f"{metrics.emitted} tokens in {seconds:.2f} s, {rate:.1f} tokens/s, {metrics.steps} steps, rule {rule}"
    ]
    if drafts:
        histogram_text = "  ".join(f"{depth}: {count}" for depth, count in enumerate(metrics.depth_histogram))
        trusted_text = f", {metrics.accepted_trusted} trusted" if metrics.accepted_trusted else ""
        lines += [
            f"tau {metrics.tau:.2f} tokens per step with the correction or bonus token, "
            f"{metrics.tau_without_bonus:.2f} without",
            f"drafted {metrics.proposed}, accepted {metrics.accepted} ({metrics.acceptance_rate:.1%}): "
            f"{metrics.accepted_exact} exact, {metrics.accepted_relaxed} relaxed{trusted_text}",
            f"steps by draft tokens accepted  {histogram_text}",
        ]
    lines.append(f"regret {metrics.regret_per_token:.4f} nats per token below the target's best")
    return "\n".join(lines)
