"""`python -m mars_jax.compounding`: what relaxed tokens do to the text after them, and whether errors compound."""

import sys

from mars_jax.cli.compounding import main

if __name__ == "__main__":
    sys.exit(main())
