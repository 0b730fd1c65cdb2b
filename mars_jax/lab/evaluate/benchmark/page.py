"""The report of a benchmark as one page of HTML that needs nothing else: no network, no script, no other file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from mars_jax.lab.evaluate.benchmark import plots, table

TEMPLATE = "report.html.jinja"
LEGEND = {
    "exact": "drafted, as the target would say",
    "relaxed": "drafted, the target's near tie",
    "trusted": "drafted, taken without a test",
    "corrected": "the target's own",
}
"""The kinds of tokens."""
# Not allowed in HTML, and nothing that text of a model should put into a page.
_CONTROLS = {c: "\N{REPLACEMENT CHARACTER}" for c in [*range(32), *range(127, 160)] if chr(c) not in "\n\t"}


def render(summary: Mapping[str, Any], texts: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The page.

    Args:
      summary: the content of summary.json.
      texts: that of texts.json.
      pictures: SVG by the names of `plots.drawn`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        undefined=jinja2.StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["plain"] = plain
    return environment.get_template(TEMPLATE).render(
        title=f"{plots.pair(summary['settings'])}, measured",
        facts=table.facts(summary),
        notes=summary["notes"],
        tables=[
            {
                "heading": table.heading(found),
                "about": table.about(found),
                "key": table.key(found),
                "rows": [
                    table.cells(arm, found["metric"]) | {"meaning": arm["meaning"]} for arm in found["arms"]
                ],
                "texts": [_problem(problem) for problem in texts.get(table.heading(found), [])],
            }
            for found in summary["tables"]
        ],
        columns=table.COLUMNS,
        plots=[
            {"words": words, "svg": inlined(pictures[name], Path(name).stem, words)}
            for name, words in plots.drawn(summary).items()
        ],
        of_plots=table.of_plots(summary),
        legend=LEGEND,
        settings=_settings({**summary["settings"], **summary["environment"]}),
    )


def _settings(given: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The chosen settings, and the machine; a setting left to its default is None and left out.

    >>> _settings({"draft": "ngram", "tree": None, "thetas": [0.9]})
    [('draft', 'ngram'), ('thetas', '[0.9]')]
    """
    return [
        (name.replace("_", " "), value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        for name, value in given.items()
        if value is not None
    ]


def _problem(problem: Mapping[str, Any]) -> dict[str, Any]:
    """A prompt, and of each arm the tokens that complete some text, with their kinds, and how many there are of a
    kind."""
    said = {
        name: {
            "tokens": [
                (kind, piece) for kind, piece in zip(arm["kinds"], arm["pieces"], strict=True) if piece
            ],
            "counts": _counts(arm["kinds"]),
        }
        for name, arm in problem["arms"].items()
    }
    return {"id": problem["id"], "prompt": problem["prompt"], "arms": said}


def _counts(kinds: Sequence[str]) -> str:
    """
    >>> _counts(["exact", "relaxed", "exact"])
    '3 tokens: 2 exact, 1 relaxed'
    """
    counted = ", ".join(f"{kinds.count(kind)} {kind}" for kind in LEGEND if kind in kinds)
    return f"{len(kinds)} tokens: {counted}"


def plain(text: str) -> str:
    """A text that any page can hold: control characters and halves of characters are shown as a replacement.

    >>> plain("a\\x1b[1m" + chr(0xD800))
    'a\ufffd[1m?'
    """
    return text.translate(_CONTROLS).encode("utf-8", "replace").decode("utf-8")


def inlined(svg: str, name: str, words: str) -> Markup:
    """An SVG as an element of a page: without its prolog and its metadata, its ids its own, described by `words`.

    >>> str(inlined('<?xml?><svg width="9"><g id="a"/><use href="#a" fill="url(#a)"/></svg>', "p", "two & one"))
    '<svg role="img" aria-label="two &amp; one" width="9"><g id="p-a"/><use href="#p-a" fill="url(#p-a)"/></svg>'
    """
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'href="#', f'href="#{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-")
    described = Markup('<svg role="img" aria-label="{}"').format(words)
    return described + Markup(svg.removeprefix("<svg"))
