"""`mars-jax distill`: train a drafter for a target from the command line."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from mars_jax import __version__, assets, specs
from mars_jax.cli.flags import HOSTS, add_host_flags, check_host_flags
from mars_jax.cli.program import Parser, command, keep_compilations
from mars_jax.cli.progress import busy
from mars_jax.core.errors import MarsError, say
from mars_jax.lab.commands.distill_layers import layers_of
from mars_jax.serve.journal import plain, sync_directory

_DESCRIPTION = """\
Train a drafter for a target: an EAGLE-3 head by training-time test, an EAGLE-1 head by
regression, Medusa heads, a DFlash or DSpark head by masked blocks, a small language model on
the target's distributions, SPRINTER's classifier on a small model, or VIA-SD's choice of the
target's layers. What is written has the published layout, where there is one, and `generate
--draft KIND:OUTPUT` drafts with it.
"""
_EPILOG = """\
examples:
  mars-jax distill eagle3 --data stories.txt --output heads/mine
  mars-jax distill model --target PATH --from SMALL --data a.txt b.txt.xz \\
      --write 2000 --loss kl+tv --output drafts/mine

Data are text files, plain, .xz or .gz, whose documents are separated by lines of
<|endoftext|>. Killed and started again with the same arguments, it goes on where its last
checkpoint was; with other arguments it refuses the --work of that run. A plot of loss and
acceptance is beside the checkpoints, in --work.
"""


def parser() -> argparse.ArgumentParser:
    """The parser. Flags of one kind of drafter default to None, so that what was given can be told."""
    made = Parser(
        prog="mars-jax distill",
        description=_DESCRIPTION,
        epilog=_EPILOG,
    )
    made.add_argument("--version", action="version", version=f"mars-jax {__version__}")
    made.add_argument(
        "kind",
        choices=(*specs.TRAINED, "features"),
        help="of drafter, or features: what eagle3 --features trains on",
    )
    group = made.add_argument_group("what is trained, on what")
    group.add_argument("--target", default=assets.TARGET, metavar="PATH", help="default: %(default)s")
    group.add_argument(
        "--data",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="text to train on; beside --features: text that counts too where --draft-vocab is chosen",
    )
    group.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="new directory of the drafter, or of the features",
    )
    group.add_argument(
        "--work", type=Path, metavar="DIR", help="of the checkpoints (default: OUTPUT-training)"
    )
    group.add_argument(
        "--write",
        type=int,
        metavar="N",
        help="train on N texts that the target itself writes at temperature 1, from the first 16 tokens of the "
        "documents (default: on the documents)",
    )
    group = made.add_argument_group("training")
    group.add_argument("--tokens", type=float, default=2e6, help="to train on (default: %(default)g)")
    group.add_argument("--step-tokens", type=int, default=2048, help="of one step (default: %(default)s)")
    group.add_argument("--length", type=int, default=256, help="tokens of a row (default: %(default)s)")
    group.add_argument("--learning-rate", type=float, default=1e-3, help="default: %(default)s")
    group.add_argument(
        "--loss",
        default="kl",
        help="kl, reverse_kl and tv, or a sum such as kl+0.5*tv (default: %(default)s)",
    )
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--devices", type=int, default=1, help="to divide a step's rows among (default: 1)")
    group.add_argument(
        "--mesh",
        metavar="data=2,model=4",
        help="instead of --devices: the target divided over model, and a step's rows over data, so that a head of a "
        "target that no device holds can be trained",
    )
    group.add_argument(
        "--dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of what is written"
    )
    add_host_flags(made)
    group = made.add_argument_group("eagle3, eagle1 and dflash")
    group.add_argument("--intermediate-size", type=int, help="of the head's MLPs (default: the target's)")
    group = made.add_argument_group("eagle3 and dflash")
    group.add_argument(
        "--draft-vocab", type=int, metavar="W", help="the W most frequent tokens (default: all)"
    )
    group.add_argument(
        "--layout",
        help="of the head's files: speculators, or of eagle3 eagle, which SGLang reads, and of dflash dflash, which "
        "z-lab's code reads (default: eagle, dflash)",
    )
    group = made.add_argument_group("eagle3")
    group.add_argument("--steps-ahead", type=int, help="of training-time test (default: 5)")
    group.add_argument(
        "--features",
        nargs="+",
        type=Path,
        metavar="DIR",
        help="train on these; an epoch begins with the shards that are there by then. A run can be prolonged: "
        "--tokens may change until its rate begins to fall",
    )
    group = made.add_argument_group("eagle3, dflash and features")
    group.add_argument("--feature-layers", metavar="I,J,K", help="of the target, 0-based")
    group = made.add_argument_group("features")
    group.add_argument("--chat", action="store_true", default=None, help="the target answers each document")
    group.add_argument(
        "--temperatures", metavar="T,U", help="of the answers, which take turns (default: 0,1)"
    )
    group.add_argument("--shard", type=int, metavar="N", help="documents of a shard (default: 128)")
    group = made.add_argument_group("medusa")
    group.add_argument("--heads", type=int, help="default: 4")
    group = made.add_argument_group("dflash")
    group.add_argument(
        "--block-size", type=int, help="tokens that are drafted at once, and one (default: 16)"
    )
    group.add_argument("--head-layers", type=int, help="layers of the head (default: 5)")
    group.add_argument(
        "--mask-token",
        type=int,
        metavar="ID",
        help="stands for what is drafted (default: the token that begins a text)",
    )
    group.add_argument(
        "--markov-rank",
        type=int,
        metavar="R",
        help="DSpark: correct each token by the one before (default: no)",
    )
    group.add_argument(
        "--confidence",
        action="store_true",
        default=None,
        help="DSpark: learn where a draft should end (--draft-stop)",
    )
    group = made.add_argument_group("eagle3, model, sprinter, via_sd and diversed")
    group.add_argument(
        "--from",
        dest="first",
        metavar="PATH",
        help="checkpoint of the small model to train, or of an EAGLE-3 head that is to learn on; of the others, of the "
        "model that drafts (via_sd: ngram is the default)",
    )
    group = made.add_argument_group("via_sd")
    group.add_argument(
        "--left-out", type=float, metavar="SHARE", help="of the target's sublayers (default: 0.45)"
    )
    group.add_argument("--evaluations", type=int, metavar="N", help="masks to try at most (default: 128)")
    group = made.add_argument_group("diversed")
    group.add_argument(
        "--task",
        metavar="NAME[=PATH]",
        help="whose answers are rewarded, as for mars_jax.benchmark (default: arithmetic, the training part)",
    )
    group.add_argument("--updates", type=int, metavar="N", help="of the head (default: 40)")
    return made


_SYSTEMS = ("sprinter", "via_sd", "diversed")
_OWN = {
    "intermediate_size": ("eagle3", "eagle1", "dflash"),
    "draft_vocab": ("eagle3", "dflash"),
    "steps_ahead": ("eagle3",),
    "feature_layers": ("eagle3", "dflash", "features"),
    "features": ("eagle3",),
    "layout": ("eagle3", "dflash"),
    "block_size": ("dflash",),
    "head_layers": ("dflash",),
    "mask_token": ("dflash",),
    "markov_rank": ("dflash",),
    "confidence": ("dflash",),
    "chat": ("features",),
    "temperatures": ("features",),
    "shard": ("features",),
    "heads": ("medusa",),
    "first": ("eagle3", "model", "sprinter", "via_sd", "diversed"),
    "task": ("diversed",),
    "updates": ("diversed",),
    "left_out": ("via_sd",),
    "evaluations": ("via_sd",),
}


def check(args: argparse.Namespace) -> None:
    """Raise MarsError for values out of range, and for flags of another kind of drafter."""
    for name, kinds in _OWN.items():
        flag = "--from" if name == "first" else "--" + name.replace("_", "-")
        if getattr(args, name) is not None and args.kind not in kinds:
            raise MarsError(f"{flag} does not apply to {args.kind}: leave it out.")
    if args.data is None and args.features is None and args.kind != "diversed":
        either = " or --features" if args.kind == "eagle3" else ""
        raise MarsError(f"there is no text to learn from: give --data{either}.")
    if args.data is not None and args.features is not None and args.draft_vocab is None:
        raise MarsError(
            "--data beside --features is the text of a draft vocabulary: give --draft-vocab, or leave it out."
        )
    first = "dflash" if args.kind == "dflash" else "eagle"
    if args.layout not in (None, first, "speculators"):
        raise MarsError(f"--layout is {args.layout}: expected {first} or speculators.")
    if args.block_size is not None and args.block_size < 2:
        raise MarsError(
            f"--block-size is {args.block_size}: expected at least 2, the first being the last token."
        )
    if args.mask_token is not None and args.mask_token < 0:
        raise MarsError(f"--mask-token is {args.mask_token}: expected a token of the target's vocabulary.")
    if args.kind == "features":
        _unused(
            args,
            ("write", "devices", "mesh", "tokens", "step_tokens", "learning_rate", "loss", "dtype", "work"),
            "features",
        )
        if args.temperatures is not None and args.chat is None:
            raise MarsError(
                "--temperatures does not apply to documents that are read as they are: give --chat."
            )
    if args.kind == "eagle3" and args.first is not None:
        _unused(
            args,
            ("draft_vocab", "intermediate_size", "feature_layers"),
            "a head of --from, which has its own",
        )
    if args.features is not None:
        _unused(args, ("length", "devices", "mesh", "write"), "--features")
    check_host_flags(args)
    if args.mesh is not None and args.devices != 1:
        raise MarsError(
            "--devices does not apply with --mesh, which names the devices: leave one of them out."
        )
    positive = ("write", "tokens", "step_tokens", "length", "learning_rate", "devices", "intermediate_size")
    counts = ("draft_vocab", "steps_ahead", "heads", "shard", "head_layers", "markov_rank", "updates")
    for name in (*positive, *counts, "left_out", "evaluations"):
        value = getattr(args, name)
        if value is not None and not 0 < value < float("inf"):
            raise MarsError(f"--{name.replace('_', '-')} is {value}: expected a number above 0.")
    for name in ("heads", "steps_ahead"):  # each drafts one more token in a row
        if getattr(args, name) is not None:
            specs.REQUEST["num_draft_tokens"].check(getattr(args, name), shown=f"--{name.replace('_', '-')}")
    specs.REQUEST["seed"].check(args.seed, shown="--seed")
    if args.kind in _SYSTEMS:
        _unused(args, ("write", "devices", "mesh", "learning_rate", "loss", "dtype"), args.kind)
    if args.kind == "diversed":
        _unused(args, ("data", "tokens", "step_tokens", "length"), args.kind)
    if args.kind in ("model", "sprinter", "diversed") and args.first is None:
        what = (
            "a small model needs a checkpoint to start from"
            if args.kind == "model"
            else (f"{args.kind} needs the small model that drafts")
        )
        raise MarsError(f"{what}: name it with --from.")
    # os.path answers False for paths that the system refuses, of which `free_directory` speaks later.
    if (
        args.kind != "features"
        and os.path.exists(args.output)
        and not (os.path.isdir(args.output) and not os.listdir(args.output))
    ):
        raise MarsError(f"'{args.output}' exists and is not an empty directory: choose another --output.")


def _unused(args: argparse.Namespace, names: Sequence[str], what: str) -> None:
    """Raise MarsError for flags that do not apply, where they are given."""
    defaults = parser()
    for name in names:
        if getattr(args, name) != defaults.get_default(name):
            raise MarsError(f"--{name.replace('_', '-')} does not apply to {what}: leave it out.")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command(lambda argv: parser().parse_args(argv), _run, argv)


def _run(args: argparse.Namespace, out: IO[str]) -> None:
    check(args)
    if args.kind == "features":
        from mars_jax.lab.commands.distill_features import write_features

        write_features(args)
        return

    # From here on jax loads; what is above answers at once.
    from mars_jax.cli.host_flags import studying

    keep_compilations()
    work = args.work or args.output.with_name(args.output.name + "-training")
    with studying(args, work, out, without="checkpoints") as (_, folder):
        _distill(args, folder)


def _distill(args: argparse.Namespace, work: Path) -> None:
    import jax

    from mars_jax import hub
    from mars_jax.cli.mesh_flags import open_mesh
    from mars_jax.hub.save import free_directory
    from mars_jax.lab.commands.distill_features import check_dumps, train_on_features
    from mars_jax.lab.commands.distill_head import feature_layers, open_head
    from mars_jax.lab.training import data
    from mars_jax.lab.training.objectives import divergence
    from mars_jax.serve.folder import check_writable, claim, digest, fingerprint

    loss = divergence(args.loss)
    if args.devices > len(jax.devices()):
        raise MarsError(f"--devices is {args.devices}: there are {len(jax.devices())}.")
    free_directory(args.output, overwrite=False)  # now, and not after hours of training
    check_writable(args.output)
    check_writable(work, flag="--work")
    with busy("loading"):
        # Features are of the bfloat16 model, and say so.
        mesh = None if args.mesh is None else open_mesh(args.mesh, hub.outline(args.target).config)
        target = hub.load(args.target, dtype=None if args.features is None else "bfloat16", mesh=mesh)
        dtype = "float32" if args.kind == "model" else None
        small = head = None
        if args.first is not None and args.kind == "eagle3":
            head = open_head(args.first, target)
        elif args.first not in (None, "ngram"):
            small = hub.load(args.first, dtype=dtype)
        documents = [text for path in args.data or () for text in data.documents(path)]
    first = small or head
    weights = (target.params, () if first is None else first.params)
    settings = recorded(args) | {
        "data": digest("\0".join(documents).encode()),
        "weights": fingerprint(weights, target.path),
    }
    if args.features is not None:
        settings["features"] = check_dumps(args, target, feature_layers(args, target, head))
    with claim(work, settings, flag="--work", unrecorded="checkpoints"):
        if args.kind in _SYSTEMS:
            from mars_jax.lab.commands.distill_systems import write_system

            write_system(args, target, small, documents, work)
        elif args.features is None:
            _write(args, *_train(args, target, first, documents, loss, work), small)
        else:
            _write(args, *train_on_features(args, target, head, documents, loss, work), small)
    if args.kind == "diversed":
        say(f"{args.output}: verify with --verify diversed:{args.output}")
        return
    spec = {"eagle3": "eagle", "eagle1": "eagle"}.get(args.kind, args.kind)
    say(f"{args.output}: draft with --draft {spec}:{args.output}; figures and plot in {work}")


_NO_MATTER = ("output", "work", "data", "features", "devices", "mesh", "dtype", "layout", *HOSTS)
"""Flags that do not decide what is trained: places, where it is computed, what it is cast to. Data and features count
by content."""


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that a training is recorded with: all flags but those, also ones that do not exist yet."""
    # On a plateau the rate does not depend on how long the training is to be; `training.loop.fit` refuses it later.
    free = _NO_MATTER if args.features is None else (*_NO_MATTER, "tokens")
    return {name: plain(value) for name, value in vars(args).items() if name not in free}


def _train(
    args: argparse.Namespace, target: Any, first: Any, documents: list[str], loss: Any, work: Path
) -> tuple[Any, Any]:
    """The apprentice and its trained params; `first` is what it begins as, if that is given."""
    import jax

    from mars_jax.hub.pretrained import check_same_vocabulary
    from mars_jax.lab.commands import distill_head
    from mars_jax.lab.commands.training_text import training_text
    from mars_jax.lab.training import block_training, distillation, head_training

    stream = training_text(target, documents, work, write=args.write, length=args.length, seed=args.seed)
    say(f"{len(stream.tokens):,} tokens of text")
    common: dict[str, Any] = {"divergence": loss, "seed": args.seed}
    ids = None
    if args.draft_vocab not in (None, target.config.vocab_size):
        vocab = target.config.vocab_size
        ids = distillation.draft_vocabulary([stream], args.draft_vocab, vocab, target.stop_tokens)
    if args.kind == "eagle3":
        apprentice = distill_head.apprentice(args, target, first, loss, ids)
    elif args.kind == "eagle1":
        apprentice = head_training.new_eagle1(
            target.config, intermediate_size=args.intermediate_size, **common
        )
    elif args.kind == "dflash":
        apprentice = block_training.new_dflash(
            target.config,
            target.params,
            ids=ids,
            layers=layers_of(args.feature_layers),
            depth=args.head_layers or 5,
            block_size=args.block_size or 16,
            mask_token=args.mask_token,
            from_anchor=bool(args.markov_rank or args.confidence),
            markov_rank=args.markov_rank or 0,
            confidence=bool(args.confidence),
            intermediate_size=args.intermediate_size,
            **common,
        )
    elif args.kind == "medusa":
        apprentice = head_training.new_medusa(target.config, target.params, count=args.heads or 4, **common)
    else:
        check_same_vocabulary(target, first)
        apprentice = distillation.small_model(target.config, first.config, first.params, **common)

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
        mesh=target.mesh,
    )
    return apprentice, params


def _write(args: argparse.Namespace, apprentice: Any, params: Any, small: Any) -> None:
    """Write the drafter, complete or not at all: a kill leaves no half of it at --output."""
    import jax
    import jax.numpy as jnp

    from mars_jax import hub
    from mars_jax.hub.heads.medusa_files import save_medusa
    from mars_jax.placement import hosts

    if not hosts.is_first():
        return
    cast = jax.tree.map(
        lambda x: x.astype(args.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, jax.device_get(params)
    )
    staging = args.output.with_name(f".{args.output.name}.distilling")
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed; --work is this process's alone
    try:
        made = staging / args.output.name
        if args.kind in ("eagle3", "eagle1"):
            layout = args.layout or "eagle"
            hub.save_eagle(made, apprentice.config, cast, layout=layout, verifier=str(args.target))
        elif args.kind == "dflash":
            layout = args.layout or "dflash"
            hub.save_dflash(made, apprentice.config, cast, layout=layout, verifier=str(args.target))
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


def _copy_tokenizer(source: Path, output: Path) -> None:
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, output / file.name)
