"""The process in which one generated program runs: it gives up what it does not need, then executes the program.

Started by `sandbox` as a script, and it imports nothing outside the standard library. It reads one line of JSON, the
job, and the program after it from stdin, and tells the verdict by a token on a pipe.

The hook is the same wherever a program runs, so that verdicts agree; behind walls (`walls`) the kernel keeps what is
promised, and the hook keeps honest mistakes short. Without walls the hook is all there is, and then it is no prison.
"""

from __future__ import annotations

import ast
import builtins
import errno
import gc
import json
import os
import signal
import struct
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED = (
    "gc.get_", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.spawn", "os.system", "pty.spawn", "resource.",
    "signal.pthread_kill", "socket.", "subprocess.", "sys._current_", "sys.addaudithook", "sys.monitoring.",
    "sys.setprofile", "sys.settrace", "syslog.",
)  # fmt: skip
"""Beginnings of audit events: other processes, the network, the limits, and ways to look at the frames below."""
ALLOWED = ("socket.__new__",)  # asyncio wakes itself up by a pair of sockets
REFUSED_WITHOUT_WALLS = ("ctypes.", "os.chown", "os.link", "os.setxattr", "os.symlink", "sqlite3.")
PATH_EVENTS = {
    "os.chdir": 1, "os.chmod": 1, "os.mkdir": 1, "os.remove": 1, "os.rename": 2, "os.rmdir": 1, "os.truncate": 1,
    "os.utime": 1,
}  # fmt: skip
"""Audit events that change what stands at a path, and how many of their arguments are paths."""
# Their functions write files or start processes without an audit event, or an interpreter without the hook.
MODULES = (
    "_ctypes", "_ctypes_test", "_dbm", "_gdbm", "_interpreters", "_posixshmem", "_posixsubprocess", "_sqlite3",
    "_testcapi", "_testinternalcapi", "_testmultiphase", "_xxsubinterpreters", "posix", "readline",
)  # fmt: skip
FUNCTIONS = (
    "chroot", "forkpty", "mkfifo", "mknod", "openpty", "posix_openpt", "setns", "setpgid", "setpgrp", "setsid",
    "unshare",
)  # fmt: skip
"""Functions of `os` without an audit event; a process of another session would outlive the verdict."""
KEY_CALLS = {"x86_64": (0xC000003E, 248), "aarch64": (0xC00000B7, 217), "riscv64": (0xC00000F3, 217)}
"""By machine: what audit(7) calls it, and the first of the system calls add_key, request_key and keyctl."""
SET_SECCOMP, FILTER = 22, 2


def limit(cpu_seconds: int, memory: int, file_bytes: int, processes: int) -> None:
    """Bound the processor time in seconds, the address space and every file written in bytes, processes and threads."""
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
    if sys.platform == "linux":
        _limit_processes(resource, processes)
    # Also where nobody is left to end this process: the parent may be killed.
    signal.alarm(cpu_seconds + 1)


def _limit_processes(resource: Any, more: int) -> None:
    """Kernels before 5.14 count all processes of the user, so first find out how many there are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    found = 1
    while hard == resource.RLIM_INFINITY or found < hard:
        resource.setrlimit(resource.RLIMIT_NPROC, (found, hard))
        try:
            thread = threading.Thread(target=int)
            thread.start()
        except RuntimeError:
            found *= 2
            continue
        thread.join()
        most = found - 1 + more  # `found` made room for a thread
        if hard != resource.RLIM_INFINITY:
            most = min(most, hard)
        resource.setrlimit(resource.RLIMIT_NPROC, (most, most))
        return


def become(user: int) -> None:
    """Leave root behind, and its capabilities: root is bound by no number of processes."""
    os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def refuse_keys() -> None:
    """Refuse the system calls on keyrings, since no namespace hides those of the caller.

    Source: seccomp(2). Raises: KeyError on a machine that is not in `KEY_CALLS`.
    """
    import ctypes

    machine, first = KEY_CALLS[os.uname().machine]
    rules = (
        (0x20, 0, 0, 4),  # load the machine
        (0x15, 0, 4, machine),  # refuse where it is another one, such as i386
        (0x20, 0, 0, 0),  # load the number of the call
        (0x35, 2, 0, 1 << 30),  # refuse the second table of x86_64
        (0x35, 0, 2, first),  # allow what is below
        (0x25, 1, 0, first + 2),  # allow what is above
        (0x06, 0, 0, 0x50000 | errno.EPERM),  # refuse
        (0x06, 0, 0, 0x7FFF0000),  # allow
    )
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
    program = struct.pack("HP", len(rules), ctypes.addressof(packed))
    if ctypes.CDLL(None).prctl(SET_SECCOMP, FILTER, program) != 0:
        raise OSError("this kernel knows no seccomp")


def guard(folder: str, readable: list[str], *, walls: bool) -> None:
    """Refuse from here on what `REFUSED` names and, without walls, files outside of `folder`.

    Args:
      folder: where files may be written, real and absolute.
      readable: folders from which files may be read.
      walls: whether the kernel keeps files apart.
    """
    if not walls:
        _take_away()
    _let_go()
    sys.addaudithook(_hook(folder, tuple(readable), walls=walls))


def _take_away() -> None:
    """Functions that raise no audit event are replaced, and cannot be imported again."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError("this function is not for generated programs")

    import _posixsubprocess
    import posix
    import subprocess  # asyncio needs it, and the hook refuses what it needs in turn

    listed = (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks, os.supports_effective_ids)
    for name in FUNCTIONS:
        if (function := getattr(posix, name, None)) is not None:
            for functions in listed:
                functions.discard(function)
            setattr(posix, name, refuse)
            setattr(os, name, refuse)
    for module in (_posixsubprocess, subprocess):
        for name in ("fork_exec", "_fork_exec"):
            if hasattr(module, name):
                setattr(module, name, refuse)


def _let_go() -> None:
    """Let `None` through, with which `doctest` ends: the audit event does not say what is set."""
    for name in ("settrace", "setprofile"):
        original = getattr(sys, name)
        setattr(sys, name, lambda to, original=original: None if to is None else original(to))


def _hook(folder: str, readable: tuple[str, ...], *, walls: bool) -> Callable[[str, tuple[Any, ...]], None]:
    """All that it looks up is a constant or a variable of this function: there is no module to patch it in.

    The paths are judged by their letters alone. Links do not spoil that: none can be made without walls.
    """
    refused = REFUSED if walls else REFUSED + REFUSED_WITHOUT_WALLS
    allowed, modules, path_events, writes = ALLOWED, MODULES, dict(PATH_EVENTS), WRITES
    begins, split, encode, decode = str.startswith, str.split, str.__str__, bytes.decode
    exact, text, byte, number, none = type, str, bytes, int, type(None)
    subclass, error, missing, count = issubclass, PermissionError, ImportError, len
    directory, devices, own = _is_directory(), ("/dev/null", "/dev/zero", "/dev/full"), os.getpid()

    def plain(path: Any) -> str | None:
        """A path as text that no method of the program's can change; None of a file that is open already."""
        kind = exact(path)
        if kind is number or kind is none:
            return None
        if kind is byte:
            return decode(path, "utf-8", "surrogateescape")
        if subclass(kind, text):
            return encode(path)
        raise error("a path is text or bytes to generated programs")

    def below(path: str, root: str) -> bool:
        """True where a path cannot leave `root`; a relative one must not from any folder inside of it."""
        if begins(path, "/"):
            if path != root and not begins(path, root + "/"):
                return False
            path = path[count(root) :]
        depth = 0
        for part in split(path, "/"):
            if part == "..":
                depth -= 1
            elif part and part != ".":
                depth += 1
            if depth < 0:
                return False
        return True

    def visible(path: str) -> bool:
        if begins(path, "/"):
            for root in readable:
                if below(path, root):
                    return True
        return below(path, folder)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.kill" and args[0] == own:
            return
        if begins(event, refused) and event not in allowed:
            raise error(f"{event} is not for generated programs")
        if walls:
            return
        if event == "import":
            if args[0] in modules:
                raise missing(f"{args[0]} is not for generated programs")
        elif event in path_events:
            for given in args[: path_events[event]]:
                path = plain(given)
                if path is not None and not below(path, folder):
                    raise error(f"'{path}' is outside of the folder of this program")
        elif event == "open" or event == "os.listdir" or event == "os.scandir":
            path = plain(args[0])
            flags = (args[2] or 0) if event == "open" else 0
            if path is None or below(path, folder) or path in devices:
                return
            # A folder that is open is a way around all of this, by `dir_fd`.
            if flags & writes or not visible(path) or (event == "open" and directory(path)):
                raise error(f"'{path}' is outside of the folder of this program")

    return hook


def _is_directory() -> Callable[[str], bool]:
    stat, kinds, folder, error = os.stat, 0o170000, 0o040000, OSError

    def directory(path: str) -> bool:
        try:
            return stat(path).st_mode & kinds == folder
        except error:
            return False

    return directory


def compiled(source: bytes, path: str) -> types.CodeType:
    """A program, in which an exit with success ends a main guard and not the tests after it."""
    tree = ast.parse(source, path)
    for place, statement in enumerate(tree.body):
        match statement:
            case ast.If(test=ast.Compare(ast.Name("__name__"), comparators=[ast.Constant("__main__")])):
                text = "try: pass\nexcept SystemExit as __ended__:\n    if __ended__.code: raise"
                around = ast.parse(text).body[0]
                assert isinstance(around, ast.Try)
                around.body = [statement]
                tree.body[place] = around
    return compile(tree, path, "exec", dont_inherit=True)


def main_module(path: str) -> dict[str, Any]:
    """The names of a new `__main__`, as `python path` would find them."""
    module = types.ModuleType("__main__")
    vars(module).update(__file__=path, __builtins__=builtins)
    sys.modules["__main__"] = module
    sys.argv = [path]
    return vars(module)


def run(program: types.CodeType, names: dict[str, Any], sealed: list[Any]) -> None:
    """Run a program and, if it comes to its end, tell so.

    Args:
      program: compiled.
      names: of its module.
      sealed: the token, the pipe and `os.write`. They are taken off the list before the program begins and are on
        the interpreter's own stack while it runs: in no variable, list or closure that Python code can reach.
    """
    sealed.pop()(sealed.pop(), (sealed.pop(), exec(program, names))[0])


def read_all() -> bytes:
    """Stdin to its end, with no buffer that stays; then it is empty."""
    parts = []
    while part := os.read(0, 1 << 16):
        parts.append(part)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    return b"".join(parts)


def main() -> None:
    """See `sandbox._job` for what stdin holds."""
    leave = os._exit  # what the program does to the module of that name does not matter
    try:
        head, _, source = read_all().partition(b"\n")
        job = json.loads(head)
        sealed = [bytes.fromhex(job.pop("token")), job.pop("pipe"), os.write]
        del head
        if job["user"] is not None:
            os.chmod(job["folder"], 0o1777)
            become(job["user"])
        if job["walls"]:
            refuse_keys()
        path = os.path.join(job["folder"], "main.py")
        with open(path, "xb") as file:
            file.write(source)
        folder = os.path.join(job["folder"], "program")  # empty, whatever else is beside it
        os.mkdir(folder)
        os.chdir(folder)
        program = compiled(source, path)
        del source
        limit(*job["limits"])
        guard(job["folder"], job["readable"], walls=job["walls"])
        names = main_module(path)
        gc.collect()
        run(program, names, sealed)
    except BaseException:  # an exit in the middle is no pass either
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
