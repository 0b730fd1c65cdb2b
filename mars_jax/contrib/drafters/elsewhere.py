"""A drafter that runs on its own devices, and drafts while the target verifies.

Source: PEARL 2408.11850. The decoding loop is in `ahead`. Tested against the tokens, steps and accepted drafts of the
sequential loop (tests/contrib/test_elsewhere.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from mars_jax import drafters
from mars_jax.contrib.drafters.ahead import Ahead, DraftDevice, handed_by, stream_ahead
from mars_jax.core.decoder import Decoder
from mars_jax.core.types import DecodeState, Params, StepInfo
from mars_jax.drafters.registry import definition, parse_draft
from mars_jax.hub.pretrained import Pretrained
from mars_jax.utils.errors import MarsError
from mars_jax.verify import needs_q


def open_device(numbers: Sequence[int], target_mesh: Mesh | None = None) -> DraftDevice:
    """Return a device for a drafter, or a mesh with an axis `model` over which to shard the drafter.

    Args:
      numbers: indices of the drafter's devices in `jax.devices()`.
      target_mesh: mesh of the target; None if the target uses only the first device.

    Raises:
      MarsError: a device does not exist, is listed twice, or is used by the target; or there is more than one process.

    >>> try:
    ...     open_device([0])
    ... except MarsError as error:
    ...     print(error)
    the target works on device 0, so the draft cannot be made there at the same time: name others.
    """
    devices = jax.devices()
    if jax.process_count() > 1:
        raise MarsError("a drafter on separate devices works only in a single process: start one process.")
    target_devices = set(devices[:1] if target_mesh is None else target_mesh.devices.flat)
    for number in numbers:
        if number >= len(devices):
            hint = ""
            if devices[0].platform == "cpu":
                hint = "; XLA_FLAGS=--xla_force_host_platform_device_count=2 makes two of a CPU"
            raise MarsError(f"there is no device {number} to draft on; the last is {len(devices) - 1}{hint}.")
        if devices[number] in target_devices:
            raise MarsError(
                f"the target works on device {number}, so the draft cannot be made there at the same time: name others."
            )
    if len(set(numbers)) < len(numbers):
        raise MarsError("a device to draft on is named twice: name each once.")
    draft_devices = [devices[number] for number in numbers]
    if len(draft_devices) == 1 and target_mesh is None:
        return draft_devices[0]
    return Mesh(np.array(draft_devices), ("model",), axis_types=(AxisType.Auto,))


def draft_elsewhere(
    drafter: drafters.AnyDrafter, target: Pretrained, draft_device: DraftDevice, **options: Any
) -> drafters.LoadedDrafter:
    """Return a drafter that runs on its own device or mesh while the target verifies.

    It drafts one token more than the target verifies. It uses the extra token as a guess at the target's next token,
    and continues drafting from it. Finished rows are not refilled with new prompts, so prompts are decoded one batch at
    a time.

    Args:
      drafter: either `model:PATH`, which then drafts `num_draft_tokens` + 1 tokens, or a drafter that drafts chains of
        K + 1 tokens, with its weights. If `draft_device` is a mesh, these weights must already be on it.
      target: the model that verifies. It must be on other devices.
      draft_device: device of the drafter: a `jax.Device` or the result of `open_device`.
      **options: options of `drafters.load`.

    Raises:
      MarsError: the drafter cannot draft ahead, because it uses the target's outputs, drafts trees, or has a spec other
        than `model:PATH`; see also `drafters.load`. Also raised when decoding begins, if the rule needs the draft's
        true probabilities.

    >>> drafter = draft_elsewhere("model:tiny/draft", target, jax.devices()[1])  # doctest: +SKIP
    >>> mj.generate(target, drafter, ["Once upon a time"])  # doctest: +SKIP
    """
    loaded = _load(drafter, target, draft_device, options) if isinstance(drafter, str) else drafter
    if not isinstance(loaded, drafters.LoadedDrafter):
        loaded = drafters.LoadedDrafter(loaded, ())
    handed = handed_by(loaded.drafter, target.model)

    def steps(decoder: Decoder, params: Params, state: DecodeState) -> Iterator[tuple[DecodeState, StepInfo]]:
        if needs_q(state.rule):
            raise MarsError(
                f"the rule {state.rule.name} needs the draft's true probabilities, which a draft from another "
                "device does not carry: verify with exact, or with mars over it."
            )
        return stream_ahead(Ahead(decoder, loaded.drafter), params, state, draft_device=draft_device)

    return drafters.LoadedDrafter(handed, loaded.params, max_positions=loaded.max_positions, steps=steps)


def open_elsewhere(
    spec: str, target: Pretrained, numbers: Sequence[int], **options: Any
) -> drafters.LoadedDrafter:
    """Call `draft_elsewhere` for the devices with the given numbers. This implements `--draft-device`.

    Raises:
      MarsError: see `open_device` and `draft_elsewhere`.
    """
    return draft_elsewhere(spec, target, open_device(numbers, target.mesh), **options)


def _load(
    spec: str, target: Pretrained, draft_device: DraftDevice, options: dict[str, Any]
) -> drafters.LoadedDrafter:
    kind, _ = parse_draft(spec)
    if kind != "model":
        raise MarsError(f"the drafter is '{kind}' and drafts elsewhere: only model:PATH can.")
    is_mixture = getattr(target.config, "num_experts", 0) > 0
    length = options.pop("num_draft_tokens", None) or definition(kind).usual(mixture=is_mixture)[0]
    assert length is not None  # `model` has a default chain length
    # For a mesh, weights are sharded while they are loaded. For a single device, they are moved there afterwards.
    mesh = draft_device if isinstance(draft_device, Mesh) else None
    loaded = drafters.load(
        spec, dataclasses.replace(target, mesh=mesh), num_draft_tokens=length + 1, **options
    )
    return loaded if mesh is not None else loaded._replace(params=jax.device_put(loaded.params, draft_device))
