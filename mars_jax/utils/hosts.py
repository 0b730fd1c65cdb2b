"""Decoding with several processes: startup with `jax.distributed`, and arrays that are sharded over processes.

Every process runs the same program on the same prompts, but only the first process prints. Tested against a single
process with all devices (tests/cli/test_hosts.py).
"""

from __future__ import annotations

import os
import socket
import sys
import zlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from mars_jax.utils.errors import MarsError, first_line
from mars_jax.utils.types import PyTree

HEARTBEAT = 20
"""Seconds without a heartbeat after which a process is considered dead and the other processes exit."""
START = 120
"""Seconds that a process waits at startup for the other processes."""


def connect(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> None:
    """Connect to the other processes of this run. Call this function before any other use of JAX.

    Omit the arguments on Cloud TPU, Slurm and other clusters that JAX detects. The call has no effect if JAX does not
    detect a cluster, if `num_processes` is 1, or if the processes are already connected.

    Args:
      coordinator: "host:port" of process 0, which listens only on this address. Set JAX_COORDINATOR_BIND_ADDRESS to
        listen on a different address, for example if the other processes reach process 0 under a different host name.
      num_processes: number of processes in the run.
      process_id: index of this process.

    Raises:
      MarsError: some but not all of the arguments are set, the address is not available, or the other processes do not
        connect within two minutes.
    """
    arguments = {"coordinator": coordinator, "num-processes": num_processes, "process-id": process_id}
    # Do not initialise JAX's distributed runtime for a single Slurm task, because JAX would then use only one of the
    # GPUs.
    is_single_task = coordinator is None and os.environ.get("SLURM_NTASKS") == "1"
    if num_processes == 1 or is_single_task or jax.distributed.is_initialized():
        return
    missing_flags = [f"--{name}" for name, value in arguments.items() if value is None]
    if 0 < len(missing_flags) < 3:
        raise MarsError(
            f"{missing_flags[0]} is missing: --coordinator, --num-processes and --process-id go together."
        )
    if not missing_flags:
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
            # By default JAX listens on all addresses of the machine, and any machine that can reach the port could
            # join.
            coordinator_bind_address=os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator),
            initialization_timeout=START,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=HEARTBEAT,
        )
    except Exception as error:  # jaxlib raises its own gRPC errors, ValueError and RuntimeError
        # These messages mean that JAX detects no cluster, or that JAX has already been used and therefore runs as a
        # single process.
        single_process_messages = (
            "coordinator_address should be defined",
            "must be called before any JAX calls",
        )
        if len(missing_flags) == 3 and any(text in str(error) for text in single_process_messages):
            return
        if "start RPC server" in str(error):
            raise _no_listening(coordinator) from None
        raise MarsError(
            f"the processes of the run do not connect ({first_line(error)}): start all of them within {START} s with "
            "one --coordinator, or use --num-processes 1 for a single process."
        ) from None


def _can_listen(coordinator: str) -> bool:
    """Return True if this machine can listen on an address, or if the address cannot be resolved.

    Check the address in advance, because jaxlib may crash if its server cannot start. JAX itself reports an address
    that cannot be resolved.
    """
    host, _, port = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", coordinator).rpartition(":")
    try:
        addresses = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return True
    for family, kind, protocol, _, address in addresses:
        with socket.socket(family, kind, protocol) as probe:
            # Allow connections of an earlier run that are still in TIME_WAIT, because a server can listen despite them.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(address)
                return True
            except OSError:
                continue
    return False


def _no_listening(coordinator: str | None) -> MarsError:
    return MarsError(
        f"--coordinator is {coordinator}, but this machine cannot listen on it: use an address of process 0's machine "
        "and a free port, or set JAX_COORDINATOR_BIND_ADDRESS to the local address for it."
    )


def check_devices() -> None:
    """Raise MarsError if JAX cannot initialise a platform in JAX_PLATFORMS. Call this function after `connect`."""
    try:
        jax.devices()
    # If there is no plugin for a platform, JAX raises an AssertionError without a message.
    except (RuntimeError, AssertionError) as error:
        # Remove the advice that JAX appends to its message.
        reason = first_line(error).partition(". (set JAX_PLATFORMS")[0]
        if not str(error):
            reason = "no plugin for them"
        platforms = getattr(jax.config, "jax_platforms", None) or ""
        raise MarsError(
            f"JAX finds none of the devices that JAX_PLATFORMS names, '{platforms}' ({reason}): install JAX for them, "
            "such as with jax[cuda13], or unset JAX_PLATFORMS, without which JAX chooses by itself."
        ) from None


def leave(code: int) -> None:
    """In a run with several processes, exit immediately, so that the other processes notice and also exit.

    A normal exit would wait for the other processes, which may themselves be waiting for this process.
    """
    if "jax" in sys.modules and jax.distributed.is_initialized() and jax.process_count() > 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def is_first() -> bool:
    """Return True in the first process, the only one that prints and writes files."""
    return jax.process_index() == 0


def check_equal(value: object, name: str) -> None:
    """Raise MarsError if a value differs between processes, because they might then wait for each other forever."""
    if jax.process_count() == 1:
        return
    # Compare checksums, because a gather requires arrays of the same shape in all processes.
    checksums = multihost_utils.process_allgather(np.asarray(zlib.crc32(repr(value).encode()), np.uint32))
    if len(set(checksums.tolist())) > 1:
        raise MarsError(f"the processes were given different {name}: start all of them with the same.")


def check_mesh(mesh: jax.sharding.Mesh | None) -> None:
    """Raise MarsError if there are several processes and the mesh does not include all of their devices."""
    count, num_devices = jax.process_count(), len(jax.devices())
    if count > 1 and (mesh is None or mesh.size != num_devices):
        mesh_text = "no --mesh" if mesh is None else f"a --mesh of {mesh.size} devices"
        raise MarsError(
            f"{count} processes have {num_devices} devices and there is {mesh_text}: name axes over all of them."
        )


def broadcast(value: int) -> int:
    """Return the first process's value in every process."""
    if jax.process_count() == 1:
        return value
    return int(multihost_utils.broadcast_one_to_all(np.asarray(value, np.int32)))


def broadcast_bytes(data: bytes) -> bytes:
    """Return the first process's bytes in every process. The arguments of the other processes are ignored."""
    if jax.process_count() == 1:
        return data
    # A broadcast requires the same shape in all processes, so send the length first.
    buffer = np.zeros(broadcast(len(data)), np.uint8)
    if is_first():
        buffer[:] = np.frombuffer(data, np.uint8)
    return multihost_utils.broadcast_one_to_all(buffer).tobytes()


def put(tree: PyTree, shardings: PyTree) -> PyTree:
    """Copy arrays to devices, which may belong to several processes. Every process must pass the same arrays."""

    def one(x: jax.Array | np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
        if sharding.is_fully_addressable:
            return jax.device_put(x, sharding)
        # NumPy has no dtype for PRNG keys, so place the key data instead.
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            key_data = one(jax.random.key_data(x), sharding)
            return jax.random.wrap_key_data(key_data, impl=jax.random.key_impl(x))
        host_array = np.asarray(x)
        return jax.make_array_from_callback(host_array.shape, sharding, lambda index: host_array[index])

    return jax.tree.map(one, tree, shardings)


def fetch(tree: PyTree) -> PyTree:
    """Copy arrays to the host. If an array is sharded over processes, all processes must call this function."""

    def one(x: PyTree) -> PyTree:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return multihost_utils.process_allgather(x, tiled=True)

    return jax.device_get(jax.tree.map(one, tree))
