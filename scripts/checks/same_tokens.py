"""Compare the tokens of another commit of mars-jax with those of this one, for every rule and drafter, on 16 prompts.

    python -m scripts.checks.same_tokens --old REV --output FILE

Both commits decode at temperatures 0 and 1. Random draws are keyed by position, so sampled tokens must be identical
too. The script needs git, and a clone that contains the other commit. Everything runs in float32 on the embedded
family. `--drafters` and `--rules` select cases; the earlier results of other cases are kept.

`--programs` compares the StableHLO of prefill and step instead, which takes minutes instead of hours. Identical
programs produce the same tokens at the same speed, so only cases whose programs differ need to be decoded.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scripts import common
from scripts.common import ROOT, script_of

NEW_TOKENS = 32
IN_GREEDY_BATCHES = ("exact", "rejection", "mars", "typical")
"""Rules that are also compared in greedy batches."""
STORIES = [
    *("Once upon a time", "The cat", "Lily wanted to", "One day, a boy"),
    *("The old dog", "Tom and his mom", "There was a", "It was a sunny"),
]


def prompts(target: Any) -> list[list[int]]:
    """Return eight beginnings of stories and eight word problems, as tokens."""
    from scripts.arithmetic import generator

    questions = [p.question for p in generator.generate(8, split="eval", seed=7)]
    return [target.encode(text) for text in STORIES] + [target.encode(q, chat=True) for q in questions]


LOOSE = {
    "mars": {"theta": 0.6}, "topk": {"delta": 2.0}, "typical": {"epsilon": 0.05}, "nucleus": {"mass": 0.95},
    "adaptive": {"theta": 0.1}, "entropy_gate": {"entropy": 0.5}, "fly": {"window": 1},
    "phrase": {"bound": 3.0, "window": 1},
    "budget": {"gap": 1.0}, "lenience": {"factor": 0.3}, "mixture": {"weight": 0.4}, "cactus": {"divergence": 1.0},
    "speccascade": {"alpha": 0.5}, "mentored": {"bound": 0.5}, "fuzzy": {"bound": 0.3},
    "released": {"ratio": 0.6}, "simulated": {"tau": 1.8},
}  # fmt: skip
"""Settings under which rules relax many tokens."""
WEIGHTS = {"equivalent": "case,space", "diversed": "tiny/diversed"}


def rules(target: Any) -> dict[str, Any]:
    """Return all registered rules, loaded with their weights, over every base that they support, and some variants."""
    import jax

    import mars_jax as mj
    from mars_jax import contrib
    from mars_jax.contrib.models import indicator

    head = indicator.init_params(target.config.hidden_size, jax.random.key(0), width=8)
    loaded = {
        "learned": mj.verify.LoadedRule(contrib.learned(theta=0.4), head | {"bias": jax.numpy.asarray(-1.0)})
    }
    for name, row in mj.verify.rules().items():
        if name == "learned":
            continue
        spec, settings = f"{name}:{WEIGHTS[name]}" if name in WEIGHTS else name, LOOSE.get(name, {})
        loaded[name] = mj.verify.load(spec, target, **settings)
        if "base" in row.settings:
            default, strict = row.settings["base"].default, row.settings["base"].choices
            for base in strict.keys() - {default}:
                loaded[f"{name} over {base}"] = mj.verify.load(spec, target, base=base, **settings)
    table = contrib.context("position", (1.5, 0.5), edges=(2,))
    return loaded | {
        "block": mj.verify.load("rejection", block=True),
        "mars over block": mj.verify.load("mars", base="rejection", block=True, theta=0.6),
        "mars gap": mj.verify.load("mars", margin="gap", theta=1.0),
        "mars by position": mj.verify.LoadedRule(contrib.by_context("position", theta=0.6), table),
    }


def drafters(target: Any) -> dict[str, Any]:
    import mars_jax as mj

    def load(spec: str, **options: Any) -> Any:
        return mj.drafters.load(spec, target, **options)

    small, head, dynamic = "model:tiny/draft", "eagle:tiny/eagle3", mj.drafters.Dynamic(4, 3, 12)
    return {
        "none": load("none"),
        "ngram": load("ngram", num_draft_tokens=4),
        "chain": load(small, num_draft_tokens=4),
        "sampled chain": load(small, num_draft_tokens=4, sample=True),
        "static tree": load(small, tree=(2, 2, 1)),
        "dynamic tree": load(small, tree=dynamic),
        "eagle chain": load(head, num_draft_tokens=4),
        "eagle sampled chain": load(head, num_draft_tokens=4, sample=True),
        "eagle dynamic tree": load(head, tree=dynamic),
        "sampled tree": load(small, tree=(2, 2, 1), sample=True),
        "dflash": load("dflash:tiny/dflash", tree=dynamic),
        "sprinter": load("sprinter:tiny/sprinter"),
        "trispec": load("trispec:tiny/trispec"),
    }


def dump(path: Path, drafter_names: list[str], rule_names: list[str], programs: bool) -> None:
    """Decode with the imported mars_jax, and write {case: tokens of every prompt}, or {case: digests of programs}."""
    import jax

    import mars_jax as mj
    from mars_jax.serve.prepare import prepared
    from mars_jax.serve.session import prepare

    target = mj.load(dtype="float32")
    texts, decoded = prompts(target), {}
    for draft, drafter in drafters(target).items():
        if drafter_names and draft not in drafter_names:
            continue
        for name, rule in rules(target).items():
            if rule_names and name not in rule_names:
                continue
            greedy, sampled = (
                mj.make_requests(target, texts, temperature=temperature, max_new_tokens=NEW_TOKENS)
                for temperature in (0.0, 1.0)
            )
            batches = {"temperatures 0 and 1": [*greedy, *sampled]}
            # A batch without sampling compiles to a different program.
            batches |= {"temperature 0 alone": greedy} if name in IN_GREEDY_BATCHES else {}
            for batch, requests in batches.items():
                case = f"{draft}, {name}, {batch}"
                try:
                    if programs:
                        decoded[case] = digests(prepared(target, drafter, requests, verify=rule))
                        continue
                    decoder, params, state = prepare(target, drafter, requests, verify=rule)
                    state, _ = mj.run(decoder, params, state)
                except mj.MarsError:  # the rule does not support the drafter
                    break
                tokens, length = jax.device_get((state.tokens, state.length))
                decoded[case] = [row[:n].tolist() for row, n in zip(tokens, length, strict=True)]
        path.write_text(json.dumps(decoded))
        print(f"{draft}: {len(decoded)} cases", file=sys.stderr, flush=True)
        jax.clear_caches()


def digests(requests: Any) -> list[str]:
    """Return the digests of the lowered programs of prefill and step."""
    import jax

    decoder, params = requests.decoder, requests.params
    prompts = requests.prompts(range(len(requests.requests)))
    state = jax.eval_shape(decoder.init, params, prompts)
    programs = jax.jit(decoder.init).lower(params, prompts), jax.jit(decoder.step).lower(params, state)
    return [hashlib.sha256(program.as_text().encode()).hexdigest() for program in programs]


def run(checkout: Path, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the cases in a checkout with the script of that checkout, which matches the interface of its package."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, script_of(checkout, "same_tokens.py"), "--dump", str(path)]
    command += ["--drafters", *args.drafters] if args.drafters else []
    command += ["--rules", *args.rules] if args.rules else []
    command += ["--programs"] if args.programs else []
    subprocess.run(command, cwd=checkout, env=environment, check=True)
    return json.loads(path.read_text())


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--old", default="HEAD", metavar="REV", help="a commit that has this script (default: HEAD)"
    )
    parser.add_argument("--output", type=Path)
    parser.add_argument("--drafters", nargs="+", default=[], help="default: all")
    parser.add_argument("--rules", nargs="+", default=[], help="default: all")
    parser.add_argument("--programs", action="store_true", help="compare programs, not tokens")
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dump is not None:
        dump(args.dump, args.drafters, args.rules, args.programs)
        return
    with tempfile.TemporaryDirectory() as work:
        old = Path(work) / "old"
        common.git("worktree", "add", "-q", "--detach", str(old), args.old)
        try:
            old_tokens = run(old, Path(work) / "old.json", args)
        finally:
            common.git("worktree", "remove", "--force", str(old))
        new_tokens = run(ROOT, Path(work) / "new.json", args)
    for case in sorted(new_tokens.keys() ^ old_tokens.keys()):
        print(f"{case}: only one of the two has it", file=sys.stderr)
    counts = {
        case: sum(a != b for a, b in zip(new_tokens[case], old_tokens[case], strict=True))
        for case in new_tokens
        if case in old_tokens
    }
    earlier = common.earlier_report(args.output)
    same_kind = (earlier.get("old"), earlier.get("programs", False)) == (args.old, args.programs)
    differ = (earlier.get("texts_that_differ", {}) if same_kind else {}) | counts
    report = {
        "environment": common.provenance(),
        "old": args.old,
        "programs": args.programs,
        "cases": len(differ),
        "prompts": len(next(iter(old_tokens.values()))),
        "new_tokens": NEW_TOKENS,
        "different": sum(differ.values()),
        "texts_that_differ": differ,
    }
    print(json.dumps(report, indent=1))
    common.write(args.output, report)
    sys.exit(bool(report["different"]))


if __name__ == "__main__":
    main()
