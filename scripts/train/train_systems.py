"""Train the proxy of TriSpec for the embedded family.

    python -m scripts.train.train_systems text --stories stories.txt.xz --dialogues dialogues.txt.xz \\
        --output runs/text.txt
    python -m scripts.train.train_systems proxy --output runs/proxy-0
    mars-jax distill model --target tiny/target --from runs/proxy-0 --data runs/text.txt --loss kl+tv \\
        --tokens 3e6 --step-tokens 4096 --learning-rate 3e-3 --output runs/proxy

The proxy is initialised with the first and the last layer of the target, and learns from the target's distributions.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import random
import shutil
from pathlib import Path

from mars_jax import hub
from mars_jax.hub.files import resolve
from mars_jax.lab.training import data
from scripts import common
from scripts.arithmetic import generator
from scripts.train.train_embedded import dialogues, problems

COPIED = (0, 5)
"""Layers of the target that are copied to initialise the proxy."""


def text(args: argparse.Namespace) -> None:
    """Write a text file. About three fifths of its tokens are stories, a quarter arithmetic, and the rest dialogues."""
    mixed = [t for path in args.stories for t in itertools.islice(data.documents(path), args.count)]
    mixed += problems(args.count)
    mixed += generator.drill(args.count // 10)
    talk = [t for path in args.dialogues for t in itertools.islice(dialogues(path), args.count // 8)]
    mixed += talk
    random.Random(0).shuffle(mixed)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(f"\n{data.SEPARATOR}\n".join(mixed) + f"\n{data.SEPARATOR}\n")


def proxy(args: argparse.Namespace) -> None:
    target = hub.load("tiny/target", dtype="float32")
    config = dataclasses.replace(
        target.config,
        num_layers=len(COPIED),
        windows=tuple(target.config.windows[i] for i in COPIED),
    )
    layers = tuple(target.params["layers"][i] for i in COPIED)
    hub.save(args.output, config, {**target.params, "layers": layers})
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(Path(resolve("tiny/target")) / name, args.output)


def main() -> None:
    parser = common.parser(__doc__)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("text")
    command.add_argument("--stories", type=Path, nargs="+", required=True, metavar="FILE")
    command.add_argument("--dialogues", type=Path, nargs="+", required=True, metavar="FILE")
    command.add_argument("--count", type=int, default=12_000, help="number of stories, and of problems")
    command.add_argument("--output", type=Path, required=True)
    command.set_defaults(run=text)
    command = commands.add_parser("proxy")
    command.add_argument("--output", type=Path, required=True)
    command.set_defaults(run=proxy)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
