"""How the processes of one mpirun learn each other's addresses: rank 0 collects them, and tells everybody.

The launcher tells a process its rank and where mpirun runs, but not where the other ranks are. mpi4py would,
at the price of a compiler and of MPI's own threads in every process; for a handful of addresses one short
exchange over TCP is enough. Rank 0 listens on one of a few ports that all ranks compute from the launcher's
name for the job, so nothing has to be configured where rank 0 runs on mpirun's host.
"""

import contextlib
import json
import logging
import socket
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from fleet.errors import DeadlineExceededError, RoleError

__all__ = ["Card", "exchange"]

_FIRST_PORT: Final = 20000  # below the ports that systems hand out by themselves
_PORT_RANGE: Final = 10000
_PORT_TRIES: Final = 5
_TRY_SECONDS: Final = 2.0
_PAUSE_SECONDS: Final = 0.1
_MAX_LINE: Final = 1 << 20
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Card:
    """What a process knows by itself.

    Attributes
    ----------
    job : str
        The launcher's name for this run.
    rank, size : int
    hosts : tuple of str
        Where rank 0 may be; the first that answers is taken.
    port : int or None
        Where rank 0 listens; None for the ports that follow from `job`.
    serves : bool
        Whether this process needs an endpoint of its own.
    deadline_seconds : float
    """

    job: str
    rank: int
    size: int
    hosts: tuple[str, ...]
    port: int | None
    serves: bool
    deadline_seconds: float

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that rank 0 tries in turn."""
        if self.port is not None:
            return (self.port,)
        first = _FIRST_PORT + zlib.crc32(self.job.encode()) % _PORT_RANGE
        return tuple(range(first, first + _PORT_TRIES))


def exchange(card: Card) -> tuple[str, ...]:
    """Exchange addresses with all processes of the run.

    Parameters
    ----------
    card : Card
        This process's own.

    Returns
    -------
    tuple of str
        By rank: ``host:port`` of a process that serves, empty for one that does not.

    Raises
    ------
    RoleError
        Rank 0 cannot listen.
    DeadlineExceededError
        A rank did not come in time; the message names it.
    """
    return _collect(card) if card.rank == 0 else _ask(card)


def _collect(card: Card) -> tuple[str, ...]:
    """Be rank 0: take everybody's port, and answer with all addresses."""
    deadline = time.monotonic() + card.deadline_seconds
    ports = {0: _free_port() if card.serves else 0}
    hosts = {0: card.hosts[0]}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(card))
        waiting: list[socket.socket] = []
        while len(ports) < card.size:
            if time.monotonic() >= deadline:
                missing = ", ".join(str(rank) for rank in range(card.size) if rank not in ports)
                raise DeadlineExceededError(
                    f"rank 0 waited {card.deadline_seconds:g} s on port {listener.getsockname()[1]} for the "
                    f"ranks {missing} of the MPI job; do they run, and do they reach this host?"
                )
            listener.settimeout(_TRY_SECONDS)
            with contextlib.suppress(TimeoutError):
                connected = listener.accept()[0]
                greeting = _greeting(connected, card)
                if greeting is None or greeting["rank"] in ports:
                    connected.close()
                    continue
                waiting.append(stack.enter_context(connected))
                ports[greeting["rank"]] = greeting["port"]
                hosts[greeting["rank"]] = connected.getpeername()[0]
                hosts[0] = connected.getsockname()[0]
        endpoints = [_endpoint(hosts[rank], ports[rank]) for rank in range(card.size)]
        answer = json.dumps(endpoints).encode() + b"\n"
        for connected in waiting:
            with contextlib.suppress(OSError):  # that one's end is noticed by its launcher
                connected.sendall(answer)
    return tuple(endpoints)


def _ask(card: Card) -> tuple[str, ...]:
    """Be another rank: find rank 0, say who this is, and wait for all addresses."""
    began = time.monotonic()
    greeting = {"job": card.job, "rank": card.rank, "port": _free_port() if card.serves else 0}
    told = False
    for host, port in _places(card):
        elapsed = time.monotonic() - began
        if elapsed >= card.deadline_seconds:
            break
        if elapsed >= 5.0 and not told:
            told = True
            _log.warning("rank %d waits for rank 0 at %s", card.rank, _words(card))
        with contextlib.suppress(OSError), socket.create_connection((host, port), _TRY_SECONDS) as connected:
            connected.settimeout(max(_TRY_SECONDS, card.deadline_seconds - elapsed))
            connected.sendall(json.dumps(greeting).encode() + b"\n")
            line = _line(connected)
            if line:
                return tuple(json.loads(line))
    raise DeadlineExceededError(
        f"rank {card.rank} found no rank 0 of its MPI job within {card.deadline_seconds:g} s at "
        f"{_words(card)}; where rank 0 does not run on mpirun's host, set FLEET_MPI_RENDEZVOUS=host:port for "
        "all ranks (mpirun -x FLEET_MPI_RENDEZVOUS)"
    )


def _places(card: Card) -> Iterator[tuple[str, int]]:
    """Return where rank 0 may listen, again and again, with a pause after each round."""
    while True:
        yield from ((host, port) for host in card.hosts for port in card.ports)
        time.sleep(_PAUSE_SECONDS)


def _listen(card: Card) -> socket.socket:
    local = all(host.startswith("127.") for host in card.hosts)
    for port in card.ports:
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1" if local else "", port), backlog=card.size)
    raise RoleError(
        f"rank 0 of the MPI job cannot listen on {', '.join(map(str, card.ports))}: the ports are taken; set "
        "FLEET_MPI_RENDEZVOUS=host:port for all ranks, with a free port of rank 0's host"
    )


def _greeting(connected: socket.socket, card: Card) -> dict[str, Any] | None:
    """Return what a rank of this job says; None for anybody else."""
    connected.settimeout(_TRY_SECONDS)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        greeting = json.loads(_line(connected))
        known = greeting["job"] == card.job and 0 < greeting["rank"] < card.size
        if known and isinstance(greeting["port"], int):
            return dict(greeting)
    return None


def _line(connected: socket.socket) -> bytes:
    """Receive one line; empty when the other end closes before its end."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _MAX_LINE:
        more = connected.recv(4096)
        if not more:
            return b""
        received += more
    return received


def _free_port() -> int:
    """Return a port that is free now, on every interface."""
    with socket.create_server(("", 0)) as probe:
        return int(probe.getsockname()[1])


def _endpoint(host: str, port: int) -> str:
    if not port:
        return ""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _words(card: Card) -> str:
    return f"{' or '.join(card.hosts)}, ports {', '.join(map(str, card.ports))}"
