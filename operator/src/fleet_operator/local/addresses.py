"""Loopback addresses for the pods of a local run, from a /24 network that the run claims until it ends.

Each pod gets its own address, so each uses the manifest's ports as on a cluster, and two runs never conflict.
A claim is a lock on a file. The supervisor also holds the lock, so that a network stays claimed after its
runner was killed, until the run's processes are gone. Claiming binds each port once as a test, because other
users' runs and other programs do not use these lock files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_operator.api import Mode, Role
from fleet_operator.api.names import METRICS_PORT
from fleet_operator.errors import OperatorError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from fleet_operator.api import FleetJob

FIRST_HOST = 2  # 127.0.0.1 is shared by all programs, so .1 is skipped in all networks
LAST_HOST = 254
MAX_HOSTS = LAST_HOST - FIRST_HOST + 1
TRIES = 64
PORT_STEP = 10
LAST_PORT = 65535


class AddressError(OperatorError):
    """No free loopback addresses or ports were found; the message suggests what to do."""


def network(number: int) -> str:
    """Return the first three bytes of the network with this number, counting from 127.1.0 to 127.254.255."""
    number %= 254 * 256
    return f"127.{1 + number // 256}.{number % 256}"


def addresses(prefix: str, count: int) -> tuple[str, ...]:
    """Return the first `count` addresses of a network."""
    return tuple(f"{prefix}.{FIRST_HOST + index}" for index in range(count))


def lock_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of this user's lock files, creating it if necessary.

    Raises
    ------
    AddressError
        The path exists, but is not a folder of this user.
    """
    parent = environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    if not Path(parent).is_dir():
        parent = tempfile.gettempdir()
    folder = Path(parent) / f"fleetjob-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    # The parent may be a shared /tmp: lstat, because another user could have placed a symbolic link there.
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise AddressError(
            f"{folder} is not a folder of user {os.getuid()}; remove it or set XDG_RUNTIME_DIR to your own"
        )
    return folder


def _try_lock(path: Path) -> int | None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def bind_error(host: str, port: int) -> OSError | None:
    """Return the error that binding `host`:`port` raises, or None if it succeeds."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # Connections of an earlier run in TIME_WAIT do not make a port unusable.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


@dataclass(frozen=True, slots=True)
class LocalHosts:
    """Maps replicas to their loopback addresses, as a `fleet_operator.build.Hosts`."""

    addresses: Mapping[tuple[Role, int], str]

    def __call__(self, role: Role, index: int, /) -> str:
        """Return the address of a replica."""
        return self.addresses[role, index]


def job_ports(job: FleetJob) -> dict[tuple[Role, int], tuple[int, ...]]:
    """Return the ports that each replica listens on."""
    metrics = (METRICS_PORT,)
    if job.spec.mode is Mode.COLLECTIVE:
        first = job.port(Role.TRAINER)
        ports = (*range(first, first + job.nproc_per_node), *metrics)
        return {(Role.TRAINER, index): ports for index in range(job.replicas(Role.TRAINER))}
    servers = {
        (Role.PSERVER, index): (job.port(Role.PSERVER), *metrics)
        for index in range(job.replicas(Role.PSERVER))
    }
    return servers | {(Role.TRAINER, index): metrics for index in range(job.replicas(Role.TRAINER))}


@dataclass(frozen=True, slots=True)
class Claim:
    """Addresses or ports that no other local run uses until `release` is called."""

    descriptors: tuple[int, ...]
    hosts: tuple[str, ...] = ()
    port: int = 0

    def release(self) -> None:
        """Release our locks; a lock stays held while a process that inherited its descriptor runs."""
        for descriptor in self.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)


def _networks(start: int) -> Iterator[str]:
    for offset in range(TRIES):
        yield network(start + offset)
    yield "127.0.0"  # macOS has only the configured aliases, usually from 127.0.0.2 on


def claim_addresses(ports: Sequence[Sequence[int]], *, start: int, environ: Mapping[str, str]) -> Claim:
    """Claim one loopback address per entry of `ports`; all ports of the entry are free on its address.

    Parameters
    ----------
    ports : sequence of sequences of int
        For each pod, the ports that it will listen on.
    start : int
        The number of the first network to try. It should vary, so that concurrent runs rarely try the same.
    environ : mapping
        The environment, read for XDG_RUNTIME_DIR.

    Raises
    ------
    AddressError
        There are too many pods for one network, or no network can be claimed.
    """
    if len(ports) > MAX_HOSTS:
        raise AddressError(
            f"the job has {len(ports)} replicas; a run on this machine has at most {MAX_HOSTS}"
        )
    folder = lock_folder(environ)
    problem: OSError | None = None
    for prefix in _networks(start):
        if (descriptor := _try_lock(folder / f"{prefix}.lock")) is None:
            continue
        hosts = addresses(prefix, len(ports))
        problem = _first_problem(hosts, ports)
        if problem is None:
            return Claim((descriptor,), hosts=hosts)
        os.close(descriptor)
    raise AddressError(_explain(problem, len(ports), sorted({port for each in ports for port in each})))


def claim_ports(first: int, count: int, *, environ: Mapping[str, str]) -> Claim:
    """Claim `count` consecutive ports that are free on every address, preferably from `first` on.

    Only the rendezvous of a collective job needs this: torch's TCPStore listens on all addresses, regardless
    of MASTER_ADDR, so only one run on this machine can use the manifest's port at a time.

    Raises
    ------
    AddressError
        No such ports were found.
    """
    folder = lock_folder(environ)
    step = max(count, PORT_STEP)
    candidates = [port for port in range(first, first + TRIES * step, step) if port + count <= LAST_PORT + 1]
    for port in candidates:
        if (descriptor := _try_lock(folder / f"port-{port}.lock")) is None:
            continue
        if all(bind_error("", each) is None for each in range(port, port + count)):
            return Claim((descriptor,), port=port)
        os.close(descriptor)
    raise AddressError(
        f"the ports {first} to {candidates[-1] + count - 1} are in use on this machine; stop the programs "
        f"that listen there (ss -ltnp shows them) or change spec.trainer.port"
    )


def _first_problem(hosts: Sequence[str], ports: Sequence[Sequence[int]]) -> OSError | None:
    for host, wanted in zip(hosts, ports, strict=True):
        for port in wanted:
            if (problem := bind_error(host, port)) is not None:
                return problem
    return None


def _explain(problem: OSError | None, count: int, ports: list[int]) -> str:
    if problem is None:
        return f"all of the {TRIES} loopback networks tried are claimed by other runs; wait for one to end"
    if problem.errno == errno.EADDRNOTAVAIL:
        last = FIRST_HOST + count - 1
        return (
            f"this machine does not have the loopback addresses 127.0.0.{FIRST_HOST} to 127.0.0.{last}, "
            f"one for each replica; add them with: "
            f"for i in $(seq {FIRST_HOST} {last}); do sudo ifconfig lo0 alias 127.0.0.$i up; done"
        )
    if problem.errno == errno.EADDRINUSE:
        named = ", ".join(map(str, ports))
        return (
            f"one of the ports {named} is in use on all addresses of this machine; stop the program that "
            f"listens there (ss -ltnp shows it) or change spec.pserver.port and spec.trainer.port"
        )
    return (
        f"cannot bind loopback addresses: {problem.strerror}; expected 127.0.0.0/8 to be this machine's own"
    )
