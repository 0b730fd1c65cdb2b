"""The counter of hard English and empty names finds planted ones, at their lines."""

from scripts.tools import prose

MODULE = '''"""A module.

Of a rule the state, and what a rule keeps.
"""

SIZE = 3  # a size alone

# This comment is
# anew in two lines.


def rate(found, size):
    made = size
    raise ValueError(f"the table says {size}")
'''
PAGE = """# Heading that tells

A page without `told` and [links](page.md#what-is-told). What a page tells.

| what | told |

```sh
# texts
```
"""


def habits(path, text):
    path.write_text(text)
    return [
        (line, habit)
        for line, sentence in prose.sentences(path)
        for habit, (_, pattern) in prose.HABITS.items()
        if prose.re.search(pattern, sentence, prose.re.IGNORECASE)
    ]


def test_docstrings_comments_and_messages_of_a_module_are_read(tmp_path):
    assert sorted(habits(tmp_path / "module.py", MODULE)) == [
        (3, "'what' as a noun"),
        (3, "a sentence that begins with 'Of' or 'Whether'"),
        (6, "'alone' for 'only', 'go on' for 'continue'"),
        (8, "rare adverbs"),
        (14, "things that speak"),
    ]
    names = prose.assigned_names(tmp_path / "module.py")
    assert [name for _, name in names if prose.EMPTY_NAME.fullmatch(name)] == ["found", "made"]


def test_pages_are_read_without_code_tables_headings_and_link_targets(tmp_path):
    assert habits(tmp_path / "page.md", PAGE) == [(3, "'what' as a noun"), (3, "things that speak")]
