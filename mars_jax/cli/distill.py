"""`python -m mars_jax.distill`: train a drafter for a target from the command line."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mars_jax import __version__, assets, specs
from mars_jax.cli.program import Parser, command, keep_compilations
from mars_jax.cli.progress import busy
from mars_jax.core.errors import MarsError
from mars_jax.serve.journal import plain, sync_directory

_DESCRIPTION = """\
Train a drafter for a target: an EAGLE-3 head by training-time test, an EAGLE-1 head by
regression, Medusa heads, or a small language model on the target's distributions. What is
written has the published layout, and `generate --draft KIND:OUTPUT` drafts with it.
"""
_EPILOG = """\
examples:
  python -m mars_jax.distill eagle3 --data stories.txt --output heads/mine
  python -m mars_jax.distill model --target PATH --from SMALL --data a.txt b.txt.xz \\
      --write 2000 --loss kl+tv --output drafts/mine

Data are text files, plain, .xz or .gz, whose documents are separated by lines of
<|endoftext|>. Killed and started again with the same arguments, it goes on where its last
checkpoint was; with other arguments it refuses the --work of that run. A plot of loss and
acceptance is beside the checkpoints, in --work.
"""


def parser() -> argparse.ArgumentParser:
    """The parser. Flags of one kind of drafter default to None, so that what was given can be told."""
    made = Parser(
        prog="python -m mars_jax.distill",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    made.add_argument("kind", choices=specs.TRAINED, help="of drafter")
    made.add_argument("--target", default=assets.TARGET, metavar="PATH", help="default: %(default)s")
    made.add_argument("--data", nargs="+", required=True, type=Path, metavar="FILE", help="text to train on")
    made.add_argument(
        "--output", required=True, type=Path, metavar="DIR", help="new directory of the drafter"
    )
    made.add_argument(
        "--work", type=Path, metavar="DIR", help="of the checkpoints (default: OUTPUT-training)"
    )
    made.add_argument(
        "--write",
        type=int,
        metavar="N",
        help="train on N texts that the target itself writes at temperature 1, from the first 16 tokens of the "
        "documents (default: on the documents)",
    )
    made.add_argument("--tokens", type=float, default=2e6, help="to train on (default: %(default)g)")
    made.add_argument("--step-tokens", type=int, default=2048, help="of one step (default: %(default)s)")
    made.add_argument("--length", type=int, default=256, help="tokens of a row (default: %(default)s)")
    made.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    made.add_argument(
        "--loss",
        default="kl",
        help="kl, reverse_kl and tv, or a sum such as kl+0.5*tv (default: %(default)s)",
    )
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--devices", type=int, default=1, help="to divide a step's rows among (default: 1)")
    made.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of what is written"
    )
    group = made.add_argument_group("eagle3 and eagle1")
    group.add_argument("--intermediate-size", type=int, help="of the head's MLP (default: the target's)")
    group = made.add_argument_group("eagle3")
    group.add_argument(
        "--draft-vocab", type=int, metavar="W", help="the W most frequent tokens (default: all)"
    )
    group.add_argument("--steps-ahead", type=int, help="of training-time test (default: 5)")
    group.add_argument("--feature-layers", metavar="I,J,K", help="of the target, 0-based")
    group = made.add_argument_group("medusa")
    group.add_argument("--heads", type=int, help="default: 4")
    group = made.add_argument_group("model")
    group.add_argument("--from", dest="first", metavar="PATH", help="checkpoint of the small model to train")
    return made


_OWN = {
    "intermediate_size": ("eagle3", "eagle1"),
    "draft_vocab": ("eagle3",),
    "steps_ahead": ("eagle3",),
    "feature_layers": ("eagle3",),
    "heads": ("medusa",),
    "first": ("model",),
}


def check(args: argparse.Namespace) -> None:
    """Raise MarsError for values out of range, and for flags of another kind of drafter."""
    for name, kinds in _OWN.items():
        flag = "--from" if name == "first" else "--" + name.replace("_", "-")
        if getattr(args, name) is not None and args.kind not in kinds:
            raise MarsError(f"{flag} does not apply to {args.kind}: leave it out.")
    positive = ("write", "tokens", "step_tokens", "length", "learning_rate", "devices", "intermediate_size")
    for name in (*positive, "draft_vocab", "steps_ahead", "heads"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise MarsError(f"--{name.replace('_', '-')} is {value}: expected a number above 0.")
    if args.kind == "model" and args.first is None:
        raise MarsError("a small model needs a checkpoint to start from: name it with --from.")
    # os.path answers False for paths that the system refuses, of which `free_directory` speaks later.
    if os.path.exists(args.output) and not (os.path.isdir(args.output) and not os.listdir(args.output)):
        raise MarsError(f"'{args.output}' exists and is not an empty directory: choose another --output.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    check(args)

    # From here on jax loads; what is above answers at once.
    import jax

    from mars_jax import hub
    from mars_jax.evaluate.folder import check_writable, claim, digest, fingerprint
    from mars_jax.hub.save import free_directory
    from mars_jax.training import data
    from mars_jax.training.objectives import divergence

    keep_compilations()
    loss = divergence(args.loss)
    if args.devices > len(jax.devices()):
        raise MarsError(f"--devices is {args.devices}: there are {len(jax.devices())}.")
    work = args.work or args.output.with_name(args.output.name + "-training")
    free_directory(args.output, overwrite=False)  # now, and not after hours of training
    check_writable(args.output)
    check_writable(work, flag="--work")
    with busy("loading"):
        target = hub.load(args.target)
        small = None if args.first is None else hub.load(args.first, dtype="float32")
        documents = [text for path in args.data for text in data.documents(path)]
    weights = (target.params, () if small is None else small.params)
    settings = recorded(args) | {
        "data": digest("\0".join(documents).encode()),
        "weights": fingerprint(weights, target.path),
    }
    with claim(work, settings, flag="--work", unrecorded="checkpoints"):
        apprentice, params = _train(args, target, small, documents, loss, work)
        _write(args, apprentice, params, small)
    spec = {"eagle3": "eagle", "eagle1": "eagle"}.get(args.kind, args.kind)
    print(
        f"{args.output}: draft with --draft {spec}:{args.output}; figures and plot in {work}", file=sys.stderr
    )


_NO_MATTER = ("output", "work", "data", "devices", "dtype")
"""Flags that do not decide what is trained: places, where it is computed, what it is cast to; data count by content."""


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that a training is recorded with: all flags but those, also ones that do not exist yet."""
    return {name: plain(value) for name, value in vars(args).items() if name not in _NO_MATTER}


def _train(
    args: argparse.Namespace, target: Any, small: Any, documents: list[str], loss: Any, work: Path
) -> tuple[Any, Any]:
    """The apprentice and its trained params."""
    import jax

    from mars_jax.cli.training_text import training_text
    from mars_jax.pretrained import check_same_vocabulary
    from mars_jax.training import distillation

    stream = training_text(target, documents, work, write=args.write, length=args.length, seed=args.seed)
    print(f"{len(stream.tokens):,} tokens of text", file=sys.stderr)
    common: dict[str, Any] = {"divergence": loss, "seed": args.seed}
    if args.kind == "eagle3":
        ids = None
        if args.draft_vocab not in (None, target.config.vocab_size):
            vocab = target.config.vocab_size
            ids = distillation.draft_vocabulary([stream], args.draft_vocab, vocab, target.stop_tokens)
        apprentice = distillation.eagle3(
            target.config,
            target.params,
            ids=ids,
            layers=_layers(args.feature_layers),
            intermediate_size=args.intermediate_size,
            steps=args.steps_ahead or 5,
            **common,
        )
    elif args.kind == "eagle1":
        apprentice = distillation.eagle1(target.config, intermediate_size=args.intermediate_size, **common)
    elif args.kind == "medusa":
        apprentice = distillation.medusa_heads(target.config, target.params, count=args.heads or 4, **common)
    else:
        check_same_vocabulary(target, small)
        apprentice = distillation.small_model(target.config, small.config, small.params, **common)

    params = distillation.train(
        apprentice,
        target.params,
        [stream],
        work,
        tokens=args.tokens,
        step_tokens=args.step_tokens,
        length=args.length,
        learning_rate=args.learning_rate,
        seed=args.seed,
        devices=jax.devices()[: args.devices],
    )
    return apprentice, params


def _write(args: argparse.Namespace, apprentice: Any, params: Any, small: Any) -> None:
    """Write the drafter, complete or not at all: a kill leaves no half of it at --output."""
    import jax
    import jax.numpy as jnp

    from mars_jax import hub
    from mars_jax.hub.heads.medusa_files import save_medusa

    cast = jax.tree.map(
        lambda x: x.astype(args.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, params
    )
    staging = args.output.with_name(f".{args.output.name}.distilling")
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed; --work is this process's alone
    try:
        made = staging / args.output.name
        if args.kind in ("eagle3", "eagle1"):
            hub.save_eagle(made, apprentice.config, cast)
        elif args.kind == "medusa":
            save_medusa(made, apprentice.config, cast)
        else:
            hub.save(made, apprentice.config, cast)
            _copy_tokenizer(small.path, made)
        made.replace(args.output)
        sync_directory(args.output.absolute().parent)
    except OSError as error:
        raise MarsError(
            f"--output '{args.output}' cannot be written ({error.strerror}): mend that, then run this again."
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _layers(given: str | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    try:
        return tuple(int(part) for part in given.split(","))
    except ValueError:
        raise MarsError(f"--feature-layers is {given}: expected layer numbers such as 1,15,28.") from None


def _copy_tokenizer(source: Path, output: Path) -> None:
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, output / file.name)
