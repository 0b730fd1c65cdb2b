"""Generate arithmetic word problems with worked answers, and write the two files that the package ships.

    python -m scripts.arithmetic.generator

The wording is low-margin: names, objects and phrasings are drawn at random, independently of the problem. The numbers
are high-margin: one wrong digit makes the answer wrong. The kinds of steps and the numbers of a problem determine its
split, so no evaluation problem is a rephrased training problem. Single facts such as 7 * 8 occur in both splits. As in
GSM8K (arXiv 2110.14168), answers end with `####` and the result.

Tests: tests/lab/evaluate/test_arithmetic.py.
"""

import hashlib
import json
import lzma
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

COUNTS = {"train": 4096, "eval": 1300}
"""Number of problems in the file of each split."""
FOLDER = Path(__file__).resolve().parents[2] / "mars_jax" / "lab" / "evaluate" / "tasks"


class Kind(NamedTuple):
    """One kind of step, with the phrases that state it, ask for its result and work it out."""

    name: str
    sign: str
    tell: list[str]
    ask: list[str]
    work: list[str]
    pair: bool = False  # the step introduces a second person
    last: bool = False  # no step can follow this one

    @property
    def opens(self) -> bool:
        """True if the step can start a story without an opening sentence."""
        return self.sign == "*" and not self.pair


WORDS = tomllib.loads(Path(__file__).with_name("words.toml").read_text(encoding="utf-8"))
KINDS = [Kind(**kind) for kind in WORDS["kinds"]]


@dataclass(frozen=True)
class Exercise:
    """A question, its worked answer, which ends in `#### result`, and the result."""

    question: str
    answer: str
    result: int


def problem(index: int, *, split: str, seed: int = 0) -> Exercise:
    """Return problem `index` of the split "train" or "eval". The same arguments always return the same problem."""
    rng = Random(f"{split}/{seed}/{index}")
    steps = _steps(rng)
    while _split(steps) != split:
        steps = _steps(rng)
    return _worded(steps, rng)


def generate(count: int, *, split: str, seed: int = 0) -> Iterator[Exercise]:
    """Generate the first `count` problems of a split."""
    return (problem(index, split=split, seed=seed) for index in range(count))


def drill(count: int, *, seed: int = 0) -> Iterator[str]:
    """Generate lines of 16 bare equations, which cover every fact that a step of a problem can need.

    A word problem takes about 75 tokens to state one or two facts, whereas a drill consists only of facts.
    """
    # `_equation` draws mostly sums and differences, because there are 4,843 of them but only 144 products and
    # quotients.
    for index in range(count):
        rng = Random(f"drill/{seed}/{index}")
        yield ", ".join(_equation(rng) for _ in range(16))


class _Step(NamedTuple):
    kind: Kind
    left: int
    right: int
    result: int


def _steps(rng: Random) -> list[_Step]:
    """Draw one to three steps, each of which is applied to the result of the previous step."""
    [count] = rng.choices((1, 2, 3), (40, 40, 20))
    kinds = _kinds(count, rng)
    while True:
        left, steps = rng.randint(2, 9 if kinds[0].sign == "*" else 30), []
        for kind in kinds:
            if not (choices := _operands(kind.sign, left)):
                break
            right = rng.choice(choices)
            result = _result(left, kind.sign, right)
            steps.append(_Step(kind, left, right, result))
            left = result
        else:
            return steps


def _kinds(number: int, rng: Random) -> list[Kind]:
    """Draw kinds of steps that form a story: products first, final steps last, and at most two people."""
    kinds: list[Kind] = []
    for i in range(number):
        paired = any(kind.pair for kind in kinds)
        fits = [
            kind
            for kind in KINDS
            if (kind.sign != "*" or i == 0)
            and (not kind.last or i == number - 1)
            and not (kind.pair and paired)
        ]
        kinds.append(rng.choice(fits))
    return kinds


def _operands(sign: str, left: int) -> Sequence[int]:
    """Return the right-hand operands that keep results in 1..100, within the multiplication table up to 10 * 9."""
    if sign == "+":
        return range(2, min(30, 100 - left) + 1)
    if sign == "-":
        return range(2, min(30, left - 1) + 1)
    if sign == "*":
        return range(2, 10)
    return [right for right in range(2, 10) if left % right == 0 and left // right <= 10]


def _result(left: int, sign: str, right: int) -> int:
    return {"+": left + right, "-": left - right, "*": left * right, "/": left // right}[sign]


def _equation(rng: Random) -> str:
    while True:
        [sign] = rng.choices("+-*/", (47, 47, 3, 3))
        left = rng.randint(2, 9 if sign == "*" else 100)
        if choices := _operands(sign, left):
            right = rng.choice(choices)
            return f"{left} {sign} {right} = {_result(left, sign, right)}"


def _key(steps: list[_Step]) -> str:
    """Return a string of the kinds of steps and the numbers of a problem, such as `gain 5/lose 3/12`."""
    return "/".join([*(f"{step.kind.name} {step.right}" for step in steps), str(steps[0].left)])


def _split(steps: list[_Step]) -> str:
    """Return the split of a problem. A hash of the key assigns about a tenth of all problems to evaluation."""
    return "train" if hashlib.sha256(_key(steps).encode()).digest()[0] % 10 else "eval"


def _worded(steps: list[_Step], rng: Random) -> Exercise:
    """Express the problem in words that are drawn independently of its numbers."""
    people = [
        (rng.choice(WORDS["girls"].split()), "she", "her", "her"),
        (rng.choice(WORDS["boys"].split()), "he", "his", "him"),
    ]
    rng.shuffle(people)
    thing, box, tray = (rng.choice(WORDS[nouns].split()) for nouns in ("things", "boxes", "trays"))

    def say(phrases: list[str], step: _Step) -> str:
        """Return one of the phrases with its slots filled."""
        (who, he, his, him), (second, *_) = people
        return rng.choice(phrases).format(
            who=who, he=he, his=his, him=him, other=second, left=step.left, k=step.right,
            kin=rng.choice(WORDS["kin"].split()),
            times="twice" if step.right == 2 else f"{step.right} times",
            eq=f"{step.left} {step.kind.sign} {step.right} = {step.result}",
            things=_noun(2, thing), noun=_noun(step.result, thing), before=_noun(step.left, thing),
            boxes=_noun(2, box), trays=_noun(2, tray), tray=_noun(step.result, tray),
        )  # fmt: skip

    story, work = [] if steps[0].kind.opens else [say(WORDS["openings"], steps[0])], []
    for step in steps:
        story.append(say(step.kind.tell, step))
        work.append(say(step.kind.work, step))
        if step.kind.name == "sell":
            thing = "coin"
        if step.kind.pair and not step.kind.last:
            people.reverse()
    scene = rng.choice(WORDS["scenes"])
    story[0] = f"{scene}, {story[0]}"
    story.append(say(steps[-1].kind.ask, steps[-1]))
    result = steps[-1].result
    return Exercise(_sentences(story), f"{_sentences(work)}\n#### {result}", result)


def _sentences(parts: list[str]) -> str:
    return " ".join(part[0].upper() + part[1:] for part in parts)


def _noun(number: int, noun: str) -> str:
    """Return a noun in the singular or plural, as the count requires."""
    if number == 1:
        return noun
    return noun + ("es" if noun.endswith(("x", "sh", "ch", "s")) else "s")


def main() -> None:
    for split, count in COUNTS.items():
        rows = [{"question": p.question, "answer": p.answer} for p in generate(count, split=split)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (FOLDER / f"arithmetic_{split}.jsonl.xz").write_bytes(lzma.compress(text.encode()))


if __name__ == "__main__":
    main()
