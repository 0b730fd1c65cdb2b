"""Train tiny/dflash, a DFlash head of the embedded target, on the mixture that its EAGLE-3 head was trained on.

    python -m scripts.train.train_dflash --work runs/dflash --export mars_jax/assets/tiny/dflash \\
        --stories stories.txt.xz --dialogues dialogues.txt.xz --novels novels.txt.xz

If the command is killed, run it again to continue from the last checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp

import mars_jax as mj
from mars_jax.lab.training import data, dflash_training, distillation
from mars_jax.lab.training.objectives import divergence
from scripts import common
from scripts.train.train_embedded import CONTEXT, SHARES, texts

LAYERS, DEPTH, BLOCK, MLP = (1, 3, 5), 3, 8, 640
STEP = 2048


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of checkpoints, log and plot")
    parser.add_argument("--export", type=Path, required=True, help="folder to write the head to")
    for name in ("stories", "dialogues", "novels"):
        parser.add_argument(f"--{name}", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--problems", type=int, default=60_000)
    parser.add_argument("--novel-characters", type=int, default=6_000_000)
    parser.add_argument(
        "--tokens", type=float, default=1.5e6, help="tokens to train on (default: %(default)g)"
    )
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    target = mj.load("tiny/target", dtype="float32")
    assert target.config.max_positions == CONTEXT
    apprentice = dflash_training.new_dflash(
        target.config,
        target.params,
        layers=LAYERS,
        depth=DEPTH,
        block_size=BLOCK,
        intermediate_size=MLP,
        divergence=divergence("kl+tv"),
        seed=args.seed,
    )
    sources = texts(args)
    streams = [
        data.make_stream(sources[name], target.tokenizer.backend_tokenizer, weight=share)
        for name, share in SHARES.items()
    ]
    print(json.dumps({name: len(s.tokens) for name, s in zip(SHARES, streams, strict=True)}), flush=True)
    params = distillation.train(
        apprentice,
        target.params,
        streams,
        args.work,
        tokens=args.tokens,
        step_tokens=STEP,
        learning_rate=args.learning_rate,
        seed=args.seed + 3,
    )
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    mj.contrib.save_dflash(args.export, apprentice.config, low, overwrite=True)
    print(f"{sum(x.nbytes for x in jax.tree.leaves(low)) / 1e6:.2f} MB in {args.export}")


if __name__ == "__main__":
    main()
