"""The run of `mars-jax distill`: models load, --work is claimed, and what is made appears at --output complete."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp

from mars_jax import hub
from mars_jax.cli.flags import HOSTS
from mars_jax.cli.open_target import open_mesh
from mars_jax.cli.progress import busy
from mars_jax.contrib.drafters.system_files import NGRAM
from mars_jax.core.errors import MarsError, say
from mars_jax.hub.durable import sync
from mars_jax.hub.files import resolve
from mars_jax.hub.pretrained import Pretrained
from mars_jax.hub.save import free_directory
from mars_jax.lab.commands.distill_features import check_dumps, dump_settings, train_on_features
from mars_jax.lab.commands.distill_heads import HEADS, chosen_vocabulary, feature_layers, layers_of
from mars_jax.lab.commands.distill_systems import SYSTEMS, open_small, rewarded
from mars_jax.lab.commands.training_text import training_text
from mars_jax.lab.folder import check_writable, claim, studying
from mars_jax.lab.training import data, distillation
from mars_jax.lab.training.objectives import divergence
from mars_jax.placement import hosts
from mars_jax.serve.fingerprint import digest, fingerprint
from mars_jax.serve.rows import plain

_NO_MATTER = ("output", "work", "data", "features", "devices", "mesh", "dtype", "layout", *HOSTS)
"""Flags that do not decide what is trained: places, where it is computed, what it is cast to. Data and features count
by content."""


def distill(args: argparse.Namespace, out: IO[str]) -> None:
    """Make what `args.kind` names, and write it to `args.output`.

    Raises:
      MarsError: flags that do not fit the models or this machine, or --work is of another run.
    """
    work = args.work or args.output.with_name(args.output.name + "-training")
    with studying(args, work, out, without="checkpoints") as (_, folder):
        _distill(args, folder)


def _distill(args: argparse.Namespace, work: Path) -> None:
    # Refused now, and not when the models are loaded.
    if args.loss is not None:
        divergence(args.loss)
    layers_of(args.feature_layers)
    if args.devices is not None and args.devices > len(jax.devices()):
        raise MarsError(f"--devices is {args.devices}: there are {len(jax.devices())}.")
    free_directory(args.output, overwrite=False)
    check_writable(args.output)
    check_writable(work, flag="--work")
    documents = [text for path in args.data or () for text in data.documents(path)]
    for dump in args.features or ():
        dump_settings(dump)
    if args.task is not None:
        rewarded(args.task)
    if args.first not in (None, NGRAM):
        resolve(args.first, weights=False)
    with busy("loading"):
        # Features are of the bfloat16 model, and say so.
        mesh = None if args.mesh is None else open_mesh(args.mesh, hub.outline(args.target).config)
        target = hub.load(args.target, dtype=None if args.features is None else "bfloat16", mesh=mesh)
        first: Any = None
        if args.first is not None:
            first = open_small(args) if args.kind in SYSTEMS else HEADS[args.kind].open(args.first, target)
    weights = (target.params, () if first is None else first.params)
    settings = recorded(args) | {
        "data": digest("\0".join(documents).encode()),
        "weights": fingerprint(weights, target.path),
    }
    if args.features is not None:
        settings["features"] = check_dumps(args, target, feature_layers(args, target, first))
    make: Callable[..., None] = SYSTEMS.get(args.kind, _train)
    with claim(work, settings, flag="--work"):
        make(args, target, first, documents, work)
    if args.kind == "diversed":
        say(f"{args.output}: verify with --verify diversed:{args.output}")
        return
    spec = {"eagle3": "eagle", "eagle1": "eagle"}.get(args.kind, args.kind)
    say(f"{args.output}: draft with --draft {spec}:{args.output}; figures and plot in {work}")


def recorded(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that a training is recorded with: all flags but those, also ones that do not exist yet."""
    # On a plateau the rate does not depend on how long the training is to be; `training.loop.fit` refuses it later.
    free = _NO_MATTER if args.features is None else (*_NO_MATTER, "tokens")
    return {name: plain(value) for name, value in vars(args).items() if name not in free}


def _train(
    args: argparse.Namespace, target: Pretrained, first: Any, documents: Sequence[str], work: Path
) -> None:
    """Train a head, or a small model, on text or on features, and write it."""
    if args.features is not None:
        _write(args, *train_on_features(args, target, first, documents, work), first)
        return
    stream = training_text(target, documents, work, write=args.write, length=args.length, seed=args.seed)
    say(f"{len(stream.tokens):,} tokens of text")
    apprentice = HEADS[args.kind].begin(args, target, first, chosen_vocabulary(args, target, [stream]))
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
    _write(args, apprentice, params, first)


def _write(args: argparse.Namespace, apprentice: Any, params: Any, first: Any) -> None:
    """Write the drafter, complete or not at all: a kill leaves no half of it at --output."""
    if not hosts.is_first():
        return
    cast = jax.tree.map(
        lambda x: x.astype(args.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, jax.device_get(params)
    )
    staging = args.output.with_name(f".{args.output.name}.distilling")
    shutil.rmtree(staging, ignore_errors=True)  # of a run that was killed; --work is this process's alone
    try:
        made = staging / args.output.name
        HEADS[args.kind].save(made, apprentice.config, cast, args, first)
        made.replace(args.output)
        sync(args.output.absolute().parent)
    except OSError as error:
        raise MarsError(
            f"--output '{args.output}' cannot be written ({error.strerror}): fix that, then run this again."
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
