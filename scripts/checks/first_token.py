"""Measure the time that a new process of `mars-jax generate` takes for a short completion, cold and warm.

    python -m scripts.checks.first_token --keep scripts/results/first_token.json

Each run starts a new process that decodes 16 tokens with the default draft. The first run has an empty cache folder
("cold"), and the other runs use the files that it stored ("warm"). This script writes `stand-in`, a Gemma 3 model with
281 million random weights in Q4_K and a vocabulary of 262,144 tokens.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from scripts import common

VOCAB, WIDTH, INNER, LAYERS, HEADS, HEAD_DIM = 262144, 768, 2048, 12, 4, 256
MODELS = ("stand-in", "smollm2", "tiny/target")
PROMPT = "The history of the lighthouse begins"
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


def pieces(draw: np.random.Generator) -> Iterator[str]:
    """Yield distinct pieces of a sentencepiece vocabulary: characters, and concatenations of two earlier pieces."""
    characters = [
        _SPACE,
        *map(chr, range(33, 127)),
        *map(chr, range(0xC0, 0x250)),
        *map(chr, range(0x4E00, 0x5600)),
    ]
    yield from characters
    known, listed = set(characters), characters[:95]
    while True:
        # Choose early pieces more often, because in a learned vocabulary many longer pieces contain the same frequent
        # ones.
        first, second = (listed[int(len(listed) * draw.random() ** 2)] for _ in range(2))
        joined = first + second
        if len(joined) <= 16 and joined not in known:
            known.add(joined)
            listed.append(joined)
            yield joined


def write_stand_in(path: Path) -> Path:
    """Write the stand-in for Gemma 3 270M as a GGUF file with random blocks, unless the file exists."""
    import gguf

    from mars_jax.hub.config_json import from_json
    from mars_jax.models.weights import weights

    if path.exists():
        return path
    draw = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path.with_suffix(".part"), "gemma3")
    sizes = {
        "embedding_length": WIDTH,
        "feed_forward_length": INNER,
        "block_count": LAYERS,
        "context_length": 32768,
    }
    heads = {"head_count": HEADS, "head_count_kv": 1, "key_length": HEAD_DIM, "value_length": HEAD_DIM}
    sizes |= {f"attention.{key}": count for key, count in (heads | {"sliding_window": 512}).items()}
    for key, count in sizes.items():
        writer.add_uint32(f"gemma3.{key}", count)
    writer.add_float32("gemma3.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_float32("gemma3.rope.freq_base", 1e6)
    special = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    named = pieces(draw)
    tokens = special + [next(named) for _ in range(VOCAB - len(special))]
    writer.add_string("tokenizer.ggml.model", "llama")
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.scores", [-float(i) for i in range(VOCAB)])
    writer.add_array("tokenizer.ggml.token_type", [3, 3, 3, 2] + [6] * 256 + [1] * (VOCAB - len(special)))
    for name, token in {"bos": 2, "eos": 1, "unknown": 3, "padding": 0}.items():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, LAYERS)
    config = {
        "model_type": "gemma3_text",
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
    }
    config |= {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": 1}
    for row in weights(from_json(config | {"head_dim": HEAD_DIM, "tie_word_embeddings": True})):
        name = names.get_name(row.name, try_suffixes=(".weight", ".bias"))
        assert name is not None
        if len(row.shape) == 1:
            writer.add_tensor(name, np.ones(row.shape, np.float32))
            continue
        kind = gguf.GGMLQuantizationType.Q4_K
        size = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = draw.integers(0, 256, (row.shape[0], row.shape[1] // 256, size), np.uint8)
        # The 4-bit values have mean 7.5. Make the factor of the minima 7.5 times that of the scales, so that the
        # weights are centred on 0.
        factors = draw.uniform(0.5, 1, (*blocks.shape[:2], 2)).astype(np.float16)
        blocks[..., :4] = (factors * np.asarray([2e-4, 1.5e-3], np.float16)).view(np.uint8)
        writer.add_tensor(name, blocks.reshape(row.shape[0], -1), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".part").replace(path)
    return path


def run(model: str, cache: Path) -> dict[str, float]:
    """Run the command in a new process, and return its wall time and its processor time, in seconds."""
    command = [sys.executable, "-m", "mars_jax.generate", "--target", model, "--max-new-tokens", "16", PROMPT]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    # Store bytecode in the cache folder so that only the first run compiles the modules, as in an installed package.
    environment = os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPYCACHEPREFIX": str(cache)}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(seconds, 2), "processor_seconds": round(used, 2)}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=f"default: {' '.join(MODELS)}")
    parser.add_argument("--repeats", type=int, default=5, help="warm runs of each model; default: 5")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir()), help="folder of the stand-in"
    )
    parser.add_argument("--keep", type=Path, metavar="FILE", help="write the results to this JSON file")
    args = parser.parse_args()
    millions = (VOCAB * WIDTH + LAYERS * (2 * WIDTH * (HEADS + 1) * HEAD_DIM + 3 * WIDTH * INNER)) // 10**6
    report: dict[str, Any] = common.provenance() | {"stand_in_millions": millions, "models": {}}
    for model in args.models:
        name = str(write_stand_in(args.folder / "stand-in-270m.gguf")) if model == "stand-in" else model
        with tempfile.TemporaryDirectory() as cache:
            cold, *warm = [run(name, Path(cache)) for _ in range(1 + args.repeats)]
        medians = {key: round(float(np.median([times[key] for times in warm])), 2) for key in cold}
        report["models"][model] = {"cold": cold, "warm": warm, "median": medians}
        print(model, "cold", cold, "warm", medians, flush=True)
    common.write(args.keep, report)


if __name__ == "__main__":
    main()
