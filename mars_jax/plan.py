"""`python -m mars_jax.plan`: which TPU slice a model needs, compiled ahead of time."""

import sys

from mars_jax.cli.plan import main

if __name__ == "__main__":
    sys.exit(main())
