"""`python -m mars_jax.check`: whether this device decodes rightly, and how fast."""

import sys

from mars_jax.cli.check.command import main

if __name__ == "__main__":
    sys.exit(main())
