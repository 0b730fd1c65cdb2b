"""`python -m mars_jax.lm_eval`: lm-evaluation-harness with `--model mars_jax` in it; an import registers the model."""

import sys

from mars_jax.cli.lm_eval import main

if __name__ == "__main__":
    sys.exit(main())

from mars_jax.cli.harness import MarsJax

__all__ = ["MarsJax"]
