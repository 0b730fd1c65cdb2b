"""Train mars_jax/assets/tiny: a byte-level BPE tokenizer, the target, a distilled draft, and an EAGLE-3 head.

    python -m scripts.train.train_embedded --work runs/tiny --stories stories.txt.xz --dialogues dialogues.txt.xz \\
        --novels novels.txt.xz --export mars_jax/assets/tiny

The files contain documents separated by lines of `<|endoftext|>`. The lines of a dialogue start with `User:` or
`Assistant:`. Arithmetic problems are generated. If the command is killed, run it again to continue from the last
checkpoint. On a CPU with glibc, GLIBC_TUNABLES=glibc.malloc.hugetlb=1 saves a quarter of the processor time, because
huge pages then hold the temporary arrays of a step.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax

from mars_jax import hub
from mars_jax.contrib.teaching import Batch, Training, predict
from mars_jax.lab.training import data, distillation, eagle_training
from mars_jax.lab.training.loop import fit, muon
from mars_jax.lab.training.objectives import divergence, forward_kl, total_variation
from mars_jax.models.config import ModelConfig
from mars_jax.models.transformer import init_params, language_model
from scripts import common
from scripts.arithmetic import generator

VOCAB, CONTEXT, SEPARATOR_ID = 4096, 1024, 0
SHAPE = {
    "vocab_size": VOCAB,
    "max_positions": CONTEXT,
    "norm_eps": 1e-5,
    "tie_embeddings": True,
    "bos_token_id": SEPARATOR_ID,
    "eos_token_ids": (SEPARATOR_ID,),
}
# Use few, wide layers: on a CPU, each layer has an overhead that does not depend on the number of tokens (1 to 8).
TARGET = ModelConfig(
    hidden_size=384, intermediate_size=1152, num_layers=6, num_heads=6, num_kv_heads=2, **SHAPE
)
DRAFT = ModelConfig(
    hidden_size=128, intermediate_size=640, num_layers=2, num_heads=4, num_kv_heads=2, **SHAPE
)

EAGLE3_LAYERS, EAGLE3_MLP, EAGLE3_VOCAB = (1, 3, 5), 768, 3072
EAGLE3_STEPS = 3  # number of training-time-test steps

SHARES = {"stories": 0.60, "arithmetic": 0.22, "dialogues": 0.11, "novels": 0.07}
# Shares of the sources in the target's second training stage. After the first stage, the target copies all numbers of a
# word problem and chooses its operations correctly, but half of its sums and differences are wrong. Drills teach these
# with far fewer tokens than word problems would need.
REFINE_SHARES = {"stories": 0.45, "arithmetic": 0.20, "drill": 0.22, "dialogues": 0.08, "novels": 0.05}
# Share of the training steps for each row length. Training uses rows of 256 tokens, whose attention is cheap,
# and switches to rows of 1,024 tokens only at the very end.
LENGTHS = {256: 0.95, CONTEXT: 0.05}
# A draft model learns best from many steps with few tokens each. For the target, that many steps would be too
# expensive, because every step of Muon computes matrix products whose cost does not depend on the number of tokens.
TARGET_STEP, DRAFT_STEP = 8192, 2048  # tokens
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}Assistant: {{ message['content'] }}"
    "{% else %}{{ bos_token }}User: {{ message['content'] }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def novels(path: Path, *, limit: int, size: int = 3000) -> Iterator[str]:
    """Yield pieces of about `size` characters from all books, about `limit` characters in total."""
    pieces = [text[i : i + size] for text in data.documents(path) for i in range(0, len(text), size)]
    yield from pieces[:: max(1, len(pieces) * size // limit)]


def dialogues(path: Path) -> Iterator[str]:
    """Yield dialogues. As in the chat template, a separator before each user turn ends the preceding answer."""
    for text in data.documents(path):
        yield text.strip().replace("\nUser:", data.SEPARATOR + "User:")


def problems(count: int) -> Iterator[str]:
    for p in generator.generate(count, split="train"):
        yield f"User: {p.question}\nAssistant: {p.answer}"


def texts(args) -> dict[str, list[str]]:
    """Return the documents of all sources, keyed by source."""
    return {
        "stories": [t for path in args.stories for t in data.documents(path)],
        "arithmetic": list(problems(args.problems)),
        "drill": list(generator.drill(args.problems // 4)),
        "dialogues": [t for path in args.dialogues for t in dialogues(path)],
        "novels": [t for path in args.novels for t in novels(path, limit=args.novel_characters)],
    }


def train_tokenizer(sources: dict[str, list[str]], path: Path) -> None:
    """Train a byte-level BPE tokenizer that splits digits, so that a number has the same tokens in every context."""
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
    # Sample in proportion to the training mixture, about 20 MB in total.
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


def logits(config: ModelConfig, params: Any, batch: Batch) -> jax.Array:
    """Compute logits in bfloat16 from float32 params."""
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return predict(
        language_model(config, dtype="bfloat16"), low, batch.tokens[:, :-1], batch.segments[:, :-1]
    )


def target_loss(params, batch: Batch, _):
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits(TARGET, params, batch), batch.tokens[:, 1:]
    )
    return jnp.mean(losses), {}


def draft_loss(params, batch: Batch, teacher):
    """Return KL + TV. All tokens contribute to the KL divergence; the total variation is the rejection probability."""
    p = jax.lax.stop_gradient(logits(TARGET, teacher, batch))
    q = logits(DRAFT, params, batch)
    kl, tv = jnp.mean(forward_kl(p, q)), jnp.mean(total_variation(p, q))
    same = jnp.mean((jnp.argmax(p, axis=-1) == jnp.argmax(q, axis=-1)).astype(jnp.float32))
    return kl + tv, {"kl": kl, "total_variation": tv, "same_argmax": same}


def batches(streams: list[data.Stream], steps: int, tokens: int, seed: int) -> grain.MapDataset:
    """Return batches of about `tokens` tokens. All rows of a batch have the same length, in the order of `LENGTHS`."""
    parts, first = [], 0
    for share, length in zip(itertools.accumulate(LENGTHS.values()), LENGTHS, strict=True):
        last = round(steps * share)
        rows = data.batches(streams, rows=max(1, tokens // length), length=length, seed=seed)
        parts.append(rows[first:last])
        first = last
    return grain.MapDataset.concatenate(parts)


def initial(config: ModelConfig, seed: int):
    params = init_params(config, jax.random.key(seed))
    # Scale down the output of each layer: otherwise the variance of the residual stream grows with depth (GPT-2).
    shrink = (2 * config.num_layers) ** -0.5
    layers = tuple({**x, "o": x["o"] * shrink, "down": x["down"] * shrink} for x in params["layers"])
    return {**params, "layers": layers}


def initial_draft(target, seed: int):
    """Return random params, with the target's embedding projected onto its principal directions."""
    table = np.asarray(target["embed"], np.float32)
    _, _, directions = np.linalg.svd(table, full_matrices=False)
    projected = table @ directions[: DRAFT.hidden_size].T
    return {**initial(DRAFT, seed), "embed": jnp.asarray(projected * (0.02 / projected.std()))}


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
    parser = common.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of the tokenizer, checkpoints, logs")
    parser.add_argument("--export", type=Path, required=True, help="folder to write target/ and draft/ to")
    for name in ("stories", "dialogues", "novels"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--problems", type=int, default=60_000, help="arithmetic problems to generate")
    parser.add_argument(
        "--novel-characters", type=int, default=6_000_000, help="characters of the novels to use"
    )
    parser.add_argument("--target-tokens", type=float, default=10.5e6, help="tokens to train the target on")
    parser.add_argument(
        "--refine-tokens", type=float, default=5.2e6, help="tokens of the target's second stage"
    )
    parser.add_argument("--draft-tokens", type=float, default=5e6, help="tokens to distil the draft on")
    parser.add_argument(
        "--eagle3-tokens", type=float, default=1.5e6, help="tokens to train the EAGLE-3 head on"
    )
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
    streams = {name: data.make_stream(documents, tokenizer) for name, documents in sources.items()}
    for name, s in streams.items():
        size = sum(len(t.encode()) for t in sources[name])
        tokens = len(s.tokens)
        print(f"{name}: {len(sources[name]):,} documents, {tokens:,} tokens, {size / tokens:.2f} bytes each")
    del sources

    def train(name, init, loss, shares, tokens, size, *, seed=args.seed, teacher=()):
        steps = round(tokens / size)
        mixed = [streams[source]._replace(weight=share) for source, share in shares.items()]
        training = Training(
            init=init,
            loss=loss,
            batches=batches(mixed, steps, size, seed),
            optimizer=muon(args.learning_rate, steps),
            steps=steps,
            step_tokens=size,
        )
        return fit(training, args.work / name, teacher=teacher, description=name)

    first = functools.partial(initial, TARGET, args.seed)
    target = train("target", first, target_loss, SHARES, args.target_tokens, TARGET_STEP)
    trained = functools.partial(jax.tree.map, jnp.array, target)
    # Shuffle the text with another seed than in the first stage, so that most rows are new to the target.
    target = train(
        "refine", trained, target_loss, REFINE_SHARES, args.refine_tokens, TARGET_STEP, seed=args.seed + 1
    )
    export(args, "target", TARGET, target)
    teacher = jax.tree.map(lambda x: x.astype(jnp.bfloat16), target)
    taught = functools.partial(initial_draft, target, args.seed)
    draft = train("draft", taught, draft_loss, SHARES, args.draft_tokens, DRAFT_STEP, teacher=teacher)
    export(args, "draft", DRAFT, draft)

    if not args.eagle3_tokens:
        return
    mixed = [streams[source]._replace(weight=share) for source, share in SHARES.items()]
    apprentice = eagle_training.new_eagle3(
        TARGET,
        target,
        ids=data.draft_vocabulary(mixed, EAGLE3_VOCAB, VOCAB, TARGET.eos_token_ids),
        layers=EAGLE3_LAYERS,
        intermediate_size=EAGLE3_MLP,
        steps=EAGLE3_STEPS,
        divergence=divergence("kl+tv"),
        seed=args.seed,
    )
    head = distillation.train(
        apprentice,
        target,
        mixed,
        args.work / "eagle3",
        tokens=args.eagle3_tokens,
        step_tokens=DRAFT_STEP,
        learning_rate=args.learning_rate,
        seed=args.seed + 2,
    )
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), head) | {"ids": head["ids"]}
    hub.save_eagle(args.export / "eagle3", apprentice.config, low, overwrite=True)


if __name__ == "__main__":
    main()
