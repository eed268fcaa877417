"""Sockets of the data plane: opening them, ending them, and keeping them out of forked children.

The sockets block. Nothing here has a time-out except the opening: a thread that waits in one is woken by
`hang_up`, called by whoever found that the peer is gone.
"""

import contextlib
import errno
import ipaddress
import logging
import socket
import struct
import time
from typing import Final, NamedTuple

from fleet.process.connections import own

__all__ = [
    "BytesMoved",
    "ConnectionEndedError",
    "bind_address",
    "bytes_moved",
    "dial",
    "drain",
    "hang_up",
    "is_given_up",
    "listen",
    "reachable_address",
    "tune",
]

_BACKLOG: Final = 4096
"""How many may wait to be accepted, where the system allows so many: all trainers of a job come at once."""
_log = logging.getLogger(__name__)
_TCP_INFO_BYTES_MOVED: Final = struct.Struct("120xQQ")
"""The fields ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of Linux' ``struct tcp_info``."""


class ConnectionEndedError(ConnectionError):
    """The peer closed the connection, or its host did."""


class BytesMoved(NamedTuple):
    """How much of what one end of a connection sent has arrived, and how much has come from the other."""

    acknowledged: int
    received: int


def bind_address(host: str) -> str:
    """Return the address to bind so that others reach this process by `host`; empty for every interface.

    An address of this machine is bound as it is. A name may mean an address outside of this container, and
    so may an address that is not of this machine: for these, every interface.
    """
    address = _literal(host)
    if address:
        with socket.socket(_family(address), socket.SOCK_STREAM) as probe:
            try:
                probe.bind((address, 0))
            except OSError as error:
                if error.errno != errno.EADDRNOTAVAIL:
                    raise
                return ""
    return address


def reachable_address(host: str, *, by_all: bool) -> str:
    """Return the address to bind: as `bind_address`, or a loopback one where strangers could reach that.

    Parameters
    ----------
    host : str
        By which others were told to reach this process.
    by_all : bool
        Whether everybody may reach it: who comes must prove then that it is of the job.
    """
    address = bind_address(host)
    if by_all or (address and ipaddress.ip_address(address).is_loopback):
        return address
    _log.warning(
        "this process was given no key of the job (FLEET_JOB_KEY), so it listens on 127.0.0.1 only and not "
        "on %s: without one, whoever reaches it could read and change the training",
        host,
    )
    return "127.0.0.1"


def listen(address: str, port: int = 0) -> socket.socket:
    """Open a listening socket, on a port that the system chooses unless one is given; see `bind_address`."""
    if address:
        return own(socket.create_server((address, port), family=_family(address), backlog=_BACKLOG))
    if socket.has_dualstack_ipv6():
        server = socket.create_server(
            ("", port), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True
        )
        return own(server)
    return own(socket.create_server(("", port), backlog=_BACKLOG))


def dial(host: str, port: int, *, timeout_seconds: float, buffer_bytes: int | None) -> socket.socket:
    """Connect to a peer's data port.

    Raises
    ------
    OSError
        There is no such host, nobody listens, or the time is over.
    """
    connection = own(socket.create_connection((host, port), timeout=timeout_seconds))
    tune(connection, buffer_bytes)
    return connection


def tune(connection: socket.socket, buffer_bytes: int | None) -> None:
    """Prepare a connected socket: frames leave at once, buffers have the size wanted, forks close it."""
    own(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _stays_on_this_machine(connection):
        # What congestion controls do for networks, pacing above all, only costs time here.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def drain(connection: socket.socket, timeout_seconds: float) -> None:
    """Throw away what the peer still sends, until it closes or the time is over.

    Closing a socket whose received bytes nobody has read resets the connection, and a reset makes the peer
    lose what it has not read yet: the sentence that says what was wrong.
    """
    deadline = time.monotonic() + timeout_seconds
    scratch = bytearray(1 << 16)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while (remaining := deadline - time.monotonic()) > 0:
            connection.settimeout(remaining)
            if not connection.recv_into(scratch):
                return


def hang_up(connection: socket.socket) -> None:
    """End both directions, so that threads which wait in the socket return; safe to repeat."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def is_given_up(connection: socket.socket) -> bool:
    """Whether the peer has closed a connection, and nothing that it sent is left to be read; never waits."""
    timeout_seconds = connection.gettimeout()
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(timeout_seconds)


def bytes_moved(connection: socket.socket) -> BytesMoved | None:
    """Return how many bytes a connection has moved, inside of frames too; None where no system tells."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES_MOVED.size)
        return BytesMoved(*_TCP_INFO_BYTES_MOVED.unpack(info))
    except (OSError, struct.error):
        return None


def _stays_on_this_machine(connection: socket.socket) -> bool:
    here, there = connection.getsockname()[0], connection.getpeername()[0]
    return bool(here == there or ipaddress.ip_address(there).is_loopback)


def _literal(host: str) -> str:
    if host == "localhost":
        return "127.0.0.1"
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return ""


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
