"""Train the family in mars_jax/assets/tiny: a byte-level BPE tokenizer, the target, and a draft distilled from it.

    python scripts/train_embedded.py --work runs/tiny --stories stories.txt.xz --dialogues dialogues.txt.xz \\
        --novels novels.txt.xz --export mars_jax/assets/tiny

Files hold documents separated by lines of `<|endoftext|>`; dialogues are lines of `User:` and `Assistant:`. Arithmetic
problems are generated. Killed and started again with the same arguments, it continues where its last checkpoint was.
On a CPU under glibc, GLIBC_TUNABLES=glibc.malloc.hugetlb=1 saves a quarter of the processor time: the step's
temporaries are then mapped in huge pages.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from mars_jax import hub
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import init_params, language_model
from mars_jax.tasks import arithmetic
from mars_jax.training import data
from mars_jax.training.loop import fit, warmup_stable_decay
from mars_jax.training.objectives import cross_entropy, forward_kl, predict, total_variation

VOCAB, CONTEXT, SEPARATOR_ID = 4096, 1024, 0
SHAPE = {
    "vocab_size": VOCAB,
    "max_positions": CONTEXT,
    "norm_eps": 1e-5,
    "tie_embeddings": True,
    "bos_token_id": SEPARATOR_ID,
    "eos_token_ids": (SEPARATOR_ID,),
}
# Few wide layers: on a CPU a layer costs its overhead, whether it checks one token or eight.
TARGET = ModelConfig(
    hidden_size=384, intermediate_size=1152, num_layers=6, num_heads=6, num_kv_heads=2, **SHAPE
)
DRAFT = ModelConfig(
    hidden_size=128, intermediate_size=640, num_layers=2, num_heads=4, num_kv_heads=2, **SHAPE
)

SHARES = {"stories": 0.60, "arithmetic": 0.22, "dialogues": 0.11, "novels": 0.07}
SHORT, LONG_SHARE = 256, 0.05  # rows of 256 tokens, whose attention is cheap, and of 1024 at the very end
# A draft learns from many small steps; for the target Muon's matrix products would cost too much of each.
TARGET_STEP, DRAFT_STEP = 8192, 2048  # tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}"
    "{% else %}{{ bos_token }}User: {{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def novels(path: Path, *, limit: int, size: int = 3000) -> Iterator[str]:
    """Pieces of about `size` characters, spread over all books until they come to about `limit` characters."""
    pieces = [text[i : i + size] for text in data.documents(path) for i in range(0, len(text), size)]
    yield from pieces[:: max(1, len(pieces) * size // limit)]


def dialogues(path: Path) -> Iterator[str]:
    """Every turn of the user's starts with the separator, as in the chat template, so that an answer ends with it."""
    for text in data.documents(path):
        yield text.strip().replace("\nUser:", data.SEPARATOR + "User:")


def problems(count: int) -> Iterator[str]:
    for p in arithmetic.generate(count, split="train"):
        yield f"User: {p.question}\nAssistant: {p.answer}"


def texts(args) -> dict[str, list[str]]:
    """The documents of every source."""
    return {
        "stories": [t for path in args.stories for t in data.documents(path)],
        "arithmetic": list(problems(args.problems)),
        "dialogues": [t for path in args.dialogues for t in dialogues(path)],
        "novels": [t for path in args.novels for t in novels(path, limit=args.novel_characters)],
    }


def train_tokenizer(sources: dict[str, list[str]], path: Path) -> None:
    """Byte-level BPE with digits apart, so that a number is spelled the same way wherever it stands."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[data.SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    # In proportion to what the models will read, about 20 MB in all.
    sample = [t for name, share in SHARES.items() for t in _first(sources[name], int(20e6 * share))]
    tokenizer.train_from_iterator((t.replace(data.SEPARATOR, "\n") for t in sample), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{data.SEPARATOR} $A",
        pair=f"{data.SEPARATOR} $A $B",
        special_tokens=[(data.SEPARATOR, SEPARATOR_ID)],
    )
    tokenizer.save(str(path))


def _first(documents: list[str], characters: int) -> Iterator[str]:
    for text in documents:
        if characters <= 0:
            return
        characters -= len(text)
        yield text


def make_batches(
    streams: list[data.Stream], *, steps: int, size: int, seed: int
) -> Callable[[int], data.Batch]:
    def mixture(length: int) -> data.Mixture:
        return data.Mixture(streams, rows=size // length, length=length, seed=seed)

    short, long, switch = mixture(SHORT), mixture(CONTEXT), round(steps * (1 - LONG_SHARE))
    return lambda step: short.batch(step) if step < switch else long.batch(step)


def logits(config: ModelConfig, params: Any, batch: data.Batch) -> jax.Array:
    """Computed in bfloat16 from float32 params."""
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return predict(
        language_model(config, dtype="bfloat16"), low, batch.tokens[:, :-1], batch.segments[:, :-1]
    )


def target_objective(params, batch: data.Batch):
    return jnp.mean(cross_entropy(logits(TARGET, params, batch), batch.tokens[:, 1:])), {}


def draft_objective(params, lesson: tuple[data.Batch, Any]):
    """Half KL, which covers what the target may say, half total variation, which is what rejection costs."""
    batch, teacher = lesson
    p = jax.lax.stop_gradient(logits(TARGET, teacher, batch))
    q = logits(DRAFT, params, batch)
    kl, tv = jnp.mean(forward_kl(p, q)), jnp.mean(total_variation(p, q))
    same = jnp.mean((jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)).astype(jnp.float32))
    return kl + tv, {"kl": kl, "total_variation": tv, "same_argmax": same}


def optimizer(peak: float, steps: int) -> optax.GradientTransformation:
    """Muon for the matrices inside the layers (Adam for the rest), on a warmup-stable-decay schedule."""

    def inner_matrices(params):
        def spec(path, x):
            inside = x.ndim == 2 and "embed" not in jax.tree_util.keystr(path)
            return optax.contrib.MuonDimensionNumbers() if inside else None

        return jax.tree_util.tree_map_with_path(spec, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.contrib.muon(
            warmup_stable_decay(peak, steps, warmup=50, decay=0.35),
            weight_decay=0.1,
            adam_b2=0.95,
            consistent_rms=0.2,
            muon_weight_dimension_numbers=inner_matrices,
        ),
    )


def initial(config: ModelConfig, seed: int):
    params = init_params(config, jax.random.key(seed))
    # What a layer adds to the residual stream starts small: its variance would grow with depth (GPT-2).
    shrink = (2 * config.num_layers) ** -0.5
    layers = tuple({**x, "o": x["o"] * shrink, "down": x["down"] * shrink} for x in params["layers"])
    return {**params, "layers": layers}


def initial_draft(target, seed: int):
    """Random, but for the embedding: the target's, projected on its principal directions."""
    table = np.asarray(target["embed"], np.float32)
    _, _, directions = np.linalg.svd(table, full_matrices=False)
    projected = table @ directions[: DRAFT.hidden_size].T
    return {**initial(DRAFT, seed), "embed": jnp.asarray(projected * (0.02 / projected.std()))}


def plot(log: Path, picture: Path, size: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [json.loads(line) for line in log.read_text().splitlines()]
    window = max(1, len(rows) // 100)
    loss = np.convolve([r["loss"] for r in rows], np.ones(window) / window, mode="valid")
    figure, axes = pyplot.subplots(figsize=(8, 4.5))
    axes.plot([r["step"] * size / 1e6 for r in rows[window - 1 :]], loss)
    axes.set(xlabel="million tokens", ylabel=f"loss, mean of {window} steps", title=log.parent.name)
    axes.grid(alpha=0.3)
    figure.savefig(picture, dpi=120, bbox_inches="tight")


def export(args, name: str, config: ModelConfig, params) -> None:
    from transformers import PreTrainedTokenizerFast

    path = args.export / name
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    hub.save(path, config, low, overwrite=True)
    PreTrainedTokenizerFast(
        tokenizer_file=str(args.work / "tokenizer.json"),
        bos_token=data.SEPARATOR,
        eos_token=data.SEPARATOR,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)
    print(f"{name}: {sum(x.size for x in jax.tree.leaves(params)):,} parameters in {path}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, required=True, help="folder of the tokenizer, checkpoints, logs, plots"
    )
    parser.add_argument("--export", type=Path, required=True, help="folder that takes target/ and draft/")
    for name in ("stories", "dialogues", "novels"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--problems", type=int, default=60_000, help="arithmetic problems to generate")
    parser.add_argument("--novel-characters", type=int, default=6_000_000, help="of the novels to use")
    parser.add_argument("--target-tokens", type=float, default=10.5e6, help="tokens to train the target on")
    parser.add_argument("--draft-tokens", type=float, default=5e6, help="tokens to distil the draft on")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)

    from tokenizers import Tokenizer

    sources = texts(args)
    vocabulary = args.work / "tokenizer.json"
    if not vocabulary.exists():
        train_tokenizer(sources, vocabulary)
    tokenizer = Tokenizer.from_file(str(vocabulary))
    streams = [data.stream(sources[name], tokenizer, weight=share) for name, share in SHARES.items()]
    for name, s in zip(SHARES, streams, strict=True):
        size = sum(len(t.encode()) for t in sources[name])
        print(
            f"{name}: {len(sources[name]):,} documents, {len(s.tokens):,} tokens, {size / len(s.tokens):.2f} bytes each"
        )
    del sources

    def train(
        name: str, config: ModelConfig, init, objective, tokens: float, size: int, wrap=lambda batch: batch
    ):
        steps = round(tokens / size)
        batches = make_batches(streams, steps=steps, size=size, seed=args.seed)
        params = fit(
            objective,
            optimizer(args.learning_rate, steps),
            init,
            lambda step: wrap(batches(step)),
            steps=steps,
            directory=args.work / name,
            tokens_per_step=size,
            description=name,
        )
        plot(args.work / name / "log.jsonl", args.work / name / "loss.png", size)
        export(args, name, config, params)
        return params

    start = functools.partial(initial, TARGET, args.seed)
    target = train("target", TARGET, start, target_objective, args.target_tokens, TARGET_STEP)
    teacher = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target)
    start = functools.partial(initial_draft, target, args.seed)
    train(
        "draft", DRAFT, start, draft_objective, args.draft_tokens, DRAFT_STEP, lambda batch: (batch, teacher)
    )


if __name__ == "__main__":
    main()
