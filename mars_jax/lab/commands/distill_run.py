"""The run of `mars-jax distill`: load models, claim --work, train, and write a complete result to --output."""

from __future__ import annotations

import argparse
import importlib.util
import shutil
from collections.abc import Sequence
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
from mars_jax.lab.commands import distill_heads
from mars_jax.lab.commands.distill_features import check_dump, dump_settings
from mars_jax.lab.commands.distill_systems import SYSTEMS, rewarded
from mars_jax.lab.commands.training_text import training_text
from mars_jax.lab.folder import check_writable, claim, joined_with_folder
from mars_jax.lab.training import data, distillation
from mars_jax.lab.training.loop import CHECKPOINTS, refuse_version_0_1
from mars_jax.lab.training.objectives import divergence
from mars_jax.placement import hosts
from mars_jax.serve.fingerprint import digest, fingerprint
from mars_jax.serve.rows import plain

_NO_MATTER = ("output", "work", "data", "features", "mesh", "dtype", "layout", *HOSTS)
"""Flags that do not change the training: paths, devices, and the dtype of the result. The contents of files count."""


def distill(args: argparse.Namespace, out: IO[str]) -> None:
    """Train a drafter of `args.kind` and write it to `args.output`.

    Raises:
      MarsError: flags that do not fit the models or this machine, or --work is of another run.
    """
    work = args.work or args.output.with_name(args.output.name + "-training")
    with joined_with_folder(args, work, out, without=CHECKPOINTS) as folder:
        _distill(args, folder)


def _distill(args: argparse.Namespace, work: Path) -> None:
    for package in ("grain", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise MarsError(f'distill needs the package {package}: pip install "mars-jax[train]".')
    # Refuse wrong arguments before the models load.
    if args.loss is not None:
        divergence(args.loss)
    distill_heads.layers_of(args.feature_layers)
    free_directory(args.output, overwrite=False)
    check_writable(args.output)
    check_writable(work, flag="--work")
    refuse_version_0_1(work)
    documents = [text for path in args.data or () for text in data.documents(path)]
    for dump in args.features or ():
        dump_settings(dump)
    if args.task is not None:
        rewarded(args.task)
    if args.first not in (None, NGRAM):
        resolve(args.first, weights=False)
    with busy("loading"):
        # Features are those of the target in bfloat16, and its fingerprint too.
        mesh = None if args.mesh is None else open_mesh(args.mesh, hub.outline(args.target).config)
        target = hub.load(args.target, dtype=None if args.features is None else "bfloat16", mesh=mesh)
        first = None
        if args.first is not None and (args.kind, args.first) != ("via_sd", NGRAM):
            first = distill_heads.open_first(args, target)
    weights = (target.params, () if first is None else first.params)
    settings = {name: plain(value) for name, value in vars(args).items() if name not in _NO_MATTER}
    settings |= {
        "data": digest("\0".join(documents).encode()),
        "weights": fingerprint(weights, target.path),
    }
    if args.features is not None:
        layers = distill_heads.feature_layers(args, target, first)
        fingerprint_of_target = fingerprint((target.params,), target.path)
        settings["features"] = [check_dump(dump, layers, fingerprint_of_target) for dump in args.features]
    with claim(work, settings, flag="--work"):
        make = SYSTEMS.get(args.kind, _train)
        make(args, target, first, documents, work)
    if args.kind == "diversed":
        say(f"{args.output}: verify with --verify diversed:{args.output}")
        return
    spec = "eagle" if args.kind in ("eagle1", "eagle3") else args.kind
    figures = "figures" if args.kind in SYSTEMS else "figures and plot"
    say(f"{args.output}: draft with --draft {spec}:{args.output}; {figures} in {work}")


def _train(
    args: argparse.Namespace, target: Pretrained, first: Any, documents: Sequence[str], work: Path
) -> None:
    """Train a head, or a small model, on text or on features, and write it."""
    options = {name: getattr(args, name) for name in ("tokens", "step_tokens", "learning_rate", "seed")}
    if args.features is not None:
        streams = [data.stream(documents, target.tokenizer.backend_tokenizer)] if documents else []
        ids = distill_heads.draft_vocabulary(args, target, streams)
        apprentice = distill_heads.start(args, target, first, ids)
        params = distillation.train_on_features(apprentice, target.params, args.features, work, **options)
    else:
        stream = training_text(target, documents, work, write=args.write, length=args.length, seed=args.seed)
        say(f"{len(stream.tokens):,} tokens of text")
        ids = distill_heads.draft_vocabulary(args, target, [stream])
        apprentice = distill_heads.start(args, target, first, ids)
        params = distillation.train(
            apprentice, target.params, [stream], work, length=args.length, mesh=target.mesh, **options
        )
    if hosts.is_first():
        _write(args, apprentice.config, params, first)


def _write(args: argparse.Namespace, config: Any, params: Any, first: Any) -> None:
    """Write the drafter, complete or not at all: a kill leaves no half of it at --output."""
    cast = jax.tree.map(
        lambda x: x.astype(args.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, jax.device_get(params)
    )
    staging = args.output.with_name(f".{args.output.name}.distilling")
    shutil.rmtree(staging, ignore_errors=True)  # of a killed run; this process has locked --work
    try:
        result = staging / args.output.name
        distill_heads.save(result, args, config, cast, first)
        result.replace(args.output)
        sync(args.output.absolute().parent)
    except OSError as error:
        raise MarsError(
            f"--output '{args.output}' cannot be written ({error.strerror}): fix that, then run this again."
        ) from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)
