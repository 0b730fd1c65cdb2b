"""`python -m mars_jax.calibrate`: a threshold whose risk stays below a bound, from held-out prompts."""

import sys

from mars_jax.cli.calibrate import main

if __name__ == "__main__":
    sys.exit(main())
