"""What is public, listed in public.json: names with their arguments, commands with their flags, rules and drafters.

    PYTHONPATH=. python tests/test_public.py      write the list again

A name that goes, and an argument or a flag, is a new major version (docs/stability.md); one that comes needs its line.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from pathlib import Path

LIST = Path(__file__).parent / "public.json"
PROMISE = Path(__file__).parent.parent / "docs" / "stability.md"
MOST = 65
"""Names that are promised, at most: what one can read in a minute."""


def arguments(value):
    """Names of the arguments of a function or a class; None where a value has no signature."""
    if inspect.ismodule(value) or not callable(value):
        return None
    try:
        return list(inspect.signature(value).parameters)
    except (TypeError, ValueError):
        return None


def promised():
    """The names of the table in docs/stability.md, as "package.name"."""
    rows = [line for line in PROMISE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    of_names = rows[1 : next(i for i, row in enumerate(rows) if row.startswith("| version"))]
    names = [name for row in of_names for name in re.findall(r"`([\w.]+)`", row)]
    return [name if name.startswith("kernels_pallas.") else f"mars_jax.{name}" for name in names]


def named(full):
    """What is meant by a name. `import mars_jax.generate` puts a module in the function's place."""
    home, _, name = full.rpartition(".")
    package = importlib.import_module(home)
    place = getattr(package, "_HOME", {}).get(name)
    return getattr(importlib.import_module(f"{home}.{place}") if place else package, name)


def public():
    """The list, as it is in this checkout."""
    from mars_jax import specs
    from mars_jax.cli.commands import COMMANDS, parser_of

    made = {"names": {name: arguments(named(name)) for name in sorted(promised())}}
    parsers = {name: parser_of(name) for name in COMMANDS}
    made["commands"] = {
        name: sorted(
            {
                flag
                for one in (parser, *parser.kinds().values())
                for a in one._actions
                for flag in a.option_strings
                if flag.startswith("--")
            }
        )
        for name, parser in parsers.items()
        if parser is not None
    }
    ours = {name: row for name, row in specs.RULES.items() if ".contrib." not in row.factory}
    made["rules"] = {name: sorted(row.settings) for name, row in ours.items()}
    made["drafters"] = {n: [row.spec] for n, row in specs.DRAFTERS.items() if ".contrib." not in row.loader}
    return made


def differences(listed, found):
    """One line for each name, argument, flag or setting that went or came."""
    told = []
    for part in sorted(listed.keys() | found.keys()):
        old, new = listed.get(part, {}), found.get(part, {})
        for name in sorted(old.keys() | new.keys()):
            if name not in new or name not in old:
                told.append(f"{part}: {name} {'is gone' if name in old else 'is new'}")
                continue
            gone, came = (
                set(a or ()) - set(b or ()) for a, b in ((old[name], new[name]), (new[name], old[name]))
            )
            told += [f"{part}: {name} has lost {one}" for one in sorted(gone)]
            told += [f"{part}: {name} has got {one}" for one in sorted(came)]
    return told


def test_what_is_public_is_listed():
    cure = "run PYTHONPATH=. python tests/test_public.py, and say it in CHANGELOG.md"
    assert differences(json.loads(LIST.read_text()), public()) == [], cure


def test_the_promise_is_short_and_kept_by_names_that_are_exported():
    names = promised()
    assert len(set(names)) == len(names) <= MOST
    for full in names:
        home, _, name = full.rpartition(".")
        assert name in importlib.import_module(home).__all__, full


def test_what_goes_and_what_comes_is_told():
    listed = {"p": {"a": ["x", "y"], "b": None}}
    assert differences(listed, listed) == []
    assert differences(listed, {"p": {"a": ["x", "z"], "c": None}}) == [
        "p: a has lost y",
        "p: a has got z",
        "p: b is gone",
        "p: c is new",
    ]


if __name__ == "__main__":
    LIST.write_text(json.dumps(public(), indent=1) + "\n")
    print(f"wrote {LIST}", file=sys.stderr)
