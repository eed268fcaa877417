"""How the processes of one mpirun learn each other's addresses: rank 0 collects them, and tells everybody.

The launcher tells a process its rank and where mpirun runs, but not where the other ranks are. mpi4py would,
at the price of a compiler and of MPI's own threads in every process; for a handful of addresses one short
exchange over TCP is enough. Rank 0 listens on one of a few ports that all ranks compute from the launcher's
name for the job, so nothing has to be configured where rank 0 runs on mpirun's host. Another program may have
one of these ports: rank 0 answers a greeting with one byte at once, and whoever does not is not waited for.
"""

import contextlib
import hmac
import ipaddress
import itertools
import json
import logging
import queue
import secrets
import socket
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from fleet.errors import DeadlineExceededError, RoleError

__all__ = ["Card", "exchange"]

_FIRST_PORT: Final = 20000  # below the ports that systems hand out by themselves
_PORT_RANGE: Final = 10000
_PORT_TRIES: Final = 5
_TRY_SECONDS: Final = 2.0
_HEARD: Final = b"\x06"
"""What rank 0 answers to a greeting at once: another program on one of the ports does not."""
_HEARD_SECONDS: Final = 10.0  # rank 0 may have to listen to others first
_HEARD_AT_ONCE: Final = 64
_LOOK_SECONDS: Final = 0.1
_PAUSE_SECONDS: Final = 0.1
_CHALLENGE_BYTES: Final = 32
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
    key : bytes
        The job's, which all ranks prove to rank 0, and rank 0 to them; empty where there is none.
    """

    job: str
    rank: int
    size: int
    hosts: tuple[str, ...]
    port: int | None
    serves: bool
    deadline_seconds: float
    key: bytes = field(default=b"", repr=False)

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports that rank 0 tries in turn."""
        if self.port is not None:
            return (self.port,)
        first = _FIRST_PORT + zlib.crc32(self.job.encode()) % _PORT_RANGE
        return tuple(range(first, first + _PORT_TRIES))


class _Heard(NamedTuple):
    """A rank that has said who it is, and waits for the answer."""

    number: int
    """Which connection it came by: the later of one rank's counts."""
    connected: socket.socket
    whence: str
    challenge: bytes
    greeting: Mapping[str, Any]


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
    ends: dict[int, tuple[str, str]] = {}
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(card))
        listener.settimeout(_LOOK_SECONDS)
        # Not one after the other: whoever keeps silent keeps no rank waiting.
        hearing = ThreadPoolExecutor(_HEARD_AT_ONCE, thread_name_prefix="fleet-mpi")
        stack.callback(hearing.shutdown, wait=False, cancel_futures=True)
        heard: queue.SimpleQueue[_Heard] = queue.SimpleQueue()
        numbers, latest = itertools.count(), dict[int, int]()
        waiting: dict[int, socket.socket] = {}
        challenges: dict[int, bytes] = {}
        while len(waiting) < card.size - 1:
            if time.monotonic() >= deadline:
                missing = ", ".join(str(rank) for rank in range(1, card.size) if rank not in waiting)
                raise DeadlineExceededError(
                    f"rank 0 waited {card.deadline_seconds:g} s on port {listener.getsockname()[1]} for the "
                    f"ranks {missing} of the MPI job; do they run, and do they reach this host?"
                )
            with contextlib.suppress(OSError):  # nobody came, or whoever did has gone
                connected, peer = listener.accept()
                hearing.submit(_hear, next(numbers), stack.enter_context(connected), peer[0], card, heard)
            while not heard.empty():
                number, connected, whence, challenge, greeting = heard.get()
                rank = greeting["rank"]
                if number < latest.get(rank, 0):
                    continue
                latest[rank] = number
                waiting[rank], ports[rank], challenges[rank] = connected, greeting["port"], challenge
                ends[rank] = (connected.getsockname()[0], whence)
            # A rank that has lost its connection comes again.
            waiting = {rank: each for rank, each in waiting.items() if _is_open(each)}
        hosts = _hosts(card.hosts[0], ends)
        endpoints = [_endpoint(hosts[rank], ports[rank]) for rank in range(card.size)]
        for rank, connected in waiting.items():
            answer = {"endpoints": endpoints, "mac": _mac(card, challenges[rank], "all", *endpoints)}
            with contextlib.suppress(OSError):  # that one's end is noticed by its launcher
                connected.sendall(json.dumps(answer).encode() + b"\n")
    return tuple(endpoints)


def _hosts(first: str, ends: Mapping[int, tuple[str, str]]) -> dict[int, str]:
    """Return where each rank is for all others.

    A rank beside rank 0 may have come by a loopback address, as a name of this host in /etc/hosts gives it;
    ranks of other hosts can reach neither of the two by that.

    Parameters
    ----------
    first : str
        Where rank 0 was said to be.
    ends : mapping of rank to (str, str)
        Of each connection the address here, and the rank's own.
    """
    outward = [here for here, peer in ends.values() if not _is_loopback(peer)]
    if outward:
        return {0: outward[-1]} | {
            rank: outward[-1] if _is_loopback(peer) else peer for rank, (_, peer) in ends.items()
        }
    within = [here for here, _ in ends.values()]
    mine = within[-1] if within and _is_loopback(first) else first
    return {0: mine} | {rank: peer for rank, (_, peer) in ends.items()}


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _ask(card: Card) -> tuple[str, ...]:
    """Be another rank: find rank 0, say who this is, and wait for all addresses."""
    began = time.monotonic()
    deadline = began + card.deadline_seconds
    own_port = _free_port() if card.serves else 0
    told = False
    for host, port in _places(card):
        now = time.monotonic()
        if now >= deadline:
            break
        if now - began >= 5.0 and not told:
            told = True
            _log.warning("rank %d waits for rank 0 at %s", card.rank, _words(card))
        with (
            contextlib.suppress(OSError, ValueError, KeyError, TypeError),
            socket.create_connection((host, port), _TRY_SECONDS) as connected,
        ):
            connected.settimeout(min(_HEARD_SECONDS, deadline - now))
            challenge = _receive(connected, _CHALLENGE_BYTES if card.key else 0)
            mac = _mac(card, challenge, "rank", card.rank, own_port)
            greeting = {"job": card.job, "rank": card.rank, "port": own_port, "mac": mac}
            connected.sendall(json.dumps(greeting).encode() + b"\n")
            if connected.recv(1) != _HEARD:
                continue  # another program has the port; rank 0 may have the next
            answer = json.loads(_line(connected, deadline))
            endpoints = tuple(answer["endpoints"])
            if hmac.compare_digest(answer["mac"], _mac(card, challenge, "all", *endpoints)):
                return endpoints
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
    if not local and not card.key:
        local = True
        _log.warning(
            "rank 0 was given no key of the job (FLEET_JOB_KEY), so it listens on 127.0.0.1 only, and "
            "no rank of another host reaches it: export one, and start with mpirun -x FLEET_JOB_KEY"
        )
    errors: list[OSError] = []
    for port in card.ports:
        try:
            return socket.create_server(("127.0.0.1" if local else "", port), backlog=card.size)
        except OSError as error:
            errors.append(error)
    raise RoleError(
        f"rank 0 of the MPI job cannot listen on {', '.join(map(str, card.ports))}: {errors[-1].strerror}; "
        "set FLEET_MPI_RENDEZVOUS=host:port for all ranks, with a free port of rank 0's host"
    ) from errors[-1]


def _hear(
    number: int, connected: socket.socket, whence: str, card: Card, heard: "queue.SimpleQueue[_Heard]"
) -> None:
    """Hear whoever has come, in a thread of its own; who is no rank of this job is sent away."""
    challenge = secrets.token_bytes(_CHALLENGE_BYTES if card.key else 0)
    greeting = _greeting(connected, card, challenge)
    if greeting is None:
        connected.close()
        return
    with contextlib.suppress(OSError):  # it has gone meanwhile, and comes again
        connected.sendall(_HEARD)
        heard.put(_Heard(number, connected, whence, challenge, greeting))


def _greeting(connected: socket.socket, card: Card, challenge: bytes) -> dict[str, Any] | None:
    """Return what a rank of this job says; None for anybody else."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        connected.sendall(challenge)
        greeting = json.loads(_line(connected, time.monotonic() + _TRY_SECONDS))
        known = greeting["job"] == card.job and 0 < greeting["rank"] < card.size
        expected = _mac(card, challenge, "rank", greeting["rank"], greeting["port"])
        proven = hmac.compare_digest(greeting.get("mac", ""), expected)
        if known and proven and isinstance(greeting["port"], int):
            return dict(greeting)
    return None


def _mac(card: Card, challenge: bytes, *said: object) -> str:
    """Return what proves that words come from a process of this run, now; empty where there is no key."""
    if not card.key:
        return ""
    words = json.dumps(["fleet mpi", challenge.hex(), card.job, *said])
    return hmac.digest(card.key, words.encode(), "sha256").hex()


def _receive(connected: socket.socket, count: int) -> bytes:
    """Receive so many bytes; ConnectionError when the other end closes before."""
    received = connected.recv(count, socket.MSG_WAITALL) if count else b""
    if len(received) < count:
        raise ConnectionError("it was closed at the other end")
    return received


def _is_open(connected: socket.socket) -> bool:
    """Whether a rank that waits still does: it says nothing more, so what can be read is the end."""
    connected.settimeout(0)
    try:
        connected.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        connected.settimeout(_TRY_SECONDS)
        return True
    except OSError:
        return False
    return False


def _line(connected: socket.socket, deadline: float) -> bytes:
    """Receive one line; empty when the other end closes before its end, TimeoutError past the deadline."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _MAX_LINE:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the line has no end")
        connected.settimeout(left)
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
