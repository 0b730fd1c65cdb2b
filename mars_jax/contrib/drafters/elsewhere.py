"""A drafter on devices of its own, which drafts while the target verifies: `generate(..., draft_device=...)`.

Source: PEARL 2408.11850; the loop is `drafters.ahead`. Oracle: the tokens, steps and accepted drafts of the plain loop
(tests/contrib/test_elsewhere.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mars_jax import drafters, specs
from mars_jax.contrib.drafters.ahead import Ahead, ahead, stream
from mars_jax.core import decode, rule_values
from mars_jax.core.errors import MarsError
from mars_jax.core.metrics import DecodeStats, zero_stats
from mars_jax.core.types import Decoder, DecodeState, Drafter, LoadedRule, Params, PyTree, StepInfo
from mars_jax.hub.pretrained import Pretrained
from mars_jax.serve.compiling import Compile
from mars_jax.serve.prepare import AnyRule, prepare
from mars_jax.serve.requests import Request
from mars_jax.verify import exact, needs_q


def open_device(numbers: Sequence[int], target_mesh: Mesh | None = None) -> Any:
    """The place of a drafter: a device, or a mesh of several over which a small model is divided (`model`).

    Args:
      numbers: of devices, as `jax.devices()` counts them.
      target_mesh: of the target; None is the first device alone.

    Raises:
      MarsError: a device that is not there, that is named twice, or that the target works on.

    >>> try:
    ...     open_device([0])
    ... except MarsError as error:
    ...     print(error)
    the target works on device 0, so the draft cannot be made there at the same time: name others.
    """
    devices = jax.devices()
    if jax.process_count() > 1:
        raise MarsError("a drafter on devices of its own is for one process: start one.")
    taken = set(devices[:1] if target_mesh is None else target_mesh.devices.flat)
    for number in numbers:
        if number >= len(devices):
            there = f"devices 0 to {len(devices) - 1}" if len(devices) > 1 else "one device, 0"
            cure = ""
            if devices[0].platform == "cpu":
                cure = "; XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two of a CPU"
            raise MarsError(f"there is no device {number} to draft on: this machine has {there}{cure}.")
        if devices[number] in taken:
            raise MarsError(
                f"the target works on device {number}, so the draft cannot be made there at the same time: name others."
            )
    if len(set(numbers)) < len(numbers):
        raise MarsError("a device to draft on is named twice: name each once.")
    chosen = [devices[number] for number in numbers]
    if len(chosen) == 1 and target_mesh is None:
        return chosen[0]
    return Mesh(np.array(chosen), ("model",), axis_types=(AxisType.Auto,))


def load(spec: str, target: Pretrained, draft_device: Any, **options: Any) -> drafters.LoadedDrafter:
    """`drafters.load` of a small model with its weights on a device or a mesh.

    Its chain is one token longer than asked for: the last one is the guess.

    Raises:
      MarsError: as `drafters.load`, or it names no small model.
    """
    kind, _ = specs.parse_draft(spec)
    if kind != "model":
        raise MarsError(f"the drafter is '{kind}' and drafts elsewhere: only model:PATH can.")
    mixture = getattr(target.config, "num_experts", 0) > 0
    length = options.pop("num_draft_tokens", None) or specs.DRAFTERS[kind].usual(mixture=mixture)[0]
    assert length is not None  # the row of `model` names one
    mesh = draft_device if isinstance(draft_device, Mesh) else None
    loaded = drafters.load(
        spec, dataclasses.replace(target, mesh=mesh), num_draft_tokens=length + 1, **options
    )
    return loaded if mesh is not None else loaded._replace(params=jax.device_put(loaded.params, draft_device))


def begin(
    target: Pretrained, drafter: drafters.AnyDrafter, verify: AnyRule | None, draft_device: Any
) -> tuple[Ahead, PyTree]:
    """What decodes, and the drafter's weights.

    Raises:
      MarsError: a drafter that cannot draft ahead, or a rule that needs its distribution.
    """
    if isinstance(drafter, str):
        drafter = load(drafter, target, draft_device)
    elif isinstance(drafter, Drafter):
        drafter = drafters.LoadedDrafter(drafter, ())
    rule = verify.rule if isinstance(verify, LoadedRule) else exact() if verify is None else verify
    if needs_q(rule):
        raise MarsError(
            f"the rule {rule_values.name_of(rule)} needs the draft's true probabilities, which a draft made elsewhere "
            "does not bring: verify with exact, or with mars over it."
        )
    return ahead(target.model, drafter.drafter, rule), drafter.params


class Pair(NamedTuple):
    """A batch that is ready to be decoded step by step, its drafts made in turns with the target or elsewhere."""

    target: Pretrained
    decoder: Decoder
    params: Params
    state: DecodeState
    draft_device: Any
    made: Ahead | None  # with a draft_device

    @classmethod
    def of(
        cls,
        target: Pretrained,
        drafter: drafters.AnyDrafter,
        requests: Sequence[Request],
        *,
        verify: AnyRule | None,
        rows: int | None,
        draft_device: Any,
        log_probs: bool = False,
        loop: Compile | None = None,
    ) -> Pair:
        """`prepare`, and the drafter where it works."""
        if draft_device is None:
            made, drafts = None, drafter
        else:
            made, params = begin(target, drafter, verify, draft_device)
            drafts = drafters.LoadedDrafter(made.handed, params)
        options: Any = {"verify": verify, "rows": rows, "log_probs": log_probs, "loop": loop}
        decoder, params, state = prepare(target, drafts, requests, **options)
        return cls(target, decoder, params, state, draft_device, made)

    def stats(self, log_probs: bool) -> DecodeStats:
        """Counters at zero."""
        batch, buffer = self.state.tokens.shape
        return zero_stats(batch, self.decoder.max_depth, record=buffer if log_probs else None)

    def steps(self, *, ahead: int) -> Iterator[tuple[DecodeState, StepInfo]]:
        """The steps; the state is donated. They run in the target's mesh, which whoever asks for one enters."""
        if self.made is None:
            return decode.stream(self.decoder, self.params, self.state, ahead=ahead)
        return stream(self.made, self.params, self.state, draft_device=self.draft_device)
