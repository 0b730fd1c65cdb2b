"""The process in which one generated program runs: it gives up what it does not need, then executes stdin.

Started by `sandbox.passes` as a script, and it imports nothing outside the standard library. The limits guard
against what a model writes by accident: endless loops, all of the memory, files overwritten. They are no prison
for code that means harm.
"""

from __future__ import annotations

import os
import sys

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED = (
    "os.chmod", "os.chown", "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.link", "os.mkdir",
    "os.posix_spawn", "os.remove", "os.rename", "os.rmdir", "os.setxattr", "os.spawn", "os.symlink", "os.system",
    "os.truncate", "os.utime", "pty.spawn", "resource.", "shutil.", "signal.pthread_kill", "socket.", "subprocess.",
)  # fmt: skip
"""Audit events, or their beginnings: other processes, the network, files by name, and the limits themselves."""


def limit(cpu_seconds: int, memory: int, file_bytes: int) -> None:
    """Bound the processor time in seconds, the address space and every file written, in bytes."""
    import resource

    for what, most in (
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_AS, memory),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(what, (most, most))


def guard(folder: str) -> None:
    """From here on files are written inside of `folder` only, and nothing of `REFUSED` happens."""
    inside = os.path.realpath(folder) + os.sep

    def hook(event: str, args: tuple) -> None:
        if event == "open":
            path, _, flags = args
            if not isinstance(path, int) and (flags or 0) & WRITES:
                path = os.path.realpath(os.fsdecode(path))
                if not path.startswith(inside):
                    raise PermissionError(f"'{path}' is outside of the folder of this program")
        elif event.startswith(REFUSED) or (event == "ctypes.dlopen" and args[0] is not None):
            raise PermissionError(f"{event} is not for generated programs")

    sys.addaudithook(hook)


def main() -> None:
    """argv: the exit code that says passed, seconds, bytes of memory, bytes of a file."""
    passed, *limits = map(int, sys.argv[1:])
    source = sys.stdin.buffer.read().decode("utf-8")
    limit(*limits)
    guard(os.getcwd())
    leave = os._exit  # what the program may do to the module of that name does not matter
    try:
        exec(compile(source, "<generated>", "exec"), {"__name__": "__main__"})
    except BaseException:  # an exit in the middle is no pass either
        leave(1)
    leave(passed)


if __name__ == "__main__":
    main()
