"""Unix sockets between processes of one host, over which the descriptors of shared memory can go.

They have names in the abstract namespace of Linux, which belongs to a network namespace as ports do: no file
is left behind, and whoever can connect shares the host. A name is random, and both ends look at the other's
user id: memory is shared with processes of the same user only.
"""

import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Final

from fleet.parameter_server.transport.connection import receive_exactly, send_all
from fleet.parameter_server.transport.sockets import ConnectionEndedError
from fleet.process.connections import own

__all__ = ["check_user", "dial_here", "listen_here", "receive_with", "send_with"]

_CREDENTIALS: Final = struct.Struct("iII")
"""Linux' ``struct ucred``: process, user, group."""
_DESCRIPTOR: Final = struct.Struct("i")


def listen_here() -> tuple[socket.socket, str]:
    """Open a listening socket that only processes of this host can reach; return it with its name.

    Raises
    ------
    OSError
        This system has no such sockets.
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
    """Connect to the process of this host that listens under a name.

    Raises
    ------
    OSError
        There is none on this host, it belongs to another user, or the time is over.
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
    """Check that the process at the other end of a Unix socket belongs to this process's user.

    Raises
    ------
    PermissionError
        It does not.
    """
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    if user != os.geteuid():
        raise PermissionError(f"the peer's process belongs to user {user}, expected {os.geteuid()}")


def send_with(connection: socket.socket, payload: bytes, descriptors: Sequence[int]) -> None:
    """Send bytes, at least one, together with copies of descriptors.

    Raises
    ------
    OSError
        The connection broke.
    """
    if not descriptors:
        send_all(connection, [payload])
        return
    sent = socket.send_fds(connection, [payload], list(descriptors))
    send_all(connection, [payload[sent:]])


def receive_with(connection: socket.socket, destination: memoryview) -> list[int]:
    """Fill `destination` from the socket; return the descriptor that came with it, the caller's to close.

    There is at most one.

    Raises
    ------
    ConnectionEndedError
        The peer closed before the buffer was full.
    OSError
        The connection broke.
    """
    if connection.family != socket.AF_UNIX or not destination:
        receive_exactly(connection, destination)
        return []
    received, ancillary, _, _ = connection.recvmsg_into(
        [destination], socket.CMSG_SPACE(_DESCRIPTOR.size), socket.MSG_CMSG_CLOEXEC
    )
    if not received:
        raise ConnectionEndedError("it was closed at the other end")
    descriptors = [
        descriptor
        for level, kind, data in ancillary
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
        for (descriptor,) in _DESCRIPTOR.iter_unpack(data)
    ]
    try:
        receive_exactly(connection, destination[received:])
    except BaseException:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors


def _unix_socket() -> socket.socket:
    if sys.platform != "linux":
        raise OSError("only Linux has Unix sockets with abstract names")
    return own(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))


def _address(name: str) -> bytes:
    return b"\0" + name.encode()
