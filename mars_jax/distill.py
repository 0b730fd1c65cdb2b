"""`python -m mars_jax.distill`: train a draft model, or EAGLE or Medusa heads, from a target."""

import sys

from mars_jax.cli.distill import main

if __name__ == "__main__":
    sys.exit(main())
