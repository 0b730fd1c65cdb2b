"""`python -m mars_jax COMMAND`, which the console script `mars-jax` is too."""

import sys

from mars_jax.cli.commands import main

if __name__ == "__main__":
    sys.exit(main())
