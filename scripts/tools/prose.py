"""Count the habits that make English hard to read, and names that carry no information.

    python -m scripts.tools.prose             # fails above the limits below
    python -m scripts.tools.prose --list      # also prints the matches

It reads docstrings, comments and the messages of raised errors in the packages, and the pages in docs/. A match is only
a hint, since no word is forbidden: rewrite the sentence instead of replacing the word. This module needs only the
standard library.

Tests: tests/test_prose.py.
"""

from __future__ import annotations

import argparse
import ast
import collections
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("mars_jax", "kernels_pallas")
PAGES = ("docs", "README.md", "CONTRIBUTING.md")
MOST, MOST_IN_FOLDER, MOST_NAMES = 5.0, 8.0, 1.0
"""Limits: weighted matches per 1,000 words, overall and per folder, and uninformative names in % of assigned names."""
HABITS = {
    "'what' as a noun": (2, r"(?<!no matter )\bwhat(?:ever)?\b(?! (?:is|are|does|do|happens)\b[^.]*\?)"),
    "things that speak": (2, r"\b(?:says?|said|tells?|told|hears?|wants?|asked|asks (?:for|of))\b"),
    "'alone' for 'only', 'go on' for 'continue'": (2, r"\balone\b|\b(?:go|goes|went) on\b"),
    "'texts' for 'strings' or 'completions'": (1, r"\btexts\b"),
    "a preposition before a relative pronoun": (
        1,
        r"\b(?:of|by|from|in|to|at|as|with) (?:which|whose|whom)\b",
    ),
    "'nobody', 'somebody', 'whoever', 'nothing of'": (1, r"\b(?:nobody|somebody|whoever|nothing of)\b"),
    "rare adverbs": (2, r"\b(?:besides?|lately|hence|anew|likewise|thereby|therein)\b"),
    "'is to' for 'must' or 'will'": (1, r"\b(?:is|are|was|were) to \w+"),
    "a sentence that begins with 'Of' or 'Whether'": (3, r"(?:^|[.;] )(?:Of|As of|Who|Whose|Whether) \w+"),
    "'of its own' for 'separate'": (1, r"\bof (?:its|their|one's) own\b"),
}
"""(weight of a match, pattern) of each habit, by name."""
EMPTY_NAME = re.compile(
    "made|found|given|own|said|told|chosen|asked|wanted|known|kept|held|taken|shown|left|whole|plain|rest|here|there|of"
    "|at|one|what|before|after|above|below|under|over|near|others?|ours|mine|each|most|more|few|some|two|alone|now"
    "|again|way|how|done|seen|got"
)
"""Names that do not describe the value they are assigned."""


def sentences(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, sentence) for each sentence of a file, with code replaced by X and without link targets."""
    source = path.read_text(encoding="utf-8")
    for line, paragraph in _of_module(source) if path.suffix == ".py" else _paragraphs(source, 1):
        prose = re.sub(r"`[^`]*`", "X", re.sub(r"\]\([^)]*\)", "]", paragraph))
        for sentence in re.split(r"(?<=[.!?;]) +(?=[A-Z(])", prose):
            yield line, sentence


def _of_module(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield from _paragraphs(str(node.value.value), node.lineno)
        elif isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            strings = [n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant)]
            yield node.lineno, " ".join(s for s in strings if isinstance(s, str))
    comments = [
        (token.start[0], token.string.lstrip("#! "))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    ]
    # Group comments on consecutive lines into paragraphs. Within a paragraph, line number minus index is constant.
    blocks: dict[int, list[tuple[int, str]]] = collections.defaultdict(list)
    for index, (line, text) in enumerate(comments):
        blocks[line - index].append((line, text))
    for block in blocks.values():
        yield block[0][0], " ".join(text for _, text in block)


def _paragraphs(text: str, first: int) -> Iterator[tuple[int, str]]:
    """Yield (line, paragraph) for each paragraph of a text, leaving out code, examples, tables and headings."""
    block: list[str] = []
    fenced = False
    for line, content in enumerate([*text.split("\n"), ""], first):
        content = content.strip()
        fenced ^= content.startswith("```")
        if fenced or not content or content.startswith(("```", ">>>", "...", "|", "#", "<", "![")):
            if block:
                yield line - len(block), " ".join(block)
            block = []
        else:
            block.append(content)


def assigned_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, name) for each parameter and assigned name in a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def main() -> None:
    parser = argparse.ArgumentParser(description="Count habits of hard English and empty names.")
    parser.add_argument("--list", action="store_true", help="print every match")
    listed = parser.parse_args().list
    modules = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    pages = [p for page in PAGES for p in (sorted((ROOT / page).glob("*.md")) or [ROOT / page])]

    words: collections.Counter[str] = collections.Counter()
    scores: collections.Counter[str] = collections.Counter()
    for path in [*modules, *pages]:
        place = path.relative_to(ROOT)
        first, *inner = place.parts
        folder = f"{first}/{inner[0]}" if len(inner) > 1 else first
        for line, sentence in sentences(path):
            words[folder] += len(re.findall(r"\w+", sentence))
            for habit, (weight, pattern) in HABITS.items():
                if count := len(re.findall(pattern, sentence, re.IGNORECASE)):
                    scores[folder] += weight * count
                    if listed:
                        print(f"{place}:{line}: {habit}: {sentence}")
    names = [(path, *name) for path in modules for name in assigned_names(path)]
    empty = [(path, line, name) for path, line, name in names if EMPTY_NAME.fullmatch(name)]
    if listed:
        for path, line, name in empty:
            print(f"{path.relative_to(ROOT)}:{line}: empty name: {name}")

    rates = {folder: 1000 * scores[folder] / count for folder, count in words.items()}
    worst = max(rates, key=rates.__getitem__)
    rate, share = 1000 * scores.total() / words.total(), 100 * len(empty) / len(names)
    print(f"{rate:.1f} matches per 1,000 words (at most {MOST})")
    print(f"{rates[worst]:.1f} in {worst} (at most {MOST_IN_FOLDER} in one folder)")
    print(f"{share:.2f}% empty names (at most {MOST_NAMES})")
    if rate > MOST or rates[worst] > MOST_IN_FOLDER or share > MOST_NAMES:
        sys.exit(
            "The prose or the names exceed a limit: `python -m scripts.tools.prose --list` prints the places."
        )


if __name__ == "__main__":
    main()
