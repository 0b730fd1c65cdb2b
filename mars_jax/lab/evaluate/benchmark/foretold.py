"""The forecast of a pair: the target's own texts, decoded once and kept, and what a draft would be worth along them.

T new tokens of a text, K places of the longest draft, N lengths. Oracle: decodes of the same pairs, in
tests/lab/evaluate/test_forecast.py.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from mars_jax import __version__
from mars_jax.core import activity
from mars_jax.core.errors import MarsError
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.evaluate import forecast
from mars_jax.lab.evaluate.answers import Decoding, check_problems, prompt_tokens
from mars_jax.lab.evaluate.benchmark.arm_loops import by_task
from mars_jax.lab.evaluate.benchmark.arms import ALONE
from mars_jax.lab.evaluate.benchmark.forced import Drafted, Reader, Said, Text, along
from mars_jax.lab.evaluate.benchmark.margins import margin_of
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import open_rows, write_json
from mars_jax.lab.provenance import provenance
from mars_jax.lab.ticking import Progress, Speed, Work
from mars_jax.serve.fingerprint import digest, fingerprint
from mars_jax.serve.rows import RowFile
from mars_jax.serve.session import Session

LENGTHS = tuple(range(1, 13))
"""Lengths of the chains that are forecast."""
LOW = 0.9
"""Ratio z2 / z1 above which a margin is low, as in MARS, arXiv 2601.15498."""
LOSSLESS = {"exact": "greedy drafts", "rejection": "sampled drafts", "block": "sampled drafts, by blocks"}
"""The rules, and what they verify."""


class Counted(NamedTuple):
    """Sums over the texts of a problem."""

    tokens: int
    steps: dict[str, np.ndarray]  # f64[N], expected, by rule
    refused: np.ndarray  # f64[N]; greedy drafts that exact stops
    low: np.ndarray  # f64[N]; those of them where the margin is low
    taken: np.ndarray  # f64[N]; those of these that `mars` takes at a theta of `LOW`
    tree: np.ndarray  # f64[1]; expected steps of exact with a tree; of none 0


def forecasted(
    target: Pretrained,
    draft: str,
    read: Reader,
    problems: Sequence[Problem],
    output: Path,
    *,
    tree: tuple[int, ...] = (),
    cost: float | None = None,
    temperatures: Sequence[float] = (0.0, 1.0),
    max_new_tokens: int = 256,
    batch_size: int = 1,
    seed: int = 0,
    chat: bool = False,
    names: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Decode the texts of a target, which go on after a kill and serve any draft, and write the forecast of one draft.

    Args:
      target: from `mars_jax.load`.
      draft: its name, by which the forecast's file is named.
      read: what reads texts with it, of `forced.reader`.
      problems, temperatures, max_new_tokens, batch_size, seed, chat, progress: as for `evaluate`.
      output: a folder, new, empty, or with the texts of such a run, of any draft.
      tree: children per node at each depth, no deeper than `read` reads: a tree that is forecast beside the chains.
      cost: of drafting a token, in forwards of the target; adds the best length of each rule.
      names: whatever else decides the texts.

    Returns:
      The forecast, as it is in its file.

    Raises:
      MarsError: problems that do not fit the target, or an output of another run.
    """
    if not problems:
        raise MarsError("there are no problems to forecast on: ask for at least 1.")
    check_problems(target, problems, chat=chat)
    tasks = by_task(problems)
    session = Session.of(target, "none", batch_size=min(batch_size, max(map(len, tasks.values()))))
    decoding = Decoding(session=session, chat=chat, max_new_tokens=max_new_tokens)
    settings = {
        "target": target.name,
        **(names or {}),
        "forecast": True,
        "temperatures": list(temperatures),
        "tasks": {task: len(group) for task, group in tasks.items()},
        "max_new_tokens": max_new_tokens,
        "batch_size": batch_size,
        "seed": seed,
        "chat": chat,
        "problems": digest(repr(list(problems)).encode()),
        "weights": fingerprint(target.params, target.path),
        "versions": {"mars-jax": __version__, "jax": jax.__version__},
        "device": f"{jax.device_count()} {jax.devices()[0].device_kind}",
    }
    tables = []
    with contextlib.closing(open_rows(output, settings)) as file:
        try:
            told = progress or (lambda what, done, of, left: None)
            work = Work({"text": len(problems) * len(temperatures)}, told)
            for task, group in tasks.items():
                for temperature in temperatures:
                    texts = list(_texts(decoding, group, temperature, seed, file, work))
                    with activity.doing("reading the texts with draft and target"):
                        counted = count(read, target, texts, temperature, tree)
                    table = {"task": task, "temperature": temperature, "problems": len(group)}
                    table |= figures(counted, seed=seed)
                    if cost is not None:
                        table["best"] = {
                            rule: best(table[rule]["tau"], cost) for rule in LOSSLESS if rule in table
                        }
                    tables.append(table)
        finally:
            file.close()
        shape = "-".join(map(str, tree))
        made = {**provenance(), "settings": settings, "draft": draft, "lengths": list(LENGTHS), "tree": shape}
        made |= {"draft_cost": cost, "tables": tables}
        path = output / name_of(f"{draft} {shape}".strip())
        write_json(path, made)
        path.with_suffix(".md").write_text(markdown(made), encoding="utf-8")
    return made


def name_of(draft: str) -> str:
    """The file of a draft's forecast.

    >>> name_of("model:tiny/draft")
    'forecast_model_tiny_draft.json'
    """
    return f"forecast_{re.sub(r'[^a-zA-Z0-9.-]+', '_', draft)}.json"


def _texts(
    decoding: Decoding, problems: Sequence[Problem], temperature: float, seed: int, file: RowFile, work: Work
) -> Iterator[list[Text]]:
    """The texts of every problem, one for each turn, as the target says them."""
    target = decoding.session.target

    def decode(
        group: Sequence[Problem], seeds: Sequence[int], keys: Sequence[Mapping[str, Any]]
    ) -> list[dict[str, Any]]:
        answers = decoding.answer(ALONE, group, seeds, temperature=temperature)
        return [
            {**key, "seed": s, "text": list(a.texts), "tokens": [list(turn) for turn in a.tokens], "seconds": a.seconds}
            for key, s, a in zip(keys, seeds, answers, strict=True)
        ]  # fmt: skip

    for first in range(0, len(problems), decoding.group):
        group = problems[first : first + decoding.group]
        seeds = [(seed + first + i) % 2**32 for i in range(len(group))]
        keys = [{"task": p.task, "temperature": temperature, "id": p.id} for p in group]
        rows = file.batch(keys, functools.partial(decode, group, seeds, keys))
        seconds, tokens = sum(r["seconds"] for r in rows), sum(len(t) for r in rows for t in r["tokens"])
        said = Speed(emitted=tokens, steps=tokens, seconds=seconds).describe()
        work.add("text", len(group), f"{group[0].task}, temperature {temperature:g}, {said}", seconds)
        for problem, row in zip(group, rows, strict=True):
            texts = []
            for turn, new in enumerate(row["tokens"]):
                prompt = prompt_tokens(target, problem, row["text"][:turn], chat=decoding.chat)
                texts.append(Text((*prompt, *new), len(prompt)))
            yield texts


def count(
    read: Reader,
    target: Pretrained,
    problems: Sequence[Sequence[Text]],
    temperature: float,
    tree: Sequence[int] = (),
) -> list[Counted]:
    """Steps and refusals that a draft would have along the texts of each problem, with chains of `LENGTHS`, and steps
    with a tree, by its children per node at each depth."""
    # All at once, so that texts of like lengths share a forward.
    texts = [text for of_problem in problems for text in of_problem]
    parts = iter(zip(texts, read(texts, temperature), along(target, texts, temperature), strict=True))
    return [
        _total([_count(*next(parts), temperature, target.stop_tokens, tree) for _ in of_problem])
        for of_problem in problems
    ]


def _total(parts: Sequence[Counted]) -> Counted:
    def total(name: str) -> np.ndarray:
        return np.sum([getattr(part, name) for part in parts], axis=0)

    return Counted(
        sum(part.tokens for part in parts),
        {rule: np.sum([part.steps[rule] for part in parts], axis=0) for rule in parts[0].steps},
        **{name: total(name) for name in ("refused", "low", "taken", "tree")},
    )


def _count(
    text: Text,
    drafted: Drafted,
    said: Said,
    temperature: float,
    stops: Sequence[int],
    tree: Sequence[int],
) -> Counted:
    exact = (drafted.rank == 0).astype(np.float64)
    # The place of the text that a draft's k-th token is about; what reaches past the end counts nowhere.
    place = np.minimum(np.add.outer(np.arange(text.new), np.arange(exact.shape[1])), text.new - 1)
    accepts = {"exact": exact}
    if temperature > 0 and drafted.log_q is not None:
        ratio = np.exp(drafted.log_q.astype(np.float64) - said.log_p[place])
        accepts |= {"rejection": forecast.by_token(ratio), "block": forecast.by_block(ratio)}
    begun = {rule: forecast.begun(accept, LENGTHS) for rule, accept in accepts.items()}

    low = (margin_of("ratio", said.z1, said.z2) > LOW)[place]
    best, own = said.best[place], np.asarray(text.tokens[text.prompt :])[place]
    # As `mars` does: a draft that is one of the two best passes, unless a stop token is among what it decides on.
    barred = np.isin(drafted.tokens, stops) | np.isin(best, stops) | np.isin(own, stops)
    second = (drafted.tokens == best) | (drafted.tokens == said.second[place])
    there = drafted.tokens >= 0
    where = {"refused": there, "low": there & low, "taken": there & low & second & ~barred}
    # A node's children are the draft's likeliest tokens after it, and those before it on the path are the text's.
    depth = len(tree)
    inside = (drafted.rank[:, :depth] < np.asarray(tree, np.int32)).astype(np.float64)
    return Counted(
        text.new,
        {rule: begin.sum(axis=0) for rule, begin in begun.items()},
        **{name: forecast.refused(exact, begun["exact"], LENGTHS, chosen) for name, chosen in where.items()},
        tree=forecast.begun(inside, [depth]).sum(axis=0) if depth else np.zeros(1),
    )


def figures(counted: Sequence[Counted], *, seed: int = 0) -> dict[str, Any]:
    """Tau of every rule and shares of refusals, lists over `LENGTHS`, with 95% intervals over problems.

    Args:
      counted: of n problems.
      seed: of the bootstrap.
    """
    tokens = np.asarray([[one.tokens] * len(LENGTHS) for one in counted])
    refused = np.asarray([one.refused for one in counted])
    found: dict[str, Any] = {"tokens": sum(one.tokens for one in counted)}
    for rule in counted[0].steps:
        found[rule] = _listed(
            "tau", *forecast.ratio_of_sums(tokens, np.asarray([one.steps[rule] for one in counted]), seed)
        )
    trees = np.asarray([one.tree for one in counted])
    if trees.any():
        found["tree"] = _listed("tau", *forecast.ratio_of_sums(tokens[:, :1], trees, seed))
    for name in ("low", "taken"):
        above = np.asarray([getattr(one, name) for one in counted])
        found[name] = _listed("share", *forecast.ratio_of_sums(above, refused, seed))
    return found


def best(tau: Sequence[float], cost: float) -> dict[str, Any]:
    """`length` of a chain that gives the most tokens in the time of a target forward, and how many `tokens`; 0 is no
    draft. A forward is taken to cost the same for a token and for a chain, as on an accelerator with few rows.

    Args:
      tau: of the lengths 1, 2, ...
      cost: of drafting a token, in forwards of the target.

    >>> best([1.5, 1.75], 0.25), best([1.5, 1.75], 0.5)
    ({'length': 1, 'tokens': 1.2}, {'length': 0, 'tokens': 1.0})
    """
    tokens = [of / (1 + cost * length) for length, of in enumerate([1.0, *tau])]
    length = int(np.argmax(tokens))
    return {"length": length, "tokens": tokens[length]}


def _listed(name: str, values: np.ndarray, interval: np.ndarray | None) -> dict[str, Any]:
    """For JSON; None where a ratio is none."""
    there = [bool(x) for x in np.isfinite(values)]
    bounds = [None] * len(values) if interval is None else interval.tolist()
    return {
        name: [x if known else None for x, known in zip(values.tolist(), there, strict=True)],
        "interval": [x if known else None for x, known in zip(bounds, there, strict=True)],
    }


def markdown(made: Mapping[str, Any]) -> str:
    """The tables for people."""
    lines = [f"# {made['draft']} for {made['settings']['target']}, forecast", ""]
    for table in made["tables"]:
        rules = [rule for rule in LOSSLESS if rule in table]
        columns = ["tokens drafted", *(f"tau, {rule}" for rule in rules), "low", "mars takes"]
        lines += [
            f"## {table['task']}, temperature {table['temperature']:g}",
            "",
            f"{table['problems']} problems, {table['tokens']} tokens.",
            "",
            "| " + " | ".join(columns) + " |",
            "|---:" * len(columns) + "|",
        ]
        for at, length in enumerate(made["lengths"]):
            cells = [str(length), *(_cell(table[rule], "tau", at, "{:.2f}") for rule in rules)]
            cells += [_cell(table[name], "share", at, "{:.1%}") for name in ("low", "taken")]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
        if "tree" in table:
            lines += [
                f"The tree {made['tree']}: tau {_cell(table['tree'], 'tau', 0, '{:.2f}')} under exact.",
                "",
            ]
        for rule, found in table.get("best", {}).items():
            what = f"chains of {found['length']}" if found["length"] else "no draft"
            lines += [
                f"At {made['draft_cost']:g} target forwards for a drafted token, best under {rule}: {what}, "
                f"{found['tokens']:.2f} times the speed of plain decoding.",
                "",
            ]
    told = [rule for rule in LOSSLESS if any(rule in table for table in made["tables"])]
    lines += [f"- tau, {rule}: tokens per step with {LOSSLESS[rule]}" for rule in told]
    lines += [
        f"- low: share of the greedy drafts' refusals where z2 / z1 is above {LOW}",
        f"- mars takes: share of them that mars at theta = {LOW} accepts instead",
    ]
    return "\n".join([*lines, ""])


def _cell(of: Mapping[str, Any], name: str, at: int, form: str) -> str:
    value, interval = of[name][at], of["interval"][at]
    if value is None:
        return "-"
    low_high = "" if interval is None else f" [{', '.join(form.format(x) for x in interval)}]"
    return form.format(value) + low_high
