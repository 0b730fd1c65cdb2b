"""A drafter that runs the target's MTP module. It drafts chains, static trees and dynamic trees.

Source: DeepSeek-V3 2412.19437, section 2.2. Tested against `generate(use_mtp=True)` of transformers
(tests/models/test_mtp.py).
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import jax

from mars_jax.drafters.asked import Asked, LoadedDrafter
from mars_jax.drafters.eagle import FeatureDrafter
from mars_jax.drafters.registry import register
from mars_jax.hub.heads.mtp_files import load_mtp
from mars_jax.models.mtp_head import MtpConfig
from mars_jax.utils.errors import MarsError


@dataclasses.dataclass(frozen=True)
class Mtp(FeatureDrafter):
    """An MTP module of the target, applied repeatedly to its own output to draft more than one token.

    For its weights and errors, see `FeatureDrafter`.

    >>> from mars_jax.models import ModelConfig, language_model
    >>> target = ModelConfig(vocab_size=32, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2)
    >>> mtp(MtpConfig.outline(target), language_model(target)).num_nodes
    4
    """

    config: MtpConfig  # configuration of the module
    # Length of the chain; ignored if `tree` is set. Published modules are trained to draft one token.
    num_draft_tokens: int = dataclasses.field(default=3, compare=False)

    @property
    def kind(self) -> str:
        return "mtp"


mtp = Mtp


def load_mtp_drafter(arguments: Asked) -> LoadedDrafter:
    """Load an MTP module from the checkpoint in the spec, or by default from the target's checkpoint.

    Raises:
      MarsError: the spec has no path and the target was not loaded from a checkpoint; see also `load_mtp`.
    """
    target = arguments.target
    if not arguments.path and target.path == Path(os.devnull):
        raise MarsError(f"'{target.name}' was not loaded from a checkpoint: name one by mtp:PATH.")
    path, dtype = arguments.path or target.path, arguments.heads_dtype
    config, params = load_mtp(path, target.config, dtype=dtype, mesh=target.mesh)
    # On a CPU, use float32, because XLA's CPU backend would convert a bfloat16 cache to float32 in every step.
    cache_dtype = "float32" if jax.default_backend() == "cpu" else str(params["fc"].dtype)
    drafter = mtp(config, target.model, arguments.chain, **arguments.shape, cache_dtype=cache_dtype)
    return LoadedDrafter(drafter, params, max_positions=config.layer.max_positions)


register(
    "mtp",
    Mtp,
    load_mtp_drafter,
    path="PATH",
    own=True,
    head=True,
    outlined=("mtp", MtpConfig),
    paper="2412.19437",
)
