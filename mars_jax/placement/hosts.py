"""Several processes that decode as one: `jax.distributed`, and arrays that no process has whole.

Every process runs the same program on the same prompts; the first one prints. Oracle: one process that has all devices
(tests/cli/test_hosts.py).
"""

from __future__ import annotations

import os
import socket
import sys
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mars_jax.core.errors import MarsError, first_line
from mars_jax.core.types import PyTree

HEARTBEAT = 20
"""Seconds of silence after which a process counts as dead, and the others end."""
START = 120
"""Seconds that a process waits for the others at the start."""


def connect(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Join the other processes of this run; call it before anything else of JAX.

    On Cloud TPU, Slurm and wherever else JAX finds out by itself, without arguments; where it finds no others, with
    `num_processes=1`, and where they are joined already, nothing happens.

    Args:
      coordinator: "host:port" of process 0, on which it then listens, and on no other address of its machine;
        JAX_COORDINATOR_BIND_ADDRESS names another one, where the others reach it by a name that is not its own.
      num_processes: of the run.
      process_id: which of them this is.

    Raises:
      MarsError: the arguments contradict each other, or the others do not answer within two minutes.
    """
    given = {"coordinator": coordinator, "num-processes": num_processes, "process-id": process_id}
    one_task = coordinator is None and os.environ.get("SLURM_NTASKS") == "1"  # JAX would see one GPU of all
    if num_processes == 1 or one_task or jax.distributed.is_initialized():
        return
    missing = [f"--{name}" for name, value in given.items() if value is None]
    if 0 < len(missing) < 3:
        raise MarsError(
            f"{missing[0]} is missing: --coordinator, --num-processes and --process-id go together."
        )
    if not missing:
        assert num_processes is not None and process_id is not None
        if not 0 <= process_id < num_processes:
            raise MarsError(f"--process-id is {process_id}: expected one from 0 to {num_processes - 1}.")
        if process_id == 0 and coordinator is not None and not _can_listen(coordinator):
            raise _no_listening(coordinator)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            # Without it JAX listens on all of the machine's addresses, and any peer that reaches the port joins in.
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator),
            initialization_timeout=START,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )
    except Exception as error:  # jaxlib's own, of gRPC's, beside ValueError and RuntimeError
        # Nothing that JAX knows runs several processes here; or it is in use, and so by one.
        alone = "coordinator_address should be defined", "must be called before any JAX calls"
        if len(missing) == 3 and any(text in str(error) for text in alone):
            return
        if "start RPC server" in str(error):
            raise _no_listening(coordinator) from None
        raise MarsError(
            f"the processes of the run do not connect ({first_line(error)}): start all of them within {START} s with "
            "one --coordinator, or take --num-processes 1 for a run of one."
        ) from None


def _can_listen(coordinator: str) -> bool:
    """Try it, as jaxlib may crash where its server cannot start; what is no address here is left to JAX."""
    host, _, port = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator).rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    for family, kind, protocol, _, address in found:
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(address)
                return True
            except OSError:
                continue
    return False


def _no_listening(coordinator: str | None) -> MarsError:
    return MarsError(
        f"--coordinator is {coordinator}, where this machine cannot listen: name an address of process 0's machine and "
        "a free port, or set JAX_COORDINATOR_BIND_ADDRESS to the one behind that name."
    )


def check_devices() -> None:
    """Raise MarsError where JAX cannot start the devices that it was told to use. Call it after `connect`."""
    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second says nothing, where the plugin is missing
        reason = (
            first_line(error).partition(". (set JAX_PLATFORMS")[0] if str(error) else "no plugin for them"
        )
        named = getattr(jax.config, "jax_platforms", None) or ""
        raise MarsError(
            f"JAX finds none of the devices that JAX_PLATFORMS names, '{named}' ({reason}): install JAX for them, such "
            "as with jax[cuda13], or unset JAX_PLATFORMS, without which JAX chooses by itself."
        ) from None


def leave(code: int) -> None:
    """End this process at once where there are others, which notice and end too; else do nothing.

    An ordinary exit would wait for them, and they may be waiting for this one.
    """
    if "jax" in sys.modules and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_first() -> bool:
    """Tell whether this process is the one that prints and writes."""
    return jax.process_index() == 0


def check_equal(value: Any, what: str) -> None:
    """Raise MarsError where the processes have not been given the same: they would wait for each other for ever."""
    if jax.process_count() == 1:
        return
    sums = multihost_utils.process_allgather(np.asarray(zlib.crc32(repr(value).encode()), np.uint32))
    if len(set(sums.tolist())) > 1:
        raise MarsError(f"the processes were given different {what}: start all of them with the same.")


def check_mesh(mesh: jax.sharding.Mesh | None) -> None:
    """Raise MarsError where there are several processes and some of their devices are in no mesh."""
    count, devices = jax.process_count(), len(jax.devices())
    if count > 1 and (mesh is None or mesh.size != devices):
        size = "no --mesh" if mesh is None else f"a --mesh of {mesh.size} devices"
        raise MarsError(
            f"{count} processes have {devices} devices and there is {size}: name axes over all of them."
        )


def broadcast(value: int) -> int:
    """Return the first process's value, in every process."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.asarray(value, np.int32)))


def broadcast_bytes(data: bytes) -> bytes:
    """Return the first process's bytes, in every process; what the others give is not read."""
    if jax.process_count() == 1:
        return data
    buffer = np.zeros(broadcast(len(data)), np.uint8)
    if is_first():
        buffer[:] = np.frombuffer(data, np.uint8)
    return multihost_utils.broadcast_one_to_all(buffer).tobytes()


def put(tree: PyTree, shardings: PyTree) -> PyTree:
    """Do `jax.device_put` of arrays that every process has, also where a process has only some of the devices."""

    def one(x: Any, sharding: Any) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            made = one(jax.random.key_data(x), sharding)
            return jax.random.wrap_key_data(made, impl=jax.random.key_impl(x))
        host = np.asarray(x)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(one, tree, shardings)


def fetch(tree: PyTree) -> PyTree:
    """Do `jax.device_get`, also of arrays of which this process has only some parts; then all processes call it."""

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(one, tree))
