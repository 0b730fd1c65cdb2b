"""A row that decodes one request after another and reads only prompt tokens that are not in its caches.

B rows: one decodes, and the others fill a mesh. T token buffer. Oracle: each request decoded from a new state
(tests/serve/test_running.py).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Generator

import jax
import numpy as np

from mars_jax.core import decode
from mars_jax.core.decoder import Decoder
from mars_jax.core.types import DecodeState, Params, Prompts
from mars_jax.mesh.hosts import fetch
from mars_jax.serve.prepare import bucket, of_mesh
from mars_jax.serve.prepared import Prepared
from mars_jax.serve.queue import Finished, Queue, Said
from mars_jax.serve.requests import Request
from mars_jax.serve.session import Session
from mars_jax.serve.sizes import with_costs
from mars_jax.utils import activity

WIDTH = 4096
"""Initial size of the token buffer, limited by the model's context. A longer text compiles again; a larger initial size
would cost memory."""


class Running:
    """A pair that decodes one request after another over one state.

    If a prompt shares a prefix with the previous prompt and completion, only the tokens after it are read. Everything
    but the width of the buffer is a value, so requests that fit the buffer share one compilation. For others it grows.
    """

    def __init__(self, session: Session):
        """
        Args:
          session: the pair and its rule. It may be replaced between two requests, for example by `session.using(rule)`.
        """
        self.session = session
        self.read = 0
        """Number of tokens read for the last prompt, excluding its last token, which the first step reads."""
        self._width = 0
        self._decoder: Decoder | None = None
        self._queue: Queue | None = None  # decodes the last request and keeps the state

    @activity.doing("compiling")
    def compile(self, request: Request) -> None:
        """Compile the programs of `stream` for such requests by decoding one token. Cheap if compiled already."""
        max_length = len(request.prompt_tokens) + request.max_new_tokens - 1
        one_token_request = dataclasses.replace(
            request, prompt_tokens=request.prompt_tokens[:2], max_new_tokens=1
        )
        self._widen(max_length)
        for _ in self.stream(one_token_request):
            pass
        self._queue = None  # discard the token

    def stream(self, request: Request) -> Generator[Said | Finished, None, None]:
        """Read the new tokens of the prompt, and decode as the events are consumed.

        Events come after every step, on accelerators after every fourth.

        If the caller stops iterating or closes the iterator, the text ends there, and the state keeps the tokens so
        far. The next call takes over the state of an unfinished iterator.

        Raises:
          MarsError: as `mars_jax.generate`.
        """
        began = time.perf_counter()
        prepared = self.session.prepared([request])
        self._widen(len(request.prompt_tokens) + request.max_new_tokens)
        rows = of_mesh(self.session.target, 1)
        prepared = with_costs(dataclasses.replace(prepared, width=self._width), rows, log_probs=True)
        state = self._begun(prepared, rows)
        self._queue = Queue(prepared, rows, telling=True, state=state, began=began)
        return self._queue.events()

    def _widen(self, most: int) -> None:
        """Make room for a text of `most` tokens, or for the model's whole context if that is shorter."""
        context = self.session.target.config.max_positions
        if self._width < min(most, context):
            self._width = bucket(min(max(most, WIDTH, 2 * self._width), context))
            self._queue = None

    def _begun(self, made: Prepared, rows: int) -> DecodeState:
        """Return the state that has read a request."""
        prompts = made.prompts([0, *[None] * (rows - 1)])
        state = None if self._queue is None else self._queue.state
        self._queue = None  # the state's buffers are donated, even if an error follows
        with made.target.on_mesh():
            # After a prompt of a single token, heads must draft without features of the text before it.
            single = len(made.requests[0].prompt_tokens) == 1
            if state is None or made.decoder != self._decoder or single:
                state = _unread(made.decoder, made.params, prompts)
            state, num_read = decode.extend(made.decoder, made.params, state, prompts)
        self.read = int(fetch(num_read)[0])
        self._decoder = made.decoder
        return state


@functools.partial(jax.jit, static_argnums=0)
def _unread(decoder: Decoder, params: Params, prompts: Prompts) -> DecodeState:
    """Return the state of prompts cut to one token, without reading tokens.

    The length is a constant of the program, so the program contains no forward.
    """
    lengths = np.ones(prompts.tokens.shape[0], np.int32)
    return decoder.init(params, dataclasses.replace(prompts, length=lengths))
