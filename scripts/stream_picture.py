"""Draw docs/stream.svg, the picture of the README: what `python -m mars_jax.generate` writes on a terminal.

    python scripts/stream_picture.py

The command runs on a terminal of its own, so the colours are those that it writes there; rich turns them into an SVG.
What says how long it took is left out, since it is another number every time.
"""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import common
from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

from mars_jax.cli.generate.terminal import legend
from mars_jax.lab.pictures import ORANGE, PURPLE, SKY, VERMILLION

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 110
PROMPT = "Once upon a time"
ARGUMENTS = ("--max-new-tokens", "83", PROMPT)
INK, PAPER = "#E6E6E6", "#16181B"
BRIGHT = "#FFFFFF"
COLOURS = (PAPER, VERMILLION, "#00B283", ORANGE, SKY, PURPLE, SKY, INK)
"""Of a terminal, from black to white; the palette's green is too dark on a dark ground."""


def on_terminal(arguments: Sequence[str]) -> str:
    """What the command writes to a terminal of `WIDTH` columns; its progress, on stderr, is left out."""
    ours, theirs = pty.openpty()
    terminal = {"TERM": "xterm-256color", "COLUMNS": str(WIDTH), "LINES": "40", "JAX_PLATFORMS": "cpu"}
    environment = {name: value for name, value in os.environ.items() if name != "NO_COLOR"} | terminal
    done = subprocess.Popen(
        [sys.executable, "-m", "mars_jax.generate", *arguments],
        stdout=theirs,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=ROOT,
    )
    os.close(theirs)
    said = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the end of a terminal
            break
        if not piece:
            break
        said += piece
    os.close(ours)
    if done.wait():
        raise SystemExit("the command failed: run it by hand")
    return said.decode("utf-8").replace("\r\n", "\n")


def theme() -> TerminalTheme:
    """The colours as rich takes them; bold ones are the same, but for white."""
    normal = [_rgb(colour) for colour in COLOURS]
    return TerminalTheme(_rgb(PAPER), _rgb(INK), normal, [*normal[:-1], _rgb(BRIGHT)])


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour[1:])
    return red, green, blue


def svg(said: str, arguments: Sequence[str]) -> str:
    """The picture: the command, what it said, and its own legend of the colours."""
    console = Console(
        record=True, width=WIDTH, file=io.StringIO(), color_system="standard", force_terminal=True
    )
    words = (f'"{word}"' if " " in word else word for word in arguments)
    console.print(Text(f"$ mars-jax generate {' '.join(words)}", "bold"))
    console.print(Text.from_ansi(said.rstrip("\n")))
    console.print()
    console.print(legend())
    made = console.export_svg(title="mars-jax", theme=theme(), unique_id="stream")
    # rich names a font on the web; a picture fetches nothing.
    made = re.sub(r"@font-face \{.*?\}\s*", "", made, flags=re.DOTALL)
    return made.replace(
        "Fira Code, monospace", "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
    )


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where stream.svg goes")
    folder = parser.parse_args(argv).folder
    (folder / "stream.svg").write_text(svg(on_terminal(ARGUMENTS), ARGUMENTS), encoding="utf-8")


if __name__ == "__main__":
    main()
