"""`python -m mars_jax.benchmark`: the evidence for a pair of models, with its controls."""

import sys

from mars_jax.cli.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
