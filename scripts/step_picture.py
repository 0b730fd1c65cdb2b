"""Draw docs/step.svg, what one step of speculative decoding does, from the draft to the tokens that are committed.

python scripts/step_picture.py

Oracle: tests/test_docs.py holds the committed picture to what this draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import common

from mars_jax.lab.pictures import BLACK, BLUE, GREEN, GREY, LIGHT

ROOT = Path(__file__).resolve().parents[1]
PANEL, HEIGHT, TOP = 212, 342, 132
STAGES = {
    "draft": ("a small model", "guesses on"),
    "tree": ("guesses share", "their beginnings"),
    "verify": ("one forward of the target", "says what follows each"),
    "accept": ("guesses that it", "agrees with stay"),
    "commit": ("and one more token,", "the target's own"),
}
TEXT = ("Once", "upon", "a")
NODES = {"a": (28, 84), "time": (96, 46), "hill": (96, 122), ",": (172, 14), "when": (172, 78)}
"""Places in the middle of the tokens of the tree, below `TOP`."""
PARENTS = {"time": "a", "hill": "a", ",": "time", "when": "time"}
SAID = {"a": "time", "time": ",", "hill": ",", ",": "there", "when": "the"}
"""The target's choice after each."""
ACCEPTED = ("a", "time", ",")


def words(
    x: float, y: float, text: str, *, size: int = 13, colour: str = BLACK, weight: str = "normal"
) -> str:
    """A text around a place."""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" font-weight="{weight}">{escape(text)}</text>'


def token(
    x: float, y: float, text: str, colour: str = GREY, *, guess: bool = False, full: bool = False
) -> str:
    """A token in its box: broken lines are guesses, and a full box is settled."""
    width = max(30, 14 + 8 * len(text))
    fill, ink, dash = (
        (colour, "#FFFFFF", "") if full else ("#FFFFFF", BLACK, ' stroke-dasharray="4 3"' if guess else "")
    )
    place = f'x="{x - width / 2:g}" y="{y - 13:g}" width="{width}" height="26" rx="6"'
    box = f'<rect {place} fill="{fill}" stroke="{colour}" stroke-width="1.6"{dash}/>'
    return box + words(x, y + 4.5, text, colour=ink)


def line(x1: float, y1: float, x2: float, y2: float, colour: str = GREY, *, arrow: bool = False) -> str:
    """A line, which may end in an arrow."""
    end = f' marker-end="url(#{colour[1:]})"' if arrow else ""
    return f'<path d="M{x1:g} {y1:g}L{x2:g} {y2:g}" stroke="{colour}" stroke-width="1.8" fill="none"{end}/>'


def tree(x: float, colours: dict[str, str], *, full: Sequence[str] = ()) -> list[str]:
    """The tree, with a colour for each token, and for the edge above it."""
    made = []
    for child, parent in PARENTS.items():
        (x1, y1), (x2, y2) = NODES[parent], NODES[child]
        made.append(line(x + x1, TOP + y1, x + x2, TOP + y2, colours[child]))
    for name, (left, below) in NODES.items():
        guess = name != "a" and name not in full
        made.append(token(x + left, TOP + below, name, colours[name], guess=guess, full=name in full))
    return made


def row(
    x: float, y: float, tokens: Sequence[str], colours: Sequence[str], *, full: bool = False
) -> list[str]:
    """Tokens beside each other."""
    made = []
    for text, colour in zip(tokens, colours, strict=True):
        width = max(30, 14 + 8 * len(text))
        made.append(token(x + width / 2, y, text, colour, full=full))
        x += width + 6
    return made


def model(x: float, y: float, width: float, height: float, name: str, colour: str) -> str:
    """A box that computes."""
    box = f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="8" fill="{colour}"/>'
    return box + words(x + width / 2, y + height / 2 + 4.5, name, colour="#FFFFFF", weight="bold")


def panels() -> list[list[str]]:
    """What each stage shows."""
    left = [number * PANEL + 8 for number in range(len(STAGES))]
    grey = dict.fromkeys(NODES, GREY)
    draft = [
        *row(left[0] + 8, TOP + 122, TEXT, [GREY] * 3),
        line(left[0] + 82, TOP + 104, left[0] + 82, TOP + 84, GREY, arrow=True),
        model(left[0] + 42, TOP + 44, 80, 34, "draft", GREY),
        line(left[0] + 82, TOP + 42, left[0] + 82, TOP + 22, GREY, arrow=True),
        *(
            token(left[0] + x, TOP, text, guess=True)
            for x, text in ((32, "time"), (82, "hill"), (124, ","), (168, "when"))
        ),
    ]
    verify = [model(left[2] + 4, TOP - 42, 188, 34, "target", BLUE), *tree(left[2], grey)]
    for name, (x, y) in NODES.items():
        verify.append(
            words(left[2] + x, TOP + y + 28, f"→ {SAID[name]}", size=12, colour=BLUE, weight="bold")
        )
    found = {name: GREEN if name in ACCEPTED[1:] else LIGHT for name in NODES} | {"a": GREY}
    accept = tree(left[3], found, full=ACCEPTED[1:])
    for name in ("hill", "when"):
        x, y = NODES[name][0] + left[3], NODES[name][1] + TOP
        accept.append(f'<path d="M{x - 9} {y - 9}l18 18m0 -18l-18 18" stroke="#D55E00" stroke-width="2.2"/>')
    commit = [
        *row(left[4] + 8, TOP + 34, TEXT, [GREY] * 3),
        *row(left[4] + 8, TOP + 72, ACCEPTED[1:], [GREEN] * 2, full=True),
        *row(left[4] + 96, TOP + 72, ["there"], [BLUE], full=True),
        words(left[4] + 84, TOP + 116, "3 tokens, 1 forward", weight="bold"),
    ]
    return [draft, tree(left[1], grey), verify, accept, commit]


def svg() -> str:
    """The picture. Its paper is white, so that it is the same on a dark page."""
    width = PANEL * len(STAGES)
    heads = "".join(
        f'<marker id="{colour[1:]}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="5" markerHeight="5" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        for colour in (GREY, BLACK)
    )
    made = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" text-anchor="middle" '
        "font-family=\"Helvetica, Arial, 'DejaVu Sans', sans-serif\">",
        f"<defs>{heads}</defs>",
        f'<rect width="{width}" height="{HEIGHT}" rx="10" fill="#FFFFFF"/>',
    ]
    for number, ((name, told), shown) in enumerate(zip(STAGES.items(), panels(), strict=True)):
        middle = number * PANEL + 104
        made.append(words(middle, 32, f"{number + 1}  {name}", size=18, weight="bold"))
        made += [words(middle, 54 + 16 * i, text, size=13, colour="#555555") for i, text in enumerate(told)]
        if number:
            made.append(line(number * PANEL - 18, 26, number * PANEL + 16, 26, BLACK, arrow=True))
        made += shown
    back = f"M{width - 100} {HEIGHT - 46}V{HEIGHT - 22}H92V{HEIGHT - 40}"
    made.append(
        f'<path d="{back}" stroke="{BLACK}" stroke-width="1.8" fill="none" marker-end="url(#{BLACK[1:]})"/>'
    )
    made.append(words(width / 2, HEIGHT - 28, "and again, from the longer text", size=13, colour="#555555"))
    return "\n".join([*made, "</svg>", ""])


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "docs", help="where step.svg goes")
    (parser.parse_args(argv).folder / "step.svg").write_text(svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
