"""Tokens of the lossless rule against autoregression, on the models of the package and the device that is there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from mars_jax import assets, drafters, hub, verify
from mars_jax.core.rule import LoadedRule
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.likelihood import score
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session

PROMPTS = ("Once upon a time", "The little dog", "Anna went to the park because", "One day")
TOKENS = 48
"""New ones of a prompt."""
TREE = (4, 2, 2, 1)
TIE = 1e-3
"""Nats. Where two tokens are as near to one another, the order of sums decides between them, and that differs with the
number of nodes of a forward. In float32 logits of these models differ by about 1e-5 for it."""


class Way(NamedTuple):
    """A draft and a rule that change nothing but the speed."""

    name: str
    tree: tuple[int, ...] | None
    rule: Any


WAYS = (
    Way("exact, a chain of 5", None, verify.exact()),
    Way("exact, a tree", TREE, verify.exact()),
    # Its verdict comes from the kernel of acceptance, in the loop.
    Way("mars at theta = inf, a chain of 5", None, verify.mars(theta=float("inf"))),
    Way("mars at theta = inf, a tree", TREE, verify.mars(theta=float("inf"))),
)


def check_tokens(tick: Callable[[str], None] = lambda what: None) -> list[dict[str, Any]]:
    """Check each way to decode, a row each: "equal", "equal up to ties" or "differs".

    The first is autoregression beside one forward. Products are of full float32 precision, which some devices would
    otherwise round to fewer bits.
    """
    with jax.default_matmul_precision("highest"):
        target = hub.load(assets.TARGET, dtype="float32")
        requests = make_requests(target, PROMPTS, max_new_tokens=TOKENS, ignore_eos=True)
        prompts = [list(request.prompt_tokens) for request in requests]

        def drafted(tree: tuple[int, ...] | None) -> drafters.LoadedDrafter:
            return drafters.load(f"model:{assets.DRAFT}", target, tree=tree, dtype="float32")

        pairs: dict[tuple[int, ...] | None, Session] = {
            tree: Session(target=target, drafter=drafted(tree), batch_size=len(PROMPTS))
            for tree in (None, TREE)
        }
        tick("autoregression")
        plain = [done.tokens for done in pairs[None].autoregressive.run(requests)]
        rows = [
            {"way": "autoregression, beside one forward", "tokens": sum(map(len, plain))}
            | _chosen(target, prompts, plain)
        ]
        for way in WAYS:
            tick(way.name)
            done = pairs[way.tree].using(LoadedRule(way.rule)).run(requests)
            tokens = [completion.tokens for completion in done]
            steps = sum(completion.metrics.steps for completion in done)
            count = sum(map(len, tokens))
            rows.append(
                {"way": way.name, "tokens": count, "tau": count / steps}
                | compare(target, prompts, plain, tokens)
            )
        return rows


def _chosen(target: Pretrained, prompts: Sequence[list[int]], plain: Sequence[list[int]]) -> dict[str, Any]:
    """Check that each token is the best one of the target that reads the whole text at once."""
    ties = 0
    for prompt, tokens, scored in zip(
        prompts, plain, score(target, [p + t for p, t in zip(prompts, plain, strict=True)]), strict=True
    ):
        for i, token in enumerate(tokens):
            at = len(prompt) - 1 + i
            if token == scored.best[at]:
                continue
            gap = float(scored.z1[at] - scored.z2[at])
            if token != scored.second[at] or gap > TIE:
                return {
                    "status": "differs",
                    "detail": f"token {i} of {prompt[:8]} is not the best by {gap:.1e} nats",
                }
            ties += 1
    return {"status": "equal up to ties" if ties else "equal", "detail": None}


def compare(
    target: Pretrained, prompts: Sequence[list[int]], plain: Sequence[list[int]], tokens: Sequence[list[int]]
) -> dict[str, Any]:
    """Tokens of a way beside those of autoregression, whose first difference must be a tie.

    Args:
      target: says how near two tokens are.
      prompts: token ids.
      plain: of autoregression, for each prompt.
      tokens: of the way.
    """
    ties = 0
    for prompt, a, b in zip(prompts, plain, tokens, strict=True):
        if a == b:
            continue
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        if at is None:
            return {"status": "differs", "detail": f"{len(b)} tokens in place of {len(a)}"}
        one, other = score(target, [[*prompt, *a[: at + 1]], [*prompt, *b[: at + 1]]])
        gap = abs(float(one.log_p[-1] - other.log_p[-1]))
        if gap > TIE:
            said = f"token {at} of {len(a)} is {b[at]} in place of {a[at]}, {gap:.1e} nats from it"
            return {"status": "differs", "detail": said}
        ties += 1
    return {
        "status": "equal up to ties" if ties else "equal",
        "detail": f"in {ties} of {len(plain)} texts" if ties else None,
    }
