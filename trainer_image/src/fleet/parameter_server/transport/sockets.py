"""Functions that open, configure, read, write and close the sockets of data connections.

A connection's socket is blocking, with timeouts, until the end of the handshake; then an event loop serves it
without blocking. Any thread may end a connection with `hang_up`, which wakes a thread or an event loop that
waits for the socket.

Processes on one host connect over Unix sockets, which can pass the descriptors of shared memory. The sockets'
names are in Linux's abstract namespace, which belongs to a network namespace as ports do: no file is left
behind, and only processes on this host can connect. A name is random, and each end checks the other end's
user id, so that memory is shared only with processes of the same user.
"""

import contextlib
import errno
import ipaddress
import logging
import os
import secrets
import socket
import struct
import sys
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from fleet.process.connections import own

__all__ = [
    "BytesMoved",
    "ConnectionEndedError",
    "bind_address",
    "bytes_moved",
    "check_user",
    "dial",
    "dial_here",
    "drain",
    "hang_up",
    "is_given_up",
    "listen",
    "listen_here",
    "reachable_address",
    "receive_exactly",
    "send_all",
    "tune",
]

_BACKLOG: Final = 4096
"""The length of the accept queue, if the system allows it: all trainers of a job connect simultaneously."""
_CREDENTIALS: Final = struct.Struct("iII")
"""The format of Linux's ``struct ucred``: process, user, group."""
_TCP_INFO_BYTES_MOVED: Final = struct.Struct("120xQQ")
"""The fields ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of Linux's ``struct tcp_info``."""
# Linux and macOS accept at most 1024 buffers in one call.
_IOV_MAX: Final = 512
_log = logging.getLogger(__name__)


class ConnectionEndedError(ConnectionError):
    """The peer or its host closed the connection."""


class BytesMoved(NamedTuple):
    """The numbers of bytes that the peer of a connection has acknowledged and sent."""

    acknowledged: int
    received: int


def bind_address(host: str) -> str:
    """Return the address to bind so that peers reach this process at `host`; empty for all interfaces.

    An address of this machine is returned unchanged. Traffic to a name, or to an address of another machine,
    may be redirected on its way into this container, so the result is then every interface.
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
    """Return the address to bind: a loopback address, unless peers must prove that they belong to the job.

    Parameters
    ----------
    host : str
        The address by which the job's peers reach this process.
    by_all : bool
        Whether any host may connect, because peers must prove that they belong to the job.
    """
    address = bind_address(host)
    if by_all or (address and ipaddress.ip_address(address).is_loopback):
        return address
    _log.warning(
        "this process has no job key (FLEET_JOB_KEY), so it listens on 127.0.0.1 only and not on %s: without "
        "a key, anybody who reaches it could read and change the training",
        host,
    )
    return "127.0.0.1"


def listen(address: str, port: int = 0) -> socket.socket:
    """Listen on an address from `bind_address`; the system chooses the port if `port` is 0."""
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
        The host is unknown, no process listens at the port, or the timeout expired.
    """
    connection = own(socket.create_connection((host, port), timeout=timeout_seconds))
    tune(connection, buffer_bytes)
    return connection


def tune(connection: socket.socket, buffer_bytes: int | None) -> None:
    """Configure a connected socket: delay, congestion control, buffers, and closing in forked children."""
    own(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if _stays_on_this_machine(connection):
        # Congestion control for networks, in particular pacing, only costs time on loopback.
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
    if buffer_bytes is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)


def listen_here() -> tuple[socket.socket, str]:
    """Listen on a Unix socket for processes on this host; return the socket and its name.

    Raises
    ------
    OSError
        This system does not support such sockets.
    """
    name = f"fleet-{secrets.token_hex(16)}"
    listener = _unix_socket()
    try:
        listener.bind(_address(name))
        listener.listen()
    except BaseException:
        listener.close()
        raise
    return listener, name


def dial_here(name: str, *, timeout_seconds: float, buffer_bytes: int | None) -> socket.socket:
    """Connect to the Unix socket with a given name on this host.

    Raises
    ------
    OSError
        No process on this host listens at the socket, the process belongs to another user, or the timeout
        expired.
    """
    connection = _unix_socket()
    try:
        connection.settimeout(timeout_seconds)
        connection.connect(_address(name))
        check_user(connection)
        if buffer_bytes is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
    except BaseException:
        connection.close()
        raise
    return connection


def check_user(connection: socket.socket) -> None:
    """Raise an error unless the peer of a Unix socket runs as the same user as this process.

    Raises
    ------
    PermissionError
        The peer runs as another user.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise PermissionError(f"the peer's process belongs to user {user}, expected {os.geteuid()}")


def drain(connection: socket.socket, timeout_seconds: float) -> None:
    """Discard incoming bytes until the peer closes or the timeout expires.

    Closing a socket with unread bytes resets the connection, and after a reset the peer could not read an
    error that this end has sent.
    """
    deadline = time.monotonic() + timeout_seconds
    scratch = bytearray(1 << 16)
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
        while (remaining := deadline - time.monotonic()) > 0:
            connection.settimeout(remaining)
            if not connection.recv_into(scratch):
                return


def receive_exactly(connection: socket.socket, destination: memoryview) -> None:
    """Receive bytes until `destination` is full.

    Raises
    ------
    ConnectionEndedError
        The peer closed the connection earlier; the message gives the number of received bytes.
    OSError
        The connection broke.
    """
    received, wanted = 0, len(destination)
    while received < wanted:
        # Despite MSG_WAITALL there may be less: a Python socket with a timeout does not block in the kernel,
        # and TLS ignores the flag.
        count = connection.recv_into(destination[received:], wanted - received, socket.MSG_WAITALL)
        if count == 0:
            where = f", after {received} of {wanted} bytes" if received else ""
            raise ConnectionEndedError(f"it was closed at the other end{where}")
        received += count


def send_all(connection: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Send all bytes of the buffers, in order and without joining the buffers.

    Raises
    ------
    OSError
        The connection broke.
    """
    pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
    first = 0
    while first < len(pending):
        sent = connection.sendmsg(pending[first : first + _IOV_MAX])
        while first < len(pending) and sent >= len(pending[first]):
            sent -= len(pending[first])
            first += 1
        if sent:
            pending[first] = pending[first][sent:]


def hang_up(connection: socket.socket) -> None:
    """Shut down both directions, which wakes any waiting thread or loop. May be called repeatedly."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def is_given_up(connection: socket.socket) -> bool:
    """Return, without blocking, whether the peer has closed the connection and all its data has been read."""
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
    """Return a connection's byte counts, including partial frames, or None if they are unknown."""
    option = getattr(socket, "TCP_INFO", None)
    if option is None:
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, option, _TCP_INFO_BYTES_MOVED.size)
        return BytesMoved(*_TCP_INFO_BYTES_MOVED.unpack(info))
    # A Unix socket has no such option, and an old kernel has a shorter structure.
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


def _unix_socket() -> socket.socket:
    if sys.platform != "linux":
        raise OSError("only Linux has Unix sockets with abstract names")
    return own(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))


def _address(name: str) -> bytes:
    return b"\0" + name.encode()
