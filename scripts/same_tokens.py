"""Compare the tokens of another commit of mars-jax with this one's: every rule with every drafter on 16
prompts, at temperatures 0 and 1.

    python scripts/same_tokens.py --old e8fc8ba --output scripts/results/same_tokens.json

What draws nothing is compared as it is. Where draws decide, at temperature 1 and in every text of `simulated`, which
accepts by chance, a commit that is older than draws keyed by position is compared with those keys patched into it
(`POSITION_KEYS`): nothing else may differ. It needs git, and a checkout that holds the other commit. Everything runs in
float32 on the embedded family. `--drafters` and `--rules` run some cases and keep the others' figures.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NEW_TOKENS = 32
STORIES = [
    "Once upon a time",
    "The cat",
    "Lily wanted to",
    "One day, a boy",
    "The old dog",
    "Tom and his mom",
]
STORIES += ["There was a", "It was a sunny"]

POSITION_KEYS = [
    (
        "mars_jax/decode.py",
        """        step_keys = jax.vmap(jax.random.fold_in)(state.keys, state.length)
        draft_keys, verify_keys = jnp.unstack(jax.vmap(jax.random.split)(step_keys), axis=1)
""",
        """        draft_keys, verify_keys = jnp.unstack(jax.vmap(jax.random.split)(state.keys), axis=1)
        draft_keys = jax.vmap(jax.random.fold_in)(draft_keys, state.length)
""",
    ),
    (
        "mars_jax/decode.py",
        "        verdict = verify(verify_keys, tree, logits, state.controls, *learned)\n",
        """        from mars_jax import sampling

        sampling.POSITIONS = start[:, None] + tree.depths
        verdict = verify(verify_keys, tree, logits, state.controls, *learned)
        sampling.POSITIONS = None
""",
    ),
    (
        "mars_jax/sampling.py",
        "    nodes = jnp.arange(num_nodes, dtype=jnp.int32)\n    return jax.vmap(",
        """    if POSITIONS is not None:
        one = lambda key, i: jax.random.uniform(jax.random.fold_in(key, i), dtype=jnp.float32)
        return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(keys, POSITIONS[:, :num_nodes])
    nodes = jnp.arange(num_nodes, dtype=jnp.int32)
    return jax.vmap(""",
    ),
    ("mars_jax/sampling.py", "BLOCK = 128\n", "POSITIONS = None\nBLOCK = 128\n"),
    (
        "mars_jax/verify/rejection.py",
        """            stretch_keys = jax.vmap(jax.random.fold_in)(keys, start)
            accept_keys, draw_keys = (
                jax.vmap(jax.random.fold_in, (0, None))(stretch_keys, i) for i in (0, 1)
            )
""",
        """            from mars_jax import sampling

            first = sampling.POSITIONS[:, 0]
            accept_keys, draw_keys = jnp.unstack(jax.vmap(jax.random.split)(keys), axis=1)
            if self.block:
                accept_keys = jax.vmap(jax.random.fold_in)(accept_keys, first + start)
""",
    ),
    (
        "mars_jax/verify/rejection.py",
        "            return stop, inverse_cdf(\n",
        """            draw_keys = jax.vmap(jax.random.fold_in)(draw_keys, first + stop)
            return stop, inverse_cdf(
""",
    ),
]
"""(file, what it says, what it is to say) of the commit before the layout of `core/`."""


def is_old() -> bool:
    """Whether the mars_jax that is imported is from before the layout of `core/`."""
    import mars_jax

    return (Path(mars_jax.__file__ or "").parent / "batch.py").exists()


def prompts(target: Any) -> list[list[int]]:
    """Eight beginnings of stories and eight word problems, as tokens."""
    arithmetic = import_module(f"mars_jax.{'tasks' if is_old() else 'evaluate.tasks'}.arithmetic")
    questions = [p.question for p in arithmetic.generate(8, split="eval", seed=7)]
    return [target.encode(text) for text in STORIES] + [target.encode(q, chat=True) for q in questions]


def rules(hidden: int) -> dict[str, Any]:
    """Every rule that both commits have, by a name of its own; those with weights as (rule, weights)."""
    import jax

    from mars_jax import contrib, verify
    from mars_jax.contrib.models import indicator

    head = indicator.init_params(hidden, jax.random.key(0), width=8) | {"bias": jax.numpy.asarray(-1.0)}
    table = contrib.context("position", (1.5, 0.5), edges=(2,))
    mars: Any = verify.mars
    by_position = (mars(context=table), ()) if is_old() else (contrib.by_context("position"), table)
    exact, rejection, block = verify.exact(), verify.rejection(), verify.rejection(block=True)
    return {
        "exact": (exact, ()),
        "rejection": (rejection, ()),
        "block": (block, ()),
        "mars": (verify.mars(), ()),
        "mars gap": (verify.mars(margin="gap", theta=1.0), ()),
        "mars by position": by_position,
        "mars over rejection": (verify.mars(rejection), ()),
        "mars over block": (verify.mars(block), ()),
        "learned": (contrib.learned(theta=0.4), head),
        "simulated": (verify.simulated(1.8), ()),
    }


def drafters(target: Any) -> dict[str, Any]:
    from mars_jax import drafters

    def load(spec: str, **options: Any) -> Any:
        return drafters.load(spec, target, **options)

    small, head, dynamic = "model:tiny/draft", "eagle:tiny/eagle3", drafters.Dynamic(4, 3, 12)
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
    }


def draws(rule: str, temperature: float) -> bool:
    """Whether random numbers decide a text."""
    return temperature > 0 or rule == "simulated"


def dump(kinds: list[str], path: Path, chosen: list[str], some: list[str]) -> None:
    """Decode with whatever mars_jax is imported, and write {case: tokens of every prompt}."""
    import jax

    import mars_jax as mj

    prepare = import_module("mars_jax.batch" if is_old() else "mars_jax.serve.prepare").prepare

    target = mj.load(dtype="float32")
    texts, found = prompts(target), {}
    loaded = getattr(mj.verify, "LoadedRule", None)
    for draft, drafter in drafters(target).items():
        if chosen and draft not in chosen:
            continue
        for name, (rule, weights) in rules(target.config.hidden_size).items():
            if ("tree" in draft and ("rejection" in name or "block" in name)) or (
                name == "simulated" and draft in ("none", "ngram")
            ):
                continue
            for temperature in (0.0, 1.0):
                if (some and name not in some) or (
                    "drawn" if draws(name, temperature) else "plain"
                ) not in kinds:
                    continue
                requests = mj.make_requests(target, texts, temperature=temperature, max_new_tokens=NEW_TOKENS)
                given = loaded(rule, weights) if loaded else rule
                decoder, params, state = prepare(target, drafter, requests, verify=given)
                state, _ = mj.run(decoder, params._replace(verify=weights), state)
                tokens, length = jax.device_get((state.tokens, state.length))
                found[f"{draft}, {name}, temperature {temperature:g}"] = [
                    row[:n].tolist() for row, n in zip(tokens, length, strict=True)
                ]
        print(f"{draft}: {len(found)} cases", file=sys.stderr, flush=True)
        jax.clear_caches()
    path.write_text(json.dumps(found))


def run(checkout: Path, kinds: list[str], path: Path, args: argparse.Namespace) -> dict[str, Any]:
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    command = [sys.executable, __file__, "--dump", str(path), "--kinds", *kinds]
    command += ["--drafters", *args.drafters] if args.drafters else []
    command += ["--rules", *args.rules] if args.rules else []
    subprocess.run(command, cwd=checkout, env=environment, check=True)
    return json.loads(path.read_text())


def patch(checkout: Path) -> None:
    for name, before, after in POSITION_KEYS:
        file = checkout / name
        text = file.read_text()
        assert text.count(before) == 1, f"{name} of the other commit is not the one that this patch is for"
        file.write_text(text.replace(before, after))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--old", default="e8fc8ba", metavar="REV")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--drafters", nargs="+", default=[], help="some of them (default: all)")
    parser.add_argument("--rules", nargs="+", default=[], help="some of them (default: all)")
    parser.add_argument("--dump", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--kinds", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.dump is not None:
        dump(args.kinds, args.dump, args.drafters, args.rules)
        return
    with tempfile.TemporaryDirectory() as work:
        old, here = Path(work) / "old", Path(work)
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", old, args.old], check=True)
        try:
            theirs = run(old, ["plain"], here / "plain.json", args)
            patch(old)
            theirs |= run(old, ["drawn"], here / "patched.json", args)
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", old], check=True)
        ours = run(ROOT, ["plain", "drawn"], here / "new.json", args)
    found = {
        case: sum(a != b for a, b in zip(ours.get(case, []), theirs.get(case, []), strict=True))
        for case in theirs | ours
    }
    kept = json.loads(args.output.read_text()) if args.output and args.output.exists() else {}
    differ = (kept.get("texts_that_differ", {}) if kept.get("old") == args.old else {}) | found
    report = {
        "old": args.old,
        "cases": len(differ),
        "prompts": len(next(iter(theirs.values()))),
        "new_tokens": NEW_TOKENS,
        "different": sum(differ.values()),
        "texts_that_differ": differ,
    }
    print(json.dumps(report, indent=1))
    if args.output is not None:
        args.output.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(bool(report["different"]))


if __name__ == "__main__":
    main()
