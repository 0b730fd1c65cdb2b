"""A model of useful size on this CPU: the shapes of Qwen2.5-1.5B and 0.5B, with random weights that every side reads.

    pip install cyllama && pip install 'mars-jax[gguf]' torch transformers
    python scripts/bench_shapes.py --texts DATA/gsm8k_train.jsonl.xz --output scripts/results/bench_shapes.json

The weights are written once, in bfloat16, as a Hugging Face folder and as GGUF files, into a temporary folder. All
times are taken in turns in one process, on the same cores with as many threads.

- `plain`: 24 tokens after 16, greedy, one row: ours in bfloat16 and in 8 bits, transformers in bfloat16 and float32,
  llama.cpp in bfloat16, 8 and 4 bits. Times hold the reading of the 16 tokens.
- `forward`: one forward of the target over so many nodes of a row, and over one node of so many rows, 256 tokens in the
  cache; beside it the products with its weights alone, in one program.
- `drafted`: tokens/s over plain decoding, drafted by the 0.5B shape, where `simulated` accepts as many tokens as were
  accepted of real pairs: chains of 5 with tau 4.9 and 5.3 (Qwen2.5-Coder-1.5B by 0.5B on HumanEval, `exact` and
  `mars`), 2.4 and 3.6 (on MT-Bench's writing), and a tree that accepts 4.9.
- `ngram`: n-grams, as long as pays, over real texts: a bias on the logits has the target say them. Over plain decoding
  of the same texts.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import lzma
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import common
import jax
import jax.numpy as jnp
import numpy as np
from smollm2_peers import Llama, quantised
from torch_side import Transformers

import mars_jax as mj
from mars_jax import contrib, drafters
from mars_jax.cli.generate.job import SHORT
from mars_jax.core.types import ForwardOutput, LanguageModel, Visible
from mars_jax.models.layers import dense
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session

QWEN = {
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
    "rope_theta": 1e6,
    "max_position_embeddings": 32_768,
}
SHAPES: dict[str, dict[str, Any]] = {
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
}  # fmt: skip
PROMPT, NEW, CACHED = 16, 24, 256
NODES, ROWS = (1, 2, 3, 4, 6, 8, 16, 32), (8, 16)
TREE = (4, 2, 1, 1, 1)
"""Children by depth, 28 nodes."""


def write(shape: str, folder: Path) -> Path:
    """A checkpoint of random weights in bfloat16, as transformers writes it."""
    import torch
    import transformers

    config = transformers.Qwen2Config(num_key_value_heads=2, **QWEN, **SHAPES[shape])
    torch.manual_seed(0)
    with torch.device("meta"):
        model: Any = transformers.Qwen2ForCausalLM(config)
    model = model.bfloat16().to_empty(device="cpu")
    for name, tensor in model.named_parameters():
        torch.nn.init.ones_(tensor) if "norm" in name else torch.nn.init.normal_(tensor, std=0.02)
    model.save_pretrained(folder / shape)
    return folder / shape


def to_gguf(checkpoint: Path, path: Path) -> None:
    """The checkpoint as llama.cpp reads it, without a tokenizer, in bfloat16; norms and biases in float32."""
    import gguf
    from safetensors import safe_open

    config = json.loads((checkpoint / "config.json").read_text())
    made = gguf.GGUFWriter(path, "qwen2")
    made.add_block_count(config["num_hidden_layers"])
    made.add_context_length(config["max_position_embeddings"])
    made.add_embedding_length(config["hidden_size"])
    made.add_feed_forward_length(config["intermediate_size"])
    made.add_head_count(config["num_attention_heads"])
    made.add_head_count_kv(config["num_key_value_heads"])
    made.add_layer_norm_rms_eps(config["rms_norm_eps"])
    made.add_rope_freq_base(QWEN["rope_theta"])
    made.add_vocab_size(config["vocab_size"])
    made.add_tokenizer_model("no_vocab")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, config["num_hidden_layers"])
    kinds = gguf.GGMLQuantizationType
    with safe_open(str(checkpoint / "model.safetensors"), "numpy") as file:
        for name in file.keys():  # noqa: SIM118, it is no dict
            stem, _, end = name.rpartition(".")
            array = file.get_tensor(name)
            to = f"{names.get_name(stem)}.{end}"
            if array.ndim == 1:
                made.add_tensor(to, array.astype(np.float32))
            else:
                made.add_tensor(to, array.view(np.uint8), raw_dtype=kinds.BF16)
        made.write_header_to_file()
        made.write_kv_data_to_file()
        made.write_tensors_to_file()
    made.close()


def decoding(session: Session, prompts: Sequence[Sequence[int]], new: int) -> Callable[[], Any]:
    """What decodes prompts one after the other, `new` tokens each, compiled."""
    asked = [make_requests(session.target, [ids], max_new_tokens=new, ignore_eos=True) for ids in prompts]
    for one in asked:
        session.compile(one)
    return lambda: [session.run(one) for one in asked]


def prompt(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 150_000, count).tolist()


def plain(checkpoint: Path, folder: Path, turns: int) -> dict[str, Any]:
    ids = prompt(PROMPT, 0)
    lib: Any = importlib.import_module("cyllama.llama.llama_cpp")
    files = {"bfloat16": folder / "bfloat16.gguf"}
    to_gguf(checkpoint, files["bfloat16"])
    files |= quantised(lib, files["bfloat16"], folder)
    ways: dict[str, Callable[[], Any]] = {}
    for name in ("bfloat16", "int8"):
        target = mj.load(checkpoint, dtype=name)
        ways[f"mars-jax, {name}"] = decoding(Session.of(target), [ids], NEW)
    for dtype in ("bfloat16", "float32"):
        made = Transformers(checkpoint, dtype=dtype)
        ways[f"transformers, {dtype}"] = partial(made.generate, [ids], NEW)
    threads = len(common.cores())
    for name, file in files.items():
        ways[f"llama.cpp, {name}"] = partial(Llama(lib, file, threads, NEW).generate, [ids])
    seconds = common.in_turns(ways, turns)
    best = min((n for n in seconds if n.startswith("transformers")), key=lambda n: np.median(seconds[n]))
    over = {
        "transformers_over_mars_jax": (best, "mars-jax, bfloat16"),
        "mars_jax_over_llama_cpp_bfloat16": ("mars-jax, bfloat16", "llama.cpp, bfloat16"),
        "mars_jax_over_llama_cpp_8_bits": ("mars-jax, int8", "llama.cpp, Q8_0"),
        "mars_jax_over_llama_cpp_4_bits": ("mars-jax, int8", "llama.cpp, Q4_0"),
    }
    return {
        "tokens_per_second": {name: NEW / float(np.median(taken)) for name, taken in seconds.items()},
        "best_of_transformers": best,
    } | {name: common.ratio(seconds[a], seconds[b]) for name, (a, b) in over.items()}


def products(params: Any, rows: int) -> Callable[[], Any]:
    """What multiplies as many rows with every weight of a forward, and does nothing else."""
    weights = [
        [layer[name] for name in ("q", "k", "v", "o", "gate", "up", "down")] for layer in params["layers"]
    ]
    dtype = params["embed"].dtype

    @jax.jit
    def call(weights: Any, embed: Any) -> Any:
        total = jnp.zeros((), jnp.float32)
        for w in [*jax.tree.leaves(weights), embed]:
            x = jnp.ones((rows, 1, w.shape[1]), dtype) + total.astype(dtype)  # one after the other
            total = dense(x, w)[0, 0, 0].astype(jnp.float32) * 1e-9
        return total

    return lambda: call(weights, params["embed"])


def forward(target: mj.Pretrained, turns: int) -> list[dict[str, Any]]:
    model = target.model

    def whole(rows: int, nodes: int) -> Callable[[], Any]:
        start, tokens = jnp.full((rows,), CACHED, jnp.int32), jnp.ones((rows, nodes), jnp.int32)
        cache = model.init_cache(rows, CACHED + nodes)

        @jax.jit
        def call(params: Any, cache: Any) -> Any:
            output = model.forward(params, tokens, Visible.causal(start, nodes), cache)
            return model.unembed(params, output.hidden).sum(), output.cache

        return lambda: call(target.params, cache)

    sizes = [(1, nodes) for nodes in NODES] + [(rows, 1) for rows in ROWS]
    ways = {size: whole(*size) for size in sizes}
    ways |= {("products", n): products(target.params, n) for n in sorted({a * b for a, b in sizes})}
    seconds = common.in_turns(ways, turns)
    rows = []
    for a, b in sizes:
        taken, alone = seconds[a, b], seconds["products", a * b]
        rows.append(
            {
                "rows": a,
                "nodes": b,
                "ms": float(1e3 * np.median(taken)),
                "products_ms": float(1e3 * np.median(alone)),
                "over_products": common.ratio(taken, alone),
                "over_one": common.ratio(taken, seconds[1, 1]),
            }
        )
        print(rows[-1], flush=True)
    return rows


def drafted(target: mj.Pretrained, draft: Path, turns: int) -> dict[str, Any]:
    prompts = [prompt(PROMPT, seed) for seed in range(2)]
    small = mj.load(draft, dtype="bfloat16")
    chain = drafters.load(f"model:{draft}", target, num_draft_tokens=5)
    ways = {"plain": decoding(Session.of(target), prompts, 48)}
    ways["the draft alone"] = decoding(Session.of(small), prompts, 48)
    asked: dict[str, tuple[Any, float]] = {
        f"chain of 5, tau {tau}": (chain, tau) for tau in (4.9, 5.3, 2.4, 3.6)
    }
    asked["tree of 28, tau 4.9"] = (drafters.load(f"model:{draft}", target, tree=TREE), 4.9)
    reached: dict[str, float] = {}
    for name, (drafter, tau) in asked.items():
        session = Session.of(target, drafter, contrib.simulated(tau))
        ways[name] = decoding(session, prompts, 48)
        done = [one for some in ways[name]() for one in some]
        reached[name] = sum(len(c.tokens) for c in done) / sum(c.metrics.steps for c in done)
    seconds = common.in_turns(ways, turns, warm=0)
    return {
        name: {
            "tokens_per_second": float(2 * 48 / np.median(taken)),
            "over_plain": common.ratio(seconds["plain"], taken),
            **({"tau": reached[name]} if name in reached else {}),
        }
        for name, taken in seconds.items()
    }


def says(target: mj.Pretrained, text: Sequence[int]) -> mj.Pretrained:
    """The target as one that says a text: its forward is the whole one, and a bias is added to its logits."""
    base = target.model

    def forward(params: Any, tokens: Any, visible: Visible, cache: Any) -> ForwardOutput:
        found = base.forward(params["weights"], tokens, visible, cache)
        following = params["text"][visible.positions + 1]
        marked = following.astype(jnp.float32)[..., None]
        return found._replace(hidden=jnp.concatenate([found.hidden.astype(jnp.float32), marked], axis=-1))

    def unembed(params: Any, hidden: Any) -> Any:
        logits = base.unembed(params["weights"], hidden[..., :-1].astype(jnp.bfloat16))
        following = hidden[..., -1].astype(jnp.int32)
        return logits + 1e4 * jax.nn.one_hot(following, base.vocab_size, dtype=jnp.float32)

    model = LanguageModel(base.init_cache, forward, unembed, base.vocab_size)
    params = {"weights": target.params, "text": jnp.asarray([*text, *[0] * 64], jnp.int32)}
    return dataclasses.replace(target, model=model, params=params)


def ngram(target: mj.Pretrained, texts: Sequence[Sequence[int]], turns: int) -> dict[str, Any]:
    ways: dict[str, list[Callable[[], Any]]] = {"plain": [], "ngram": []}
    equal = 0
    for text in texts:
        saying = says(target, text)
        short = drafters.load("ngram", saying, draft_size="auto", num_draft_tokens=SHORT)
        for name, drafter in {"plain": "none", "ngram": short}.items():
            run = decoding(Session.of(saying, drafter), [text[: len(text) // 3]], len(text) - len(text) // 3)
            [[done]] = run()
            equal += list(done.tokens) == list(text[len(text) // 3 :])
            ways[name].append(run)
    every: dict[str, Callable[[], Any]] = {
        name: (lambda some=some: [run() for run in some]) for name, some in ways.items()
    }
    seconds = common.in_turns(every, turns, warm=0)
    return {
        "texts": len(texts),
        "texts_as_given": equal // 2,
        "over_plain": common.ratio(seconds["plain"], seconds["ngram"]),
    }


def texts_of(path: Path, count: int) -> list[list[int]]:
    """Real texts in ids of SmolLM2's tokenizer, which are below this vocabulary; equally long, so one shape serves."""
    tokenizer = mj.load("smollm2", dtype="bfloat16").tokenizer
    with lzma.open(path, "rt") as file:
        rows = [json.loads(line) for line, _ in zip(file, range(200), strict=False)]
    ids = [tokenizer(row["question"] + "\n" + row["answer"]).input_ids for row in rows]
    return [text[:96] for text in ids if len(text) >= 96][:count]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--texts", type=Path, required=True, help="gsm8k_train.jsonl.xz")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--parts", nargs="+", default=["plain", "forward", "drafted", "ngram"])
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    texts = texts_of(args.texts, 3) if "ngram" in args.parts else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        big, small = (write(shape, folder) for shape in SHAPES)
        report = common.kept(args.output)
        report |= common.provenance("torch", "transformers", "cyllama") | {"turns": args.turns}
        target = mj.load(big, dtype="bfloat16")
        parts: dict[str, Callable[[], Any]] = {
            "forward": lambda: forward(target, args.turns),
            "drafted": lambda: drafted(target, small, args.turns),
            "ngram": lambda: ngram(target, texts, args.turns),
            "plain": lambda: plain(big, folder, args.turns),  # last, as it loads most
        }
        for part in args.parts:
            made = common.stamp()
            found = parts[part]()
            report[part] = {"made": made} | (found if isinstance(found, dict) else {"rows": found})
            print(json.dumps({part: report[part]}), flush=True)
            if args.output:
                common.write(args.output, report)


if __name__ == "__main__":
    main()
