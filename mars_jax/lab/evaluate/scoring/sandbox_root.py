"""Build the root of one generated program inside of the namespaces that `unshare` has made, then run what follows.

Started by `walls.unshare` as a script, as the first process of its namespace, so that the kernel ends every other one
with it. It imports nothing outside the standard library. argv: a job as JSON, then the command.
Source: mount(2), mount_setattr(2), user_namespaces(7); what `bwrap` does, for machines without it.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys

MS_BIND, MS_REC = 0x1000, 0x4000
AT_FDCWD, AT_RECURSIVE = -100, 0x8000
MOUNT_SETATTR = 442  # the same on every architecture
RDONLY, NOSUID = 0x1, 0x2
CAPBSET_DROP, SET_NO_NEW_PRIVS = 24, 38
LAST_CAPABILITY = 63


def checked(result: int, what: str) -> None:
    """Raise OSError where a call of the C library failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def mount(c: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int, data: str | None) -> None:
    """mount(2)."""
    texts = [None if text is None else os.fsencode(text) for text in (source, target, kind, data)]
    source_, target_, kind_, data_ = texts
    checked(c.mount(source_, target_, kind_, ctypes.c_ulong(flags), data_), f"mount {target}")


def read_only(c: ctypes.CDLL, path: str) -> None:
    """Make a mount and all below it read-only, whatever their flags were."""
    attributes = (ctypes.c_uint64 * 4)(RDONLY | NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = c.syscall(
        ctypes.c_long(MOUNT_SETATTR),
        AT_FDCWD,
        os.fsencode(path),
        ctypes.c_uint(AT_RECURSIVE),
        attributes,
        size,
    )
    checked(result, f"mount_setattr {path}")


def build(c: ctypes.CDLL, root: str, binds: list[list[str]], folder: str, size: int) -> None:
    """A root with `binds`, read-only, and a folder to write in."""
    mount(c, "tmpfs", root, "tmpfs", NOSUID, "mode=755,size=1m")
    # The writable folder is mounted last, and what is bound below its place is bound there too.
    late = [bind for bind in binds if bind[1].startswith(folder + "/")]
    for source, target in binds:
        if [source, target] not in late:
            bind(c, source, root + target)
    os.makedirs(root + folder, exist_ok=True)
    read_only(c, root)
    mount(c, "tmpfs", root + folder, "tmpfs", NOSUID, f"mode=1777,size={size}")
    for source, target in late:
        bind(c, source, root + target)
        read_only(c, root + target)


def bind(c: ctypes.CDLL, source: str, target: str) -> None:
    """Show a file or a folder, with all that is mounted in it, at another place."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY, 0o644))
    mount(c, source, target, None, MS_BIND | MS_REC, None)


def give_up(c: ctypes.CDLL, keep: list[int]) -> None:
    """No capability but `keep` survives the next exec, and none comes back."""
    for capability in range(LAST_CAPABILITY + 1):
        if capability not in keep and c.prctl(CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # the kernel knows no more
    checked(c.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl")


def main() -> None:
    """Exits as the command does."""
    job, command = json.loads(sys.argv[1]), sys.argv[2:]
    c = ctypes.CDLL(None, use_errno=True)
    build(c, job["root"], job["binds"], job["folder"], job["bytes"])
    os.chroot(job["root"])  # and in a chroot no further namespace of users can be made
    os.chdir(job["folder"])
    give_up(c, job["keep"])
    child = os.fork()
    if child == 0:
        os.execv(command[0], command)
    while True:  # the first process of a namespace is the parent of every orphan in it
        ended, status = os.wait()
        if ended == child:
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


if __name__ == "__main__":
    main()
