"""Write docs/results.md from the JSON under scripts/results.

    python scripts/results_page.py            # after any script there was run again
    python scripts/results_page.py --check    # exits with 1 where the page is not what the JSON says

The prose is in results_page.md.jinja, every number in the package results_tables. A sentence that the figures must
support is wrapped in `claim(condition, sentence)`: where new figures contradict it, the page is not written, and the
sentence has to be changed first.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jinja2
from results_tables import everything
from results_tables.bars import Bar

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "results.md"
TEMPLATE = "results_page.md.jinja"


def claim(condition: bool, sentence: str) -> str:
    """The sentence, where the figures support it.

    Raises:
      ValueError: they do not.

    >>> claim(1.2 > 1, "It is faster.")
    'It is faster.'
    """
    if not condition:
        raise ValueError(f"the figures do not support '{sentence}': change it in scripts/{TEMPLATE}.")
    return sentence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(["a", "b"], [["1", "2"]]))
    | a | b |
    |---|---|
    | 1 | 2 |
    """
    lines = [header, ["---"] * len(header), *rows]
    texts = ["| " + " | ".join(cells) + " |" for cells in lines]
    return "\n".join([texts[0], "|" + "---|" * len(header), *texts[2:]])


def barred(rows: Sequence[Bar]) -> str:
    """A Markdown table of figures beside the bars that were set for them."""
    return table(["case", "measured", "bar", "met"], [[r.case, r.measured, r.bar, r.met] for r in rows])


def wrapped(text: str) -> str:
    """Markdown with its paragraphs and list items filled to 118 columns; everything else as it is.

    >>> print(wrapped("One\\ntwo.\\n\\n- three\\n  four\\n\\n# five"))
    One two.
    <BLANKLINE>
    - three four
    <BLANKLINE>
    # five
    """
    fenced = re.split(r"(^```.*?^```$)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if part.startswith("```") else _filled(part) for part in fenced)


def _filled(text: str) -> str:
    blocks = re.split(r"(\n{2,})", text)
    return "".join(block if _is_verbatim(block) else _fill(block) for block in blocks)


def _is_verbatim(block: str) -> bool:
    return not block.strip() or block.lstrip("\n").startswith(("|", "#", "!", "<"))


def _fill(block: str) -> str:
    start, end = len(block) - len(block.lstrip("\n")), len(block.rstrip("\n"))
    items = re.split(r"\n(?=- )", block[start:end])
    fill = partial(textwrap.fill, width=118, break_long_words=False, break_on_hyphens=False)
    lines = [fill(" ".join(item.split()), subsequent_indent="  " * item.startswith("- ")) for item in items]
    return block[:start] + "\n".join(lines) + block[end:]


def page() -> str:
    """The whole page."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # Markdown, from our own files
    )
    environment.globals |= {"claim": claim, "table": table, "barred": barred}
    return wrapped(environment.get_template(TEMPLATE).render(everything()))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where the page has drifted"
    )
    parser.add_argument("--page", type=Path, default=PAGE, help="the page to write or check")
    chosen = parser.parse_args(argv)
    wanted = page()
    if not chosen.check:
        chosen.page.write_text(wanted, encoding="utf-8")
        return 0
    found = chosen.page.read_text(encoding="utf-8") if chosen.page.exists() else ""
    lines = difflib.unified_diff(
        found.splitlines(), wanted.splitlines(), str(chosen.page), "scripts/results", lineterm="", n=0
    )
    drift = "\n".join(lines)
    if drift:
        print(f"{drift}\n\nRun python scripts/results_page.py.", file=sys.stderr)
    return 1 if drift else 0


if __name__ == "__main__":
    sys.exit(main())
