"""Draw the committed pictures again, from the committed JSON; those of finished studies stay as they are.

    python scripts/pictures.py            # all but the one below: nothing is measured
    python scripts/pictures.py --stream   # docs/stream.svg too, whose command decodes

What each shows is described in the script that draws it, and `mars_jax.lab.pictures` says how all look.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import common
import cost_picture
import evidence_pictures
import fair_picture
import rules_pictures
import speed_picture
import step_picture
import stream_picture

from mars_jax.lab.studies import branch_report

ROOT = Path(__file__).resolve().parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "scripts" / "results"


def read(name: str) -> Any:
    """A file of results."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def main(argv: Sequence[str] | None = None) -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--stream", action="store_true", help="run the command of docs/stream.svg again")
    args = parser.parse_args(argv)
    fair_picture.main([])
    speed_picture.main([])
    rules_pictures.main([])
    cost_picture.main([])
    step_picture.main([])
    compounding = RESULTS / "compounding"
    branch_report.draw(read("compounding/compounding.json"), [compounding / "compounding.png"])
    evidence_pictures.main([])
    if args.stream:
        stream_picture.main([])


if __name__ == "__main__":
    main()
