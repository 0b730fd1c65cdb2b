"""Requests that one program decodes, and their arrays. B batch, T token buffer, M stop tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from mars_jax import drafters
from mars_jax.core import decode
from mars_jax.core.controls import make_controls
from mars_jax.core.decoder import Decoder
from mars_jax.core.edits import Edits, make_edits
from mars_jax.core.rule import LoadedRule, for_rows, take_rows
from mars_jax.core.types import NO_TOKEN, DecodeState, Params, Prompts, keys_from_seeds
from mars_jax.hub.pretrained import Pretrained
from mars_jax.mesh.axes import state_shardings
from mars_jax.mesh.hosts import put
from mars_jax.serve.guides import RequestGuides
from mars_jax.serve.requests import Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """Requests that one program decodes. Their shapes are the same for any choice of requests."""

    target: Pretrained
    requests: Sequence[Request]
    decoder: Decoder
    params: Params
    drafter: drafters.LoadedDrafter
    rule: LoadedRule  # each of its numbers is one value for all requests, or one per request
    width: int  # T
    guides: RequestGuides

    @property
    def draws(self) -> bool:
        """True if any request samples; otherwise the compiled program does not contain sampling."""
        return any(request.temperature != 0 for request in self.requests)

    def prompts(self, entries: Sequence[int | None]) -> Prompts:
        """Return the prompts of some requests, as `Decoder.init` takes them. On a mesh divide them over `data`.

        Args:
          entries: for each row the number of its request, or None for a row that only fills the batch. Such a row
            starts at its limit, so it is done before the first step.
        """
        requests = [self.requests[i] if i is not None else _FILL for i in entries]
        lengths = np.array([len(r.prompt_tokens) for r in requests], np.int32)
        context = self.target.config.max_positions
        limits = np.minimum(lengths + np.array([r.max_new_tokens for r in requests]), context)
        tokens = np.zeros((len(requests), self.width), np.int32)
        for row, request in enumerate(requests):
            tokens[row, : lengths[row]] = request.prompt_tokens
        # Round up to a multiple of four, so that one more stop token rarely changes a shape.
        num_stop_tokens = max(4, -(-max(len(r.stop_tokens) for r in self.requests) // 4) * 4)
        controls = make_controls(
            len(requests),
            limit=limits,
            temperature=[r.temperature for r in requests] if self.draws else None,
            top_k=[r.top_k for r in requests],
            top_p=[r.top_p for r in requests],
            min_p=[r.min_p for r in requests],
            strict=[r.strict or (r.constraint is not None and not r.constraint.relax) for r in requests],
            draft_stop=[r.draft_stop for r in requests],
            stop_tokens=[
                [*r.stop_tokens, *[NO_TOKEN] * (num_stop_tokens - len(r.stop_tokens))] for r in requests
            ],
        )
        if any(r.edits for r in self.requests):
            controls = dataclasses.replace(controls, edits=self._edits(requests))
        controls = dataclasses.replace(controls, guides=self.guides.rows(requests))
        keys = keys_from_seeds(jnp.array(np.asarray([r.seed for r in requests], np.uint32)))
        numbers = take_rows(self.rule.rule, [i or 0 for i in entries], len(self.requests))
        row_prompts = Prompts(
            jnp.array(tokens), jnp.array(lengths), controls, for_rows(numbers, len(requests)), keys
        )
        mesh = self.target.mesh
        return row_prompts if mesh is None else put(row_prompts, state_shardings(row_prompts, mesh))

    def _edits(self, own: Sequence[Request]) -> Edits:
        # The width covers all requests, so it is the same for any subset. It is rounded up, so that one more token
        # rarely changes it.
        max_biases = max(len(r.logit_bias) for r in self.requests)
        return make_edits(
            len(own),
            logit_bias=[r.logit_bias for r in own],
            repetition_penalty=[r.repetition_penalty for r in own],
            presence_penalty=[r.presence_penalty for r in own],
            frequency_penalty=[r.frequency_penalty for r in own],
            width=max(8, -(-max_biases // 8) * 8),
        )

    def start(self, entries: Sequence[int | None]) -> DecodeState:
        """Return the state after prefill of some requests; `entries` as for `prompts`."""
        prompts = self.prompts(entries)
        with self.target.on_mesh():
            return decode.start(self.decoder, self.params, prompts)


_FILL = Request(prompt_tokens=(0,), max_new_tokens=0)
