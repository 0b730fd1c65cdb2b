"""Write the prompts for training SmolLM2-135M's EAGLE-3 head with `mars-jax distill`:

    python -m scripts.train.smollm2_head texts --data SHARED/data --count 3000 --output prompts/texts.txt
    python -m scripts.train.smollm2_head sources --data SHARED/data --output prompts/sources.txt
    python -m scripts.train.smollm2_head own --count 4000 --output prompts/own.txt
    mars-jax distill features --target smollm2 --data prompts/texts.txt --length 512 --output features/texts
    for name in own sources; do
      mars-jax distill features --target smollm2 --data prompts/$name.txt --chat --length 320 \\
          --output features/$name
    done
    mars-jax distill eagle3 --target smollm2 --features features/texts features/own features/sources \\
        --data prompts/texts.txt --draft-vocab 4096 --steps-ahead 3 --loss kl+tv --learning-rate 3e-3 --tokens 3e6 \\
        --output heads/smollm2

`texts` writes conversations whose answers come from data sets. The target only reads these answers, which takes a fifth
of the time needed to generate them. These commands trained the first head. The shipped head was then trained on the
target's own answers, starting from the first head:

    python -m scripts.train.smollm2_head sources --data SHARED/data --count 9000 --output prompts/sources.txt
    # 5336526:scripts/smollm2_answers.py --sources prompts/sources.txt --output features/answers
    python -m scripts.train.smollm2_head widen --heads smollm2/eagle3 --features features/answers --count 6144 \\
        --output heads/start
    mars-jax distill eagle3 --target smollm2 --from heads/start --features features/answers \\
        --steps-ahead 3 --loss kl+tv --learning-rate 1.5e-3 --tokens 1.5e6 --output heads/again
    python -m scripts.train.smollm2_head tau --data SHARED/data/eval --heads smollm2/eagle3 heads/again --output JSON

If a command is killed, rerun it with the same arguments to resume. The heads were not trained on prompts from
evaluations: none of the training data comes from MT-Bench, Vicuna-bench, Alpaca, GSM8K's test set, HumanEval, CNN/DM or
WMT.
"""

from __future__ import annotations

import argparse
import ast
import functools
import itertools
import json
import lzma
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from mars_jax.lab.training import data
from scripts import common

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TURN = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
TASKS = (
    "Summarize:",
    "Continue this story:",
    "What happens in this passage?",
    "Rewrite this in plain English:",
)
"""Tasks that precede a passage of a novel."""


def gsm8k(folder: Path) -> Iterator[dict[str, str]]:
    with lzma.open(folder / "gsm8k_train.jsonl.xz", "rt") as file:
        yield from map(json.loads, file)


def problems(folder: Path) -> Iterator[str]:
    return (row["question"] for row in gsm8k(folder))


def dialogues(folder: Path) -> Iterator[str]:
    """Yield a prompt for each dialogue: alternately its first user turn, and a request to summarise it."""
    for number, text in enumerate(data.documents(folder / "sgd_train.txt.xz")):
        lines = text.splitlines()
        if number % 2:
            yield "Summarize this conversation:\n\n" + "\n".join(lines[:10])[:900]
        else:
            yield lines[0].removeprefix("User: ")


def passages(folder: Path) -> Iterator[str]:
    for number, paragraphs in enumerate(novels(folder)):
        candidates = [p for p in paragraphs if 300 < len(p) < 900]
        for task, text in zip(itertools.cycle(TASKS), candidates[number::97], strict=False):
            yield f"{task} {text}"


def novels(folder: Path) -> Iterator[list[str]]:
    """Yield the paragraphs of each novel."""
    for book in data.documents(folder / "100_english_novels.txt.xz"):
        yield [" ".join(paragraph.split()) for paragraph in book.split("\n\n")]


def openings(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (task, story) pairs. Each task is to write a story that begins with the first sentence of this one."""
    for text in data.documents(folder / "tinystories_train.txt.xz"):
        first = text.strip().split(". ")[0]
        if len(first) < 200:
            yield f"Write a short story that begins like this: {first}.", text.strip()


def stories(folder: Path) -> Iterator[str]:
    return (task for task, _ in openings(folder))


def definitions(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, task, head with docstring, complete code) for each function with a docstring."""
    for text in data.documents(folder / "thealgorithms_python.txt.xz"):
        try:
            functions = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef)]
        except (SyntaxError, ValueError):
            continue
        lines = text.splitlines()
        for node in functions:
            docstring = ast.get_docstring(node)
            if docstring and 60 < len(docstring) < 600:
                head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
                code = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                yield node.name, re.split(r"\n\s*\n|>>>", docstring)[0].strip(), head, code


def functions(folder: Path) -> Iterator[str]:
    """Yield coding prompts that alternate between finishing a function and writing one from its docstring."""
    for number, (name, task, head, _) in enumerate(definitions(folder)):
        yield (
            f"Write a Python function `{name}`. {task}"
            if number % 2
            else f"Finish this Python function.\n\n{head}"
        )


SOURCES = {problems: 0.35, dialogues: 0.15, passages: 0.25, stories: 0.05, functions: 0.2}


def mix(parts: dict[Callable[[Path], Iterator[str]], float], args: argparse.Namespace) -> None:
    """Write prompts from all sources in a fixed random order, in proportion to the sources' shares."""
    rng, prompts = random.Random(args.seed), []
    for source, share in parts.items():
        documents = list(source(args.data))
        rng.shuffle(documents)
        prompts += documents[: round(share * args.count)]
    rng.shuffle(prompts)
    write(args.output, prompts)


def chat(*turns: str) -> str:
    """Format a conversation as the chat template does, with alternating turns of the user and the assistant."""
    text = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n"
    for number, turn in enumerate(turns):
        text += f"<|im_start|>{('user', 'assistant')[number % 2]}\n{turn}<|im_end|>\n"
    return text


def worked(folder: Path) -> Iterator[str]:
    for row in gsm8k(folder):
        answer = re.sub(r"<<.*?>>", "", row["answer"]).replace("####", "The answer is")
        yield chat(row["question"], answer)


def turns(folder: Path) -> Iterator[str]:
    for text in data.documents(folder / "sgd_train.txt.xz"):
        yield chat(*(line.partition(": ")[2] for line in text.splitlines()))


def narrated(folder: Path) -> Iterator[str]:
    return (chat(task, story) for task, story in openings(folder))


def continued(folder: Path) -> Iterator[str]:
    for number, paragraphs in enumerate(novels(folder)):
        pairs = [pair for pair in itertools.pairwise(paragraphs) if min(map(len, pair)) > 200]
        for passage, continuation in pairs[number::61]:
            yield chat(f"Continue this story: {passage[:800]}", continuation[:1200])


def written(folder: Path) -> Iterator[str]:
    for name, task, _, code in definitions(folder):
        yield chat(f"Write a Python function `{name}`. {task}", f"```python\n{code}\n```")


TEXTS = {worked: 0.3, turns: 0.15, narrated: 0.15, continued: 0.2, written: 0.2}


def own_turns(args: argparse.Namespace) -> None:
    """Write user turns that the model generates, which resemble its tuning data (Magpie, arXiv 2406.08464)."""
    import mars_jax as mj

    target = mj.load("smollm2", dtype="bfloat16")
    prompt = target.tokenizer(TURN, add_special_tokens=False).input_ids
    args.output.parent.mkdir(parents=True, exist_ok=True)
    step = 8 * args.batch_size
    for first in range(0, args.count, step):
        count = min(step, args.count - first)
        seeds = [args.seed + first + i for i in range(count)]
        output = mj.generate(
            target, "none", [prompt] * count, temperature=1.0, seed=seeds, max_new_tokens=96,
            batch_size=args.batch_size,
        )  # fmt: skip
        # Leave out turns that do not end: they rarely resemble user turns.
        ended = [c.text.strip() for c in output.completions if c.finish_reason == "stop"]
        turns = [text for text in (t.replace("<|im_end|>", "").strip() for t in ended) if len(text) > 8]
        write(args.output, turns, mode="a")
        print(f"{first + count} of {args.count}", flush=True)


def widen(args: argparse.Namespace) -> None:
    """Write a head whose draft vocabulary contains the tokens that the target predicts most often in its answers.

    The unembedding rows of tokens that are not in the old vocabulary are copied from the target's embedding and
    rescaled.
    """
    import dataclasses

    import numpy as np

    import mars_jax as mj
    from mars_jax.lab.training import features

    target = mj.load("smollm2", dtype="float32")
    [head] = args.heads
    config, params = mj.hub.load_eagle(head, target.config, target.params, dtype="float32")
    vocab, old, unembed = target.config.vocab_size, np.asarray(params["ids"]), np.asarray(params["unembed"])
    counts = np.isin(np.arange(vocab), old) * 0.5
    for path in features.shards(args.features)[1:]:  # the first shard is held out
        shard = features.read_shard(path)
        best = np.asarray(shard.top)[shard.segments != features.PADDING]
        for rank, weight in enumerate((1.0, 0.3)):
            counts += weight * np.bincount(best[:, rank], minlength=vocab)
    counts[list(target.stop_tokens)] = np.inf
    ids = np.sort(np.argsort(-counts, kind="stable")[: args.count]).astype(np.int32)
    rows = np.array(target.params["embed"], np.float32)
    rows *= np.median(np.linalg.norm(unembed, axis=1) / np.linalg.norm(rows[old], axis=1))
    rows[old] = unembed
    config = dataclasses.replace(config, draft_vocab_size=len(ids))
    mj.hub.save_eagle(args.output, config, params | {"ids": ids, "unembed": rows[ids]}, overwrite=True)
    print(f"{len(ids)} tokens, {np.isin(ids, old).sum()} of them as before, in {args.output}")


INSTRUCTIONS = {"alpaca": 60, "mt_bench": 40}
"""Number of prompts of each kind that `tau` decodes. No head is trained on these prompts."""


def tau(args: argparse.Namespace) -> None:
    """Measure tau in float32, counting the bonus token, on instructions that were not used in training."""
    import numpy as np

    import mars_jax as mj
    from mars_jax.serve.requests import make_requests
    from mars_jax.serve.session import Session
    from scripts.common import ratio_of_sums
    from scripts.smollm2 import margins

    target = mj.load("smollm2", dtype="float32")
    files = [args.data / f"{kind}.jsonl.xz" for kind in INSTRUCTIONS]
    prompts = [
        ids
        for file, count in zip(files, INSTRUCTIONS.values(), strict=True)
        for _, ids in margins.prompts(target, file, count, args.longest)
    ]
    shapes = {"chain of 3": {"num_draft_tokens": 3}, "tree 10-8-60": {"tree": mj.drafters.Dynamic(10, 8, 60)}}
    report = common.earlier_report(args.output) or {
        "prompts": len(prompts),
        "new_tokens": args.new_tokens,
        "heads": {},
    }
    report |= common.provenance(data=files, target=target.params)
    requests = {
        t: make_requests(target, prompts, temperature=t, max_new_tokens=args.new_tokens) for t in (0.0, 1.0)
    }
    rules = {"exact": mj.verify.exact(), "mars(0.9)": mj.verify.mars(theta=0.9)}
    cases = [("chain of 3", rule, t) for rule in rules for t in requests] + [("tree 10-8-60", "exact", 0.0)]
    for head in args.heads:
        figures = report["heads"].setdefault(Path(head).name if Path(head).exists() else head, {})
        for shape, rule, t in cases:
            name = f"{shape}, {rule}, temperature {t:g}"
            if name in figures:
                continue
            drafter = mj.drafters.load(f"eagle:{head}", target, **shapes[shape])
            output = Session.of(target, drafter, rules[rule], batch_size=args.batch_size).decode(requests[t])
            counts = np.array([[len(x.tokens), x.metrics.steps] for x in output.completions], np.float64)
            figures[name] = common.stamp() | {"tau": ratio_of_sums(counts[:, 0], counts[:, 1])}
            print(head, name, figures[name]["tau"], flush=True)
            common.write(args.output, report)


def write(path: Path, texts: list[str], *, mode: str = "w") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as file:
        file.writelines(f"{text}\n{data.SEPARATOR}\n" for text in texts if data.SEPARATOR not in text)


def main() -> None:
    parser = common.parser(__doc__)
    parts = {"texts": functools.partial(mix, TEXTS), "sources": functools.partial(mix, SOURCES)}
    parts |= {"own": own_turns, "tau": tau, "widen": widen}
    parser.add_argument("part", choices=parts)
    parser.add_argument(
        "--data",
        type=Path,
        help="folder of gsm8k_train.jsonl.xz and the other sources; tau: folder of alpaca.jsonl.xz",
    )
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=96)
    parser.add_argument(
        "--heads", nargs="+", default=["smollm2/eagle3"], help="tau, widen: EAGLE-3 heads of SmolLM2"
    )
    parser.add_argument("--features", type=Path, help="widen: a folder from `distill features`")
    parser.add_argument("--longest", type=int, default=160, help="tau: maximum number of tokens in a prompt")
    parser.add_argument("--new-tokens", type=int, default=64, help="tau: number of new tokens per completion")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    parts[args.part](args)


if __name__ == "__main__":
    main()
