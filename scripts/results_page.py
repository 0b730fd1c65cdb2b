"""Write the generated pages of results in docs, and scripts/results/README.md, from the JSON in scripts/results.

    python -m scripts.results_page            # after a measurement was repeated
    python -m scripts.results_page --check    # exits with 1 if a page differs from its JSON

The prose of each page is a template in one of the folders next to this script. Its numbers come from `figures()` in
`tables.py` in the same folder. A sentence that depends on the figures is wrapped in `claim(condition, sentence)`: if
new figures contradict it, the page is not written until the sentence is changed.
"""

from __future__ import annotations

import difflib
import importlib
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jinja2

from scripts import common

PAGES = {
    "docs/rules-compared.md": "rules_compared/page.md.jinja",
    "docs/rules-compared-figures.md": "rules_compared/figures.md.jinja",
    "docs/when-it-pays.md": "when_it_pays/page.md.jinja",
    "docs/when-it-pays-figures.md": "when_it_pays/figures.md.jinja",
    "docs/smollm2.md": "smollm2/page.md.jinja",
    "docs/tpu.md": "tpu/page.md.jinja",
    "docs/kernels.md": "kernels/page.md.jinja",
    "scripts/results/README.md": "checks/page.md.jinja",
}
"""The pages and their templates. If a page has the markers below, only the text between them is generated."""
BEGIN = "<!-- figures: written by scripts/results_page.py from the JSON in scripts/results -->\n"
END = "<!-- end of figures -->\n"


def claim(condition: bool, sentence: str) -> str:
    """Return the sentence if the figures support it.

    Raises:
      ValueError: the figures do not support the sentence.

    >>> claim(1.2 > 1, "It is faster.")
    'It is faster.'
    """
    if not condition:
        raise ValueError(f"the figures do not support '{sentence}': change the template in scripts.")
    return sentence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    head, *body = ("| " + " | ".join(cells) + " |" for cells in (header, *rows))
    return "\n".join([head, "|" + "---|" * len(header), *body])


def wrapped(text: str) -> str:
    """Wrap the paragraphs and list items of Markdown at 118 columns; leave everything else unchanged.

    >>> print(wrapped("One\\ntwo.\\n\\n- three\\n  four\\n\\n# five"))
    One two.
    <BLANKLINE>
    - three four
    <BLANKLINE>
    # five
    """
    # Split the text into paragraphs. The separators (code blocks and blank lines) are kept.
    parts = re.split(r"(^```.*?^```$|\n{2,})", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if _is_verbatim(part) else _fill(part) for part in parts)


def _is_verbatim(block: str) -> bool:
    return not block.strip() or block.lstrip("\n").startswith(("```", "|", "#", "!", "<"))


def _fill(block: str) -> str:
    start, end = len(block) - len(block.lstrip("\n")), len(block.rstrip("\n"))
    items = re.split(r"\n(?=- )", block[start:end])
    fill = partial(textwrap.fill, width=118, break_long_words=False, break_on_hyphens=False)
    lines = [fill(" ".join(item.split()), subsequent_indent="  " * item.startswith("- ")) for item in items]
    return block[:start] + "\n".join(lines) + block[end:]


def render(template: str) -> str:
    """Render a template with the figures of its folder, and return the Markdown."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, from our own files
    )
    environment.globals |= {"claim": claim, "table": table, "measured": common.measured}
    figures = importlib.import_module(f"scripts.{Path(template).parent}.tables").figures()
    return wrapped(environment.get_template(template).render(figures))


def page(current: str, figures: str) -> str:
    """Return a page with new figures. If the page has markers, only the text between them is replaced.

    >>> page(f"old\\n{BEGIN}1\\n{END}", "2\\n") == f"old\\n{BEGIN}2\\n{END}"
    True
    """
    if BEGIN not in current:
        return figures
    head, tail = current.split(BEGIN)
    return head + BEGIN + figures + END + tail.split(END)[1]


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page has drifted"
    )
    parser.add_argument(
        "--root", type=Path, default=common.ROOT, help="the checkout whose pages are written or checked"
    )
    args = parser.parse_args(argv)
    drift = []
    for name, template in PAGES.items():
        path = args.root / name
        current = path.read_text(encoding="utf-8") if path.exists() else ""
        expected = page(current, render(template))
        drift += difflib.unified_diff(
            current.splitlines(), expected.splitlines(), name, "scripts/results", lineterm="", n=0
        )
        if not args.check:
            path.write_text(expected, encoding="utf-8")
    if not args.check or not drift:
        return 0
    print("\n".join([*drift, "", "Run python -m scripts.results_page."]), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
