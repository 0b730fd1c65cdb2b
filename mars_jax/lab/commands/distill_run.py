"""Implementation of `mars-jax distill`: load the models, lock --work, train, and write the result to --output."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import jax
import jax.numpy as jnp
import numpy as np

from mars_jax import contrib, drafters, hub
from mars_jax.cli.flags import HOSTS
from mars_jax.cli.open_target import open_mesh
from mars_jax.cli.progress import busy, progress
from mars_jax.contrib.drafters import sprinter_training, via_sd_training
from mars_jax.contrib.drafters.medusa_files import save_medusa
from mars_jax.contrib.drafters.system_files import NGRAM, System, save_system
from mars_jax.contrib.rules import diversed_training
from mars_jax.contrib.teaching import Batch
from mars_jax.core.types import PyTree
from mars_jax.hub.durable import staging, sync, writing
from mars_jax.hub.files import resolve
from mars_jax.hub.heads.mtp_files import save_mtp
from mars_jax.hub.pretrained import Pretrained, check_same_vocabulary
from mars_jax.hub.save import free_directory
from mars_jax.lab.evaluate.scoring import score_answer
from mars_jax.lab.evaluate.tasks.catalogue import read_arithmetic, read_problems
from mars_jax.lab.evaluate.tasks.problems import Problem
from mars_jax.lab.folder import check_folder, check_writable, claim, joined_with_folder
from mars_jax.lab.training import data, dflash_training, distillation, eagle_training, features
from mars_jax.lab.training.loop import Apprentice, fit
from mars_jax.lab.training.objectives import divergence
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import language_model
from mars_jax.serve.generation import generate
from mars_jax.serve.rows import RowFile, digest, fingerprint, plain
from mars_jax.utils import hosts
from mars_jax.utils.errors import MarsError, say
from mars_jax.utils.paths import expanded
from mars_jax.utils.types import JsonObject

_NO_MATTER = ("output", "work", "data", "features", "mesh", "dtype", "layout", "minutes", *HOSTS)
"""Flags that do not identify a training run: paths, devices, time limit, dtype of the result. The run is identified by
the contents of the files instead of their paths."""
WRITTEN_BATCH, WRITTEN_GROUP = 32, 128
"""Number of texts that the target decodes at a time for --write, and number of texts between two writes to disk."""
SHARD, FORWARD = 128, 2048
"""Number of documents per shard of features, and number of tokens per forward pass that computes them."""
EVALUATIONS = 128
"""Number of layer masks that the search of VIA-SD tries."""


def distill(args: argparse.Namespace, out: IO[str]) -> None:
    """Train a drafter of the kind `args.kind`, or compute features, and write the result to `args.output`.

    Raises:
      MarsError: flags do not fit the models or this machine, or --work belongs to a different run.
    """
    if args.kind == "features":
        write_features(args)
        return
    work = args.work or args.output.with_name(args.output.name + "-training")
    with joined_with_folder(args, work, out) as folder:
        _distill(args, folder)


def _distill(args: argparse.Namespace, work: Path) -> None:
    if importlib.util.find_spec("grain") is None:
        raise MarsError("distill needs the package grain: pip install grain.")
    # Reject invalid arguments before loading the models.
    if args.loss is not None:
        divergence(args.loss)
    features.layers_of(args.feature_layers)
    free_directory(args.output, overwrite=False)
    check_writable(args.output)
    check_writable(work, flag="--work")
    documents = [text for path in args.data or () for text in data.documents(path)]
    for dump in args.features or ():
        features.dump_settings(dump)
    if args.task is not None:
        rewarded(args.task)
    if args.first not in (None, NGRAM):
        resolve(args.first, weights=False)
    with busy("loading"):
        mesh = open_mesh(args.mesh, hub.outline(args.target).config)
        # The stored features and their fingerprint were computed with the target in bfloat16.
        dtype = args.features and "bfloat16"
        target = hub.load(args.target, dtype=dtype, mesh=mesh)
        start_checkpoint, start_params = _open_first(args, target)
    settings = {name: plain(value) for name, value in vars(args).items() if name not in _NO_MATTER}
    # Text and weights are identified by their contents, wherever they are stored.
    settings |= {
        "data": digest("\0".join(documents).encode()),
        "weights": fingerprint((target.params, start_params), target.path),
    }
    if args.features is not None:
        # Only kind `eagle3` accepts --features. If --from names a head, use the layers of that head.
        layers = features.layers_of(args.feature_layers) or features.default_layers(target.config)
        if start_checkpoint is not None:
            layers = start_checkpoint[0].feature_layers
        target_fingerprint = fingerprint((target.params,), target.path)
        settings["features"] = [
            features.check_dump(dump, layers, target_fingerprint) for dump in args.features
        ]
    with claim(work, settings, flag="--work"):
        train_kind = {"sprinter": _sprinter, "via_sd": _via_sd, "diversed": _diversed}.get(args.kind, _train)
        train_kind(args, target, start_checkpoint, documents, work)
    if args.kind == "diversed":
        say(f"{args.output}: verify with --verify diversed:{args.output}")
    else:
        # `eagle` is the drafter for heads of both kinds, eagle1 and eagle3.
        draft_kind = args.kind.rstrip("13")
        say(f"{args.output}: draft with --draft {draft_kind}:{args.output}; figures in {work}")


def _open_first(args: argparse.Namespace, target: Pretrained) -> tuple[Any, PyTree]:
    """Load the checkpoint that --from names, and return it with its params; return (None, ()) if there is none.

    The checkpoint is a model, or for eagle3 the (config, params) of a head.
    """
    if args.first is None or (args.kind, args.first) == ("via_sd", NGRAM):
        return None, ()
    if args.kind != "eagle3":
        # The kind `model` trains this checkpoint, in float32. Other kinds only draft with it, in its own dtype.
        model = hub.load(args.first, dtype="float32" if args.kind == "model" else None)
        if model.model.for_chains is not None:
            raise MarsError(
                f"--from {args.first} has recurrent layers, whose state cannot drop rejected tokens: name a model with "
                "attention in every layer."
            )
        check_same_vocabulary(target, model)
        return model, model.params
    config, params = hub.load_eagle(args.first, target.config, target.params, dtype="float32")
    if config.version != 3:
        raise MarsError(f"--from {args.first} is an EAGLE-1 head: name an EAGLE-3 head, or leave it out.")
    return (config, params), params


def _train(
    args: argparse.Namespace, target: Pretrained, first: Any, documents: Sequence[str], work: Path
) -> None:
    """Train a head or a small model on text or on features, and write it."""
    names = ("tokens", "step_tokens", "learning_rate", "seed", "minutes")
    options = {name: getattr(args, name) for name in names}
    if args.write is not None:
        documents = _write_texts(args, target, documents, work)
    # With --features, text is only needed to choose a draft vocabulary.
    streams = []
    if documents or args.features is None:
        streams = [data.make_stream(documents, target.tokenizer.backend_tokenizer)]
    apprentice = _start(args, target, first, _draft_vocabulary(args, target, streams))
    if args.features is None:
        say(f"{len(streams[0].tokens):,} tokens of text")
        params = distillation.train(
            apprentice, target.params, streams, work, length=args.length, mesh=target.mesh, **options
        )
    else:
        params = distillation.train_on_features(apprentice, target.params, args.features, work, **options)
    if hosts.is_first():
        _write(args, apprentice.config, params, first)


def _write(args: argparse.Namespace, config: Any, params: PyTree, first: Any) -> None:
    """Write the drafter in the layout of its kind, atomically: a killed run leaves no partial result at --output."""
    params = jax.tree.map(
        lambda x: x.astype(args.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, jax.device_get(params)
    )
    if args.kind == "medusa":
        save_medusa(args.output, config, params)
    elif args.kind == "mtp":
        save_mtp(args.output, config, params)
    elif args.kind == "model":
        # The weights and the tokenizer must appear in --output at the same time.
        with writing(args.output), staging(args.output) as staged:
            model_folder = hub.save(staged / "model", config, params)
            _copy_tokenizer(first.path, model_folder)
            model_folder.replace(args.output)
            sync(args.output.absolute().parent)
    else:
        save_head = contrib.save_dflash if args.kind == "dflash" else hub.save_eagle
        # The authors' layout is named after the drafter.
        layout = args.layout or args.kind.rstrip("13")
        save_head(args.output, config, params, layout=layout, verifier=str(args.target))


def _copy_tokenizer(source: Path, output: Path) -> None:
    for file in source.iterdir():
        if file.name.startswith(("tokenizer", "special_tokens", "vocab", "merges", "chat_template")):
            shutil.copy(file, output / file.name)


def _draft_vocabulary(
    args: argparse.Namespace, target: Pretrained, streams: Sequence[data.Stream]
) -> np.ndarray | None:
    """Choose the ids i32[W] of `--draft-vocab` from documents and features. Return None if it covers all tokens."""
    vocab_size = target.config.vocab_size
    if args.draft_vocab in (None, vocab_size):
        return None
    counted_streams = list(streams)
    for dump in args.features or ():
        for folder in features.shards(dump):
            shard = features.read_shard(folder)
            tokens = shard.tokens[shard.segments != features.PADDING]
            counted_streams.append(data.Stream(tokens, np.zeros_like(tokens), len(tokens)))
    return data.draft_vocabulary(counted_streams, args.draft_vocab, vocab_size, target.stop_tokens)


def _write_texts(
    args: argparse.Namespace, target: Pretrained, documents: Sequence[str], work: Path
) -> list[str]:
    """Return the texts for --write: the target's continuations of the first 16 tokens of documents.

    The texts are stored in --work, so that a killed run can continue.
    """
    # Cut long documents before tokenizing: 16 tokens cover fewer than 2,000 characters.
    prompt_candidates = (target.encode(text[:2000])[:16] for text in documents)
    prompts = [ids for ids in prompt_candidates if len(ids) == 16][: args.write]
    if not prompts:
        raise MarsError("no document has 16 tokens to begin a text with: give longer ones.")
    drafter = drafters.load("ngram", target)
    texts: list[str] = []

    def write(numbers: Sequence[int]) -> list[JsonObject]:
        batch_prompts = [prompts[i % len(prompts)] for i in numbers]
        completions = generate(
            target,
            drafter,
            batch_prompts,
            temperature=1.0,
            seed=[(args.seed + i) % 2**32 for i in numbers],
            max_new_tokens=args.length - 16,
            batch_size=WRITTEN_BATCH,
        )
        return [
            {"number": i, "text": target.decode([*prompt, *ids])}
            for i, prompt, ids in zip(numbers, batch_prompts, completions.tokens, strict=True)
        ]

    with (
        contextlib.closing(RowFile(work / "written.jsonl", {}, flag="--work")) as file,
        progress("texts") as show,
    ):
        file.start()
        for first in range(0, args.write, WRITTEN_GROUP):
            numbers = range(first, min(first + WRITTEN_GROUP, args.write))
            keys = [{"number": i} for i in numbers]
            texts += [row["text"] for row in file.batch(keys, functools.partial(write, numbers))]
            show(len(texts), args.write, "")
    return texts


def _start(args: argparse.Namespace, target: Pretrained, first: Any, ids: np.ndarray | None) -> Apprentice:
    """Create the `Apprentice`. `first` is the checkpoint of --from, and `ids` i32[W] is the draft vocabulary."""
    config, params, loss, seed = target.config, target.params, divergence(args.loss), args.seed
    if args.kind == "model":
        return distillation.small_model(config, first.config, first.params, divergence=loss)
    if args.kind == "medusa":
        return distillation.new_medusa(config, params, count=args.heads, divergence=loss, seed=seed)
    width, layers = args.intermediate_size, features.layers_of(args.feature_layers)
    if args.kind == "eagle1":
        return eagle_training.new_eagle1(config, intermediate_size=width, divergence=loss, seed=seed)
    if args.kind == "mtp":
        return eagle_training.new_mtp(config, params, steps=args.steps_ahead, divergence=loss, seed=seed)
    new_head = eagle_training.new_eagle3
    if args.kind == "dflash":
        new_head = dflash_training.new_dflash
    head = functools.partial(
        new_head, config, params, ids=ids, layers=layers, intermediate_size=width, divergence=loss, seed=seed
    )
    if args.kind == "eagle3":
        return head(trained=first, steps=args.steps_ahead)
    return head(
        depth=args.head_layers,
        block_size=args.block_size,
        markov_rank=args.markov_rank or 0,
        confidence=bool(args.confidence),
    )


def write_features(args: argparse.Namespace) -> None:
    """Write the shards that are missing from `args.output`.

    The documents are plain texts or, with --chat, questions that the target answers.

    Raises:
      MarsError: a file cannot be read, the output belongs to a different run, or no document leaves room for an answer.
    """
    documents = [text for path in args.data for text in data.documents(path)]
    check_folder(args.output)
    # Reject invalid layers before loading the weights.
    outline = hub.outline(args.target)
    layers = features.layers_of(args.feature_layers) or features.default_layers(outline.config)
    compute_features = features.reader(
        language_model(outline.config, dtype="bfloat16", feature_layers=layers)
    )
    with busy("loading"):
        target = hub.load(args.target, dtype="bfloat16")
    settings = {
        "chat": args.chat,
        "length": args.length,
        "seed": args.seed,
        "shard": SHARD,
        "layers": list(layers),
        "data": digest("\0".join(documents).encode()),
        "weights": fingerprint((target.params,), target.path),
    }
    with claim(args.output, settings):
        for shard_number, first_index in enumerate(range(0, len(documents), SHARD)):
            folder = args.output / f"{shard_number:05d}"
            if folder.exists():
                continue
            start_time = time.perf_counter()
            # Write no shard if none of its documents leaves room for an answer.
            token_lists = _document_tokens(
                target, documents[first_index : first_index + SHARD], args, first_index
            )
            if not token_lists:
                continue
            packed_rows = features.pack_documents(token_lists, args.length)
            _write_shard(folder, compute_features, target, packed_rows)
            say(
                f"{folder}: {len(token_lists)} texts, {sum(map(len, token_lists)):,} tokens "
                f"in {len(packed_rows[0])} rows of {args.length}; {time.perf_counter() - start_time:.0f} s"
            )
    if not features.shards(args.output):
        raise MarsError(f"no document leaves room for an answer in --length {args.length}: increase it.")


def _document_tokens(
    target: Pretrained, documents: Sequence[str], args: argparse.Namespace, first: int
) -> list[list[int]]:
    """Return the tokens of documents or, with --chat, of questions together with the target's answers.

    Every second answer is sampled at temperature 1; the others are greedy.
    """
    if not args.chat:
        return target.encode_many(documents)
    # Reserve at least a quarter of the row for the answer.
    prompts = [ids for ids in target.encode_many(documents, chat=True) if len(ids) <= args.length * 3 // 4]
    if not prompts:
        return []
    answers = generate(
        target,
        "none",
        prompts,
        chat=True,
        temperature=[float(i % 2) for i in range(len(prompts))],
        seed=[(args.seed + first + i) % 2**32 for i in range(len(prompts))],
        max_new_tokens=[args.length - len(ids) for ids in prompts],
        batch_size=64,
    )
    return [[*prompt, *ids] for prompt, ids in zip(prompts, answers.tokens, strict=True)]


def _write_shard(
    folder: Path,
    compute_features: Callable[..., features.Recorded],
    target: Pretrained,
    rows: Sequence[np.ndarray],
) -> None:
    """Compute the features of rows, one padded batch at a time, and write them as a shard."""
    tokens = rows[0]
    rows_per_batch = max(1, FORWARD // tokens.shape[1])
    batch_outputs = []
    for first in range(0, len(tokens), rows_per_batch):
        batch = [x[first : first + rows_per_batch] for x in rows]
        num_rows = len(batch[0])
        # Pad the last batch, so that all batches share one compiled program.
        padded_batch = [jnp.asarray(np.pad(x, ((0, rows_per_batch - num_rows), (0, 0)))) for x in batch]
        batch_outputs.append(
            [np.asarray(x)[:num_rows] for x in compute_features(target.params, *padded_batch)]
        )
    outputs = [np.concatenate(columns) for columns in zip(*batch_outputs, strict=True)]
    features.write_shard(folder, features.Recorded(*outputs))


def draft_name(name: str, output: Path) -> str:
    """Return the name by which config.json in `output` refers to a model: `name` itself, or a relative path."""
    path = expanded(name)
    if name == NGRAM or not path.is_dir():
        return name
    # A relative path to a model within the output stays valid when the output is moved.
    relative_path = os.path.relpath(path.resolve(), output.resolve())
    if relative_path.startswith(".."):
        raise MarsError(
            f"--from is '{name}', and moving '{output}' would break a relative path to it: give the name of a model on "
            "the Hub or in the package, or copy the model into a directory within --output."
        )
    return relative_path


def _batches(args: argparse.Namespace, target: Pretrained, documents: Sequence[str]) -> list[Batch]:
    stream = data.make_stream(documents, target.tokenizer.backend_tokenizer)
    batch_rows = max(2, args.step_tokens // args.length)
    batches = data.batches([stream], rows=batch_rows, length=args.length, seed=args.seed)
    return [batches[i] for i in range(max(2, round(args.tokens / args.step_tokens)))]


def _sprinter(
    args: argparse.Namespace, target: Pretrained, small: Pretrained, documents: Sequence[str], work: Path
) -> None:
    batches = _batches(args, target, documents)
    label_batch = jax.jit(
        lambda teacher, params, batch, key: sprinter_training.examples(
            target.model, teacher, small.model, params, batch, key
        )
    )
    # The label of a token drafted by the small model is the probability that the target accepts it.
    keys = jax.random.split(jax.random.key(args.seed), len(batches))
    labelled_batches = [
        jax.device_get(label_batch(target.params, small.params, batch, key))
        for batch, key in zip(batches, keys, strict=True)
    ]
    # Hold out the last eighth of the batches for testing.
    num_held_out = max(1, len(labelled_batches) // 8)
    training = sprinter_training.classifier_training(
        sprinter_training.flattened(labelled_batches[:-num_held_out]), seed=args.seed
    )
    params = jax.device_get(fit(training, work, description="classifier"))
    held_out = sprinter_training.flattened(labelled_batches[-num_held_out:])
    shares_at = {f"at_{c}": sprinter_training.figures(held_out, params, c) for c in (0.3, 0.5, 0.7, 0.9)}
    say(f"held out: {shares_at}")
    save_system(args.output, System(name="sprinter", draft=draft_name(args.first, args.output)), params)


def _via_sd(
    args: argparse.Namespace, target: Pretrained, small: object, documents: Sequence[str], work: Path
) -> None:
    if not isinstance(target.config, ModelConfig) or target.model.with_layers is None:
        raise MarsError(f"'{target.name}' cannot leave out layers: give a checkpoint of this library.")
    best_choice = via_sd_training.search(
        target.model,
        target.params,
        _batches(args, target, documents),
        left_out=args.left_out,
        evaluations=EVALUATIONS,
        seed=args.seed,
        log=work / "masks.jsonl",
    )
    # A layer has two sublayers, attention and MLP.
    num_sublayers = 2 * len(best_choice.mask)
    num_left_out = num_sublayers - sum(map(sum, best_choice.mask))
    say(
        f"without {num_left_out} of {num_sublayers} sublayers: KL {best_choice.kl:.3f} nats a token, "
        f"the same best token {best_choice.same:.1%}"
    )
    drafter_name = draft_name(args.first or NGRAM, args.output)
    save_system(args.output, System(name="via_sd", draft=drafter_name, layers=best_choice.mask))


def _diversed(
    args: argparse.Namespace, target: Pretrained, small: Pretrained, documents: Sequence[str], work: Path
) -> None:
    problems = rewarded(args.task)
    prompts = target.encode_many([p.turns[0] for p in problems], chat=True)

    def reward(number: int, text: str) -> float:
        # `rewarded` allows only metrics that give a single number.
        (score,) = score_answer(problems[number], text) or (0.0,)
        return score

    mixer_params = fit(
        diversed_training.mixer_training(target, small, seed=args.seed),
        work,
        teacher=(target.params, small.params),
        prepare=diversed_training.rollouts(target, small, prompts, reward, seed=args.seed),
        save_every=1,
        description="diversed",
    )
    contrib.save(args.output, jax.device_get(mixer_params), "diversed")


def rewarded(task: str | None) -> list[Problem]:
    """Return the problems of `--task`, by default the arithmetic problems.

    Raises:
      MarsError: the task or file does not exist, or its answers have no rewards.
    """
    name, _, path = (task or "arithmetic").partition("=")
    if name == "arithmetic" and not path:
        return read_arithmetic("train")
    problems = read_problems(name, path or None, chat=True)
    rewarded_metrics = ("final_answer", "last_number", "rouge_l")
    if any(p.metric not in rewarded_metrics for p in problems):
        raise MarsError(
            f"--task {name} rewards no single answer: choose one whose metric is {', '.join(rewarded_metrics)}."
        )
    return problems
