"""`--refine`: a draft that learns from its failures between completions."""

from __future__ import annotations

import argparse
import dataclasses

from mars_jax.drafters import LoadedDrafter
from mars_jax.hub.pretrained import Pretrained
from mars_jax.lab.commands.open_refiner import open_refiner
from mars_jax.lab.training import online
from mars_jax.serve.queue import Queue
from mars_jax.serve.requests import Completion

EVERY, STEPS = 32, 8
"""Completions between two updates, unless told otherwise, and steps of an update."""


def open_refining(
    args: argparse.Namespace, target: Pretrained, drafter: LoadedDrafter, *, samples: bool
) -> Refining:
    """Open the refinement that `--refine` asks for.

    Args:
      args: of the command.
      target, drafter: that are loaded.
      samples: tau on held-out texts is that of drawn tokens.

    Raises:
      MarsError: as `open_refiner`.
    """
    made = open_refiner(args.refine, target, args.draft, drafter, dtype=args.dtype, samples=samples)
    return Refining(made, target, every=args.refine_every or EVERY, keeps=args.log_probs)


class Refining:
    """A draft that learns, as a command sees it: the texts it has yet to see, and the results of its updates."""

    def __init__(self, refiner: online.Refiner, target: Pretrained, *, every: int, keeps: bool):
        """
        Args:
          refiner: of the draft.
          target: that it drafts for.
          every: completions between two updates.
          keeps: leave completions their log-probabilities.
        """
        self._refiner, self._target, self._every, self._keeps = refiner, target, every, keeps
        self._waiting: list[Completion] = []
        self.updates: list[online.Refined] = []

    def see(self, completion: Completion, queue: Queue) -> Completion:
        """Learn from the completion, now or with the next ones; the queue goes on with what was learned."""
        self._waiting.append(completion)
        if len(self._waiting) >= self._every:
            self._refiner.see_completions(self._waiting)
            self._waiting = []
            self.updates.append(self._refiner.refine(self._target.params, steps=STEPS))
            queue.draft_with(self.updates[-1].params)
        return completion if self._keeps else dataclasses.replace(completion, log_probs=None)

    def describe(self) -> str:
        """The results of the updates in words, for the statistics."""
        if not self.updates:
            return f"the draft was not refined: {self._every} completions are an update (--refine-every)"
        kept = sum(update.kept for update in self.updates)
        first, last = self.updates[0].before, self._refiner.expected_tau(self._target.params)
        return (
            f"the draft was refined {len(self.updates)} times, {kept} of them kept; expected tau on held-out texts "
            f"{first:.2f} before and {last:.2f} after"
        )
