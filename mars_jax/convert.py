"""`python -m mars_jax.convert`: a checkpoint as Orbax arrays, quantised or cast once."""

import sys

from mars_jax.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
