"""Comparison of greedy tokens under the lossless rules with the target's own choices on this device."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from mars_jax import drafters, hub, verify
from mars_jax.core.rule import LoadedRule
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.likelihood import score
from mars_jax.serve.requests import make_requests
from mars_jax.serve.session import Session
from mars_jax.utils import activity, assets
from mars_jax.utils.types import JsonObject

PROMPTS = ("Once upon a time", "The little dog", "Anna went to the park because", "One day")
TOKENS = 48
"""Number of new tokens per prompt."""
TREE = (4, 2, 2, 1)
TIE = 1e-3
"""Maximum difference in nats between logits that count as tied. The number of nodes in a forward pass changes the order
of summation. In float32, this changes these models' logits by about 1e-5."""


def check_tokens() -> list[JsonObject]:
    """Decode with and without drafts, and compare every token with the target's best one.

    Matrix products use full float32 precision; by default, some devices round the operands to fewer bits.

    Returns:
      One row per decoding method: its name, status ("equal", "equal up to ties" or "differs"), detail and tau.
    """
    with jax.default_matmul_precision("highest"):
        target = hub.load(assets.TARGET, dtype="float32")
        requests = make_requests(target, PROMPTS, max_new_tokens=TOKENS, ignore_eos=True)
        prompts = [list(request.prompt_tokens) for request in requests]
        chain, tree = (
            Session(
                target=target,
                drafter=drafters.load(f"model:{assets.DRAFT}", target, tree=widths, dtype="float32"),
                batch_size=len(PROMPTS),
            )
            for widths in (None, TREE)
        )
        # The rule `mars` verifies drafts in the acceptance kernel, and `exact` does not. At theta = inf, `mars` relaxes
        # nothing, so both must give the same tokens.
        strict_mars = LoadedRule(verify.mars(theta=float("inf")))
        sessions = {
            "autoregression": chain.autoregressive,
            "exact, a chain of 5": chain,
            "exact, a tree": tree,
            "mars at theta = inf, a chain of 5": chain.using(strict_mars),
            "mars at theta = inf, a tree": tree.using(strict_mars),
        }
        rows = []
        for name, session in sessions.items():
            with activity.doing(name):
                completions = session.decode(requests).completions
            tokens = [completion.tokens for completion in completions]
            num_tokens = sum(map(len, tokens))
            tau = num_tokens / sum(completion.metrics.steps for completion in completions)
            rows.append(
                {"way": name, "tokens": num_tokens, "tau": tau} | compare_with_target(target, prompts, tokens)
            )
        return rows


def compare_with_target(
    target: Pretrained, prompts: Sequence[list[int]], tokens: Sequence[list[int]]
) -> JsonObject:
    """Check that each token is the target's best one given the preceding tokens, or tied with it.

    Args:
      target: the model, which scores each prompt and its tokens in one forward pass.
      prompts: token ids of each prompt.
      tokens: token ids decoded for each prompt.
    """
    token_lists = [prompt + completion for prompt, completion in zip(prompts, tokens, strict=True)]
    num_ties = 0
    for prompt, completion, scored in zip(prompts, tokens, score(target, token_lists), strict=True):
        for i, token in enumerate(completion):
            # Position whose logits predict the token.
            position = len(prompt) - 1 + i
            if token == scored.best[position]:
                continue
            is_second = token == scored.second[position]
            if not is_second or scored.z1[position] - scored.z2[position] > TIE:
                detail = f"token {i} after {prompt[:8]} is {token} in place of {scored.best[position]}"
                return {"status": "differs", "detail": detail}
            num_ties += 1
    if num_ties:
        return {"status": "equal up to ties", "detail": f"{num_ties} ties"}
    return {"status": "equal", "detail": None}
