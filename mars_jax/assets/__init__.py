"""The model family that ships with the package, by name. Its card is `assets/tiny/README.md`."""

from __future__ import annotations

from pathlib import Path

TARGET = "tiny/target"
"""The default target of every command: about 12M parameters."""
DRAFT = "tiny/draft"
"""Its draft: about 1M parameters, distilled from it."""
EAGLE3 = "tiny/eagle3"
"""An EAGLE-3 head of the target, trained by `training.distill`."""
MODELS = (TARGET, DRAFT)
NAMES = (*MODELS, EAGLE3)


def path(name: str) -> Path | None:
    """The directory of an embedded checkpoint, in the Hugging Face layout; None where `name` is not one.

    >>> path("tiny/target").name, path("owner/model")
    ('target', None)
    """
    return Path(__file__).parent / name if name in NAMES else None
