"""Tests of the HTML report: it shows the tokens of the rows, escapes all text, and fetches no external content."""

import itertools
import json
import re
from html.parser import HTMLParser

import pytest

pytest.importorskip("matplotlib")

from mars_jax.lab.evaluate.benchmark import plots, report

VOID = {"meta", "br", "hr", "img", "input", "link"}
HOSTILE = (
    "</p></style><script>alert(\"1 & 2\")</script> 'one' &amp; <img src=x onerror=y> \x1b[31m {{ 7 * 7 }}"
)
SHOWN = HOSTILE.replace("\x1b", "\ufffd")
PICTURES = dict.fromkeys(plots.PICTURES, b"a picture")


class Element:
    """HTML element with its attributes, children and text."""

    def __init__(self, tag, attributes=()):
        self.tag, self.attributes, self.children = tag, dict(attributes), []

    @property
    def text(self):
        return "".join(c if isinstance(c, str) else c.text for c in self.children)

    def find(self, tag=None, **attributes):
        """Return all descendants with these attributes; `kind` stands for `class`."""
        required = {("class" if k == "kind" else k.replace("_", "-")): v for k, v in attributes.items()}
        matches = []
        for child in self.children:
            if isinstance(child, Element):
                if tag in (None, child.tag) and required.items() <= child.attributes.items():
                    matches.append(child)
                matches += child.find(tag, **attributes)
        return matches


class Strict(HTMLParser):
    """Parser that builds the tree of a page and rejects tags that are unclosed or closed out of order."""

    def __init__(self, text):
        super().__init__()
        self.open = [Element("root")]
        self.feed(text)
        self.close()
        [self.root] = self.open

    def handle_starttag(self, tag, attrs):
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(self.open[-1].children[-1])

    def handle_startendtag(self, tag, attrs):
        child = Element(tag, attrs)
        assert len(child.attributes) == len(attrs), f"<{tag}> has an attribute twice"
        self.open[-1].children.append(child)

    def handle_endtag(self, tag):
        assert self.open.pop().tag == tag

    def handle_data(self, data):
        self.open[-1].children.append(data)


@pytest.fixture(scope="module")
def read(finished):
    return (finished.path / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def root(read):
    return Strict(read).root


@pytest.fixture(scope="module")
def texts(finished):
    return json.loads((finished.path / "texts.json").read_text())


def completions_of(root):
    """Yield the arm of each completion on the page, in order, with the (kind, text) pairs of its tokens."""
    for arm in root.find("section", kind="arm"):
        [name], [line] = arm.find("h4"), arm.find("p", kind="completion")
        assert all(isinstance(child, Element) for child in line.children), "text that is of no token"
        yield name.text, [(child.attributes["class"], child.text) for child in line.children]


def test_the_coloured_tokens_are_those_of_the_rows(finished, root, texts):
    rows = {(row["temperature"], row["arm"], row["id"]): row for row in finished.rows}
    completions = completions_of(root)
    relaxed = 0
    for table in finished.summary["tables"]:
        for problem in texts[f"jsonl, temperature {table['temperature']:g}"]:
            for name, pieces in problem["arms"].items():
                row = rows[table["temperature"], name, problem["id"]]
                assert "".join(piece for _, piece in pieces) == row["text"][0]
                kinds = [kind for kind, _ in pieces]
                assert kinds.count("relaxed") == row["accepted_relaxed"]
                assert next(completions) == (name, [(kind, report._plain(piece)) for kind, piece in pieces])
                relaxed += row["accepted_relaxed"]
    assert relaxed > 0 and next(completions, None) is None


def test_relaxed_tokens_are_marked_and_not_by_colour_alone(root):
    lines = root.find("p", kind="completion")
    assert {child.tag for line in lines for child in line.find(kind="relaxed")} == {"mark"}
    style = root.find("head")[0].find("style")[0]
    assert re.search(r"\.relaxed \{[^}]*text-decoration: underline", style.text)
    assert "prefers-color-scheme: dark" in style.text


def test_the_tables_are_those_of_the_summary(finished, root):
    tables = root.find("table")
    assert len(tables) == 2 * len(finished.summary["tables"])
    for number, table in enumerate(finished.summary["tables"]):
        key, wide = tables[2 * number : 2 * number + 2]
        columns = [cell.text for cell in key.find("th", scope="col")]
        assert columns == ["arm", "tau", "tokens/s", "speed", "score change"]
        assert [cell.text for cell in wide.find("th", scope="row")] == [arm["arm"] for arm in table["arms"]]
        taus = [row.find("td")[0].text for row in key.find("tbody")[0].find("tr")]
        assert taus == [f"{arm['tau']:.2f}" for arm in table["arms"]]


def test_nothing_is_fetched_and_nothing_runs(read, root):
    everything = root.find()
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {e.tag for e in everything}
    for element in everything:
        for name, value in element.attributes.items():
            assert not name.startswith("on"), name
            if name in ("href", "xlink:href", "src", "srcset", "action", "data"):
                assert value.startswith(("#", "data:image/png;base64,")), value[:80]
    assert set(re.findall(r"url\((.)", read)) <= {"#"} and "@import" not in read
    [policy] = root.find("meta", http_equiv="Content-Security-Policy")
    assert "default-src 'none'" in policy.attributes["content"]


def test_the_page_can_be_read_by_everybody(root):
    ids = [e.attributes["id"] for e in root.find() if "id" in e.attributes]
    assert len(ids) == len({*ids})
    for element in root.find():
        for name in ("href", "xlink:href", "aria-labelledby"):
            if name in element.attributes:
                assert element.attributes[name].removeprefix("#") in ids
    assert root.find("html")[0].attributes["lang"] == "en"
    [title], [heading] = root.find("title"), root.find("h1")
    # The page shows no local folder.
    assert title.text == heading.text == "target drafted by model:target"
    assert [picture.attributes["alt"] for picture in root.find("img")] == list(plots.PICTURES.values())
    levels = [int(e.tag[1]) for e in root.find() if re.fullmatch(r"h\d", e.tag)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(level <= previous + 1 for previous, level in itertools.pairwise(levels))


def test_texts_that_are_markup_stay_texts(finished, texts):
    """Markup in a prompt, a completion, a path or the name of a user's rule is escaped."""
    summary = json.loads(json.dumps(finished.summary))
    summary["settings"]["target"] = summary["settings"]["draft"] = HOSTILE
    summary["notes"] = [HOSTILE]
    for table in summary["tables"]:
        table["task"] = HOSTILE
        table["arms"][2]["arm"] = table["arms"][2]["meaning"] = HOSTILE
    pieces = [("relaxed", HOSTILE), ("corrected", chr(0xD800))]
    problem = {"id": HOSTILE, "prompt": HOSTILE, "arms": {HOSTILE: pieces}}
    page = report.page(summary, {f"{HOSTILE}, temperature 1": [problem]}, PICTURES)
    page.encode("utf-8")
    root = Strict(page).root
    assert not root.find("script") and len(root.find("img")) == len(PICTURES)
    assert "49" not in root.find("h1")[0].text
    assert list(completions_of(root)) == [(SHOWN, [("relaxed", SHOWN), ("corrected", "?")])]
    assert [p.text for p in root.find("p", kind="prompt")] == [SHOWN]
    assert root.find("h3")[0].text == f"Problem {SHOWN}" and SHOWN in root.find("title")[0].text
    assert [c.text for c in root.find("th", scope="row")].count(SHOWN) == 2
    assert "\x1b" not in page
