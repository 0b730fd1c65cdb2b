"""Functions that open the target, drafter and mesh selected by the flags, and join the processes of a run."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax
from jax.sharding import Mesh

from mars_jax import drafters, hub
from mars_jax.drafters.registry import DraftSpec
from mars_jax.drafters.shared_tokens import shared_tokens
from mars_jax.hub.converted import is_converted
from mars_jax.hub.files import resolve
from mars_jax.hub.pretrained import Pretrained
from mars_jax.models import ModelConfig
from mars_jax.models.shardings import parse_mesh, replication_notes
from mars_jax.utils import hosts
from mars_jax.utils.errors import MarsError, first_line


def open_target(args: argparse.Namespace, sketch: Pretrained) -> Pretrained:
    """Load the weights of a target.

    Raises:
      MarsError: --no-check is given for a target without checksums; see also `hub.load` and `open_mesh`.
    """
    if args.no_check and not is_converted(sketch.path):
        raise MarsError(
            f"--no-check does not apply to '{args.target}', which is not a conversion and has no checksums: leave "
            "it out."
        )
    return hub.load(
        args.target,
        dtype=args.dtype,
        mesh=open_mesh(args.mesh, sketch.config),
        check=not args.no_check,
        cache_dtype=args.cache_dtype,
        attention=args.attention or "auto",
        prefill_chunk=args.prefill_chunk,
    )


def open_drafter(
    args: argparse.Namespace,
    target: Pretrained,
    *,
    samples: bool,
    num_draft_tokens: int | None = None,
    draft_size: str | None = None,
) -> drafters.LoadedDrafter:
    """Load the drafter that the flags select; see `drafters.load`.

    Args:
      args, target: the flags, and the target that they select.
      samples: whether the drafter samples its tokens instead of taking the most probable ones.
      num_draft_tokens, draft_size: override the flags if given.
    """
    return drafters.load(
        args.draft,
        target,
        num_draft_tokens=num_draft_tokens or args.num_draft_tokens,
        tree=args.tree,
        sample=samples,
        dtype=args.dtype,
        draft_size=draft_size or args.draft_size or "fixed",
        any_rule=bool(args.any_rule),
        head_embed=args.head_embed or "own",
    )


def open_mesh(text: str | None, config: ModelConfig) -> Mesh | None:
    """Build the mesh that --mesh describes. Print notes about arrays that do not divide evenly over it.

    Raises:
      MarsError: see `parse_mesh` and `hosts.check_mesh`.
    """
    if text is None:
        return None
    mesh = parse_mesh(text)
    hosts.check_mesh(mesh)
    for sentence in replication_notes(config, mesh):
        print(f"note: {sentence}", file=sys.stderr)
    return mesh


def check_file(path: str, shown: str) -> None:
    """Raise MarsError if a file does not exist.

    Args:
      path: path of the file or of a pipe.
      shown: the flag and its value, for the message.
    """
    if not Path(path).exists() or Path(path).is_dir():
        raise MarsError(f"{shown}, and there is no such file: check the path.")


def check_draft(target: Pretrained, draft: DraftSpec) -> None:
    """Check, without loading weights, that a draft exists and that a draft model shares tokens with the target.

    Print a note if the tokenizers differ.

    Raises:
      MarsError: the draft does not exist; see also `hub.outline` and `shared_tokens`.
    """
    path = draft.path
    # A head is compared with the target when the head's weights are loaded. Here, check only that the head exists, and
    # download its checkpoint from the hub without the weights.
    if draft.kind != "model":
        if draft.checkpoint:
            resolve(draft.checkpoint, weights=False)
        elif path:
            check_file(path, f"--draft is {draft.kind}:{path}")
        return
    shared_vocab = shared_tokens(target, hub.outline(path))
    if shared_vocab is not None:
        print(
            f"note: '{path}' has a different tokenizer and drafts the {shared_vocab.count:,} of the target's "
            f"{target.config.vocab_size:,} tokens that it shares.",
            file=sys.stderr,
        )


@contextlib.contextmanager
def joined_processes(args: argparse.Namespace, rows: object, out: IO[str]) -> Iterator[IO[str]]:
    """Join the other processes of a run if it has a mesh, and yield the output stream of this process.

    Raises:
      MarsError: flags or prompts differ between processes, or another process failed; see also `hosts.connect`.
    """
    if args.mesh is None:
        yield out
        return
    hosts.connect(args.coordinator, args.num_processes, args.process_id)
    # All other flags, and the prompts, must be the same in every process.
    shared_flags = {k: v for k, v in vars(args).items() if k not in ("coordinator", "process_id")}
    try:
        with _output_of_process(out) as output_stream:
            hosts.check_equal((shared_flags, rows), "flags or prompts")
            yield output_stream
    except jax.errors.JaxRuntimeError as error:
        # A collective operation raises this error if another process of the run has died.
        if jax.process_count() == 1:
            raise
        raise MarsError(
            f"one of the {jax.process_count()} processes of the run failed ({first_line(error)})."
        ) from error


@contextlib.contextmanager
def _output_of_process(out: IO[str]) -> Iterator[IO[str]]:
    """Yield `out` in the first process, and a null stream in others. Output of C libraries goes to stderr."""
    if not jax.distributed.is_initialized():
        yield out
        return
    # The duplicate still writes to the user's stdout. The original descriptor is redirected to stderr, because C
    # libraries write to it directly, bypassing `sys.stdout`.
    with os.fdopen(os.dup(out.fileno()), "w", encoding="utf-8") as stdout_copy:
        os.dup2(2, out.fileno())  # Gloo (CPU collectives) prints its connections
        if hosts.is_first():
            yield stdout_copy
            return
    # Other processes would only repeat the result and the notes of the first process.
    with open(os.devnull, "w") as null_stream, contextlib.redirect_stderr(null_stream):
        yield null_stream
