"""A completion as the row that is written of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mars_jax.cli.flags import SAMPLING
from mars_jax.serve.requests import Completion, Request


def row_head(request: Request) -> dict[str, Any]:
    """Return the keys with which the row of a request begins, known before anything is decoded."""
    return (
        ({} if request.id is None else {"id": request.id})
        | {"prompt": request.prompt}
        | ({} if request.messages is None else {"messages": list(request.messages)})
    )


def to_row(completion: Completion, rule: str, run: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the row of a finished prompt; docs/rows.md has its schema. `tau` counts the correction or bonus token.

    Args:
      completion: of the prompt.
      rule: as reports name it.
      run: what tells it from the rows of other runs, such as `Job.run_of` gives it.
    """
    metrics = completion.metrics
    return (
        row_head(completion.request)
        | {
            "text": completion.text,
            "prompt_tokens": list(completion.request.prompt_tokens),
            "tokens": completion.tokens,
            "finish_reason": completion.finish_reason,
            "steps": metrics.steps,
            "tau": metrics.tau,
            "proposed": metrics.proposed,
            "accepted_exact": metrics.accepted_exact,
            "accepted_relaxed": metrics.accepted_relaxed,
            "depth_histogram": list(metrics.depth_histogram),
            "seconds": completion.seconds,
            "tokens_per_second": completion.tokens_per_second,
            "rule": rule,
            "sampling": {name: getattr(completion.request, name) for name in (*SAMPLING, "strict")},
        }
        | ({} if run is None else {"run": dict(run)})
        | ({} if completion.log_probs is None else {"log_probs": completion.log_probs._asdict()})
    )
