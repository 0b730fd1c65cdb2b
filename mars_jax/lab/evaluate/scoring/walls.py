"""Walls around a generated program: namespaces of its own, by bubblewrap or else by `unshare`.

Behind walls there is an empty system: the folders that Python needs, read-only, five devices, and one private folder
that may be written and is gone with the program. There is no network, no home, no /proc, no keyring, no process of
others and no environment of theirs; when the verdict is there, the kernel ends every process inside.
Oracle: tests/lab/evaluate/test_sandbox.py.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePosixPath
from typing import NamedTuple

from mars_jax.lab.evaluate.scoring import sandbox_child, sandbox_root

FOLDER = "/tmp"
"""The folder that may be written behind walls."""
FOLDER_BYTES = 1 << 26
CHILD = "/mars-jax-sandbox.py"
"""Path of the child behind walls."""
NOBODY = 65534
SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store", "/gnu/store",
    "/etc/alternatives", "/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime",
)  # fmt: skip
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")


class Walls(NamedTuple):
    """One way to build walls.

    Attributes:
      name: for people.
      command: an existing empty folder -> the command in front of `python ... CHILD`, None where it is not installed.
    """

    name: str
    command: Callable[[str], list[str] | None]


def interpreter() -> list[str]:
    """Python, so that it looks up no module in the folder, and none of the user's."""
    return [sys.executable, "-P", "-s", "-B"]


def visible() -> list[str]:
    """Files and folders that Python needs: those of the system and the interpreter's own, no more of its prefix."""
    steps, path = [], sys.executable
    while True:  # a virtual environment's python is a chain of links
        steps.append(os.path.dirname(os.path.dirname(path)))
        if not os.path.islink(path):
            break
        path = os.path.normpath(os.path.join(os.path.dirname(path), os.readlink(path)))
    prefixes = [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix, *steps]
    prefixes += [os.path.realpath(prefix) for prefix in prefixes]
    parts = [
        os.path.join(prefix, part) for prefix in prefixes for part in ("bin", "lib", "lib64", "pyvenv.cfg")
    ]
    found = [path for path in dict.fromkeys((*SYSTEM, *parts)) if os.path.exists(path)]
    # What is inside of another one is there with it.
    return [path for path in found if not any(path.startswith(other + "/") for other in found)]


def bubblewrap(folder: str) -> list[str] | None:
    """The command in front of Python's; `folder` is not used."""
    if (program := shutil.which("bwrap")) is None:
        return None
    root = os.geteuid() == 0
    # Root stays root until the child leaves it behind; anybody else needs a namespace of users.
    user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    if not root:
        user = ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    return [
        program,
        "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try",
        "--die-with-parent", *user,
        *_sized(program), "--tmpfs", FOLDER,
        # Made here, since bubblewrap would keep the folders above from anybody but root.
        *(part for path in _above((*visible(), *DEVICES)) for part in ("--dir", path)),
        *(part for path in visible() for part in ("--ro-bind", path, path)),
        *(part for path in DEVICES for part in ("--dev-bind", path, path)),
        "--ro-bind", os.path.realpath(sandbox_child.__file__), CHILD,
        "--remount-ro", "/", "--chdir", FOLDER, "--",
    ]  # fmt: skip


def _above(paths: Iterable[str]) -> list[str]:
    """The folders above, from the top down."""
    found = {str(folder) for path in paths for folder in PurePosixPath(path).parents}
    return sorted(found - {"/"})


@functools.cache
def _sized(program: str) -> list[str]:
    """A bound on the folder, which bubblewrap has known since 0.7."""
    told = subprocess.run([program, "--help"], capture_output=True, text=True, check=False)
    return ["--size", str(FOLDER_BYTES)] if "--size" in told.stdout + told.stderr else []


def unshare(folder: str) -> list[str] | None:
    """The command in front of Python's; the new root is mounted on `folder`, which no other process sees."""
    program, bound = shutil.which("unshare"), shutil.which("setpriv")
    if program is None or bound is None:
        return None
    root = os.geteuid() == 0
    job = {
        "root": folder,
        "folder": FOLDER,
        "bytes": FOLDER_BYTES,
        "binds": [[path, path] for path in (*visible(), *DEVICES)]
        + [[os.path.realpath(sandbox_child.__file__), CHILD]],
        "keep": [6, 7] if root else [],  # CAP_SETGID and CAP_SETUID, to leave root behind
    }
    return [
        bound, "--pdeathsig", "KILL",  # `unshare` ends with this process, and with `unshare` all that is inside
        program, "--mount", "--pid", "--fork", "--kill-child", "--net", "--ipc", "--uts",
        *([] if root else ["--user", "--map-root-user"]),
        "--", *interpreter(), "-S", os.path.realpath(sandbox_root.__file__), json.dumps(job),
    ]  # fmt: skip


ALL: Sequence[Walls] = (Walls("bubblewrap", bubblewrap), Walls("unshare", unshare))
"""Best first: the first that is installed is used."""
