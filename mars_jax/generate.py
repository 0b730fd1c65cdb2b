"""Entry point of `python -m mars_jax.generate`, which completes prompts from the command line.

This module has the same name as the function `mars_jax.generate`, and importing the module replaces the function in the
package. The module is therefore callable and behaves like the function.
"""

import sys
import types

if __name__ == "__main__":
    from mars_jax.__main__ import main as run

    sys.exit(run("generate"))

from mars_jax.cli.generate.command import main as main


class _CallableModule(types.ModuleType):
    def __call__(self, *args, **options):
        """Call `mars_jax.serve.generation.generate`."""
        from mars_jax.serve.generation import generate

        return generate(*args, **options)


sys.modules[__name__].__class__ = _CallableModule
