"""Entry point of `python -m mars_jax COMMAND` and of the console script `mars-jax`."""

import gc
import os
import sys

from mars_jax.cli import quiet, signals


def main(*words: str) -> int:
    """Run the command line, with `words` inserted before its arguments, and return the exit code."""
    # Nearly all objects allocated at startup stay alive, so frequent garbage collection would only slow startup down.
    gc.set_threshold(50_000)
    _reserve()
    signals.handle()  # imports are slow, and Ctrl-C must work during them
    quiet.quiet()
    quiet.quiet_duplicates()
    # JAX's preemption service would replace this program's SIGTERM handler.
    os.environ.setdefault("JAX_ENABLE_PREEMPTION_SERVICE", "false")
    from mars_jax.cli import commands

    return commands.main([*words, *sys.argv[1:]])


def _reserve() -> None:
    """Open /dev/null in place of a closed stdin, stdout or stderr, so that no other file gets its descriptor."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    if sys.stdin is None:
        sys.stdin = open(0)  # noqa: SIM115
    if sys.stdout is None:
        # Open stdout read-only, so that writing to it raises an error instead of silently discarding the output.
        os.dup2(os.open(os.devnull, os.O_RDONLY), 1)
        sys.stdout = open(1, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w")  # noqa: SIM115


if __name__ == "__main__":
    sys.exit(main())
