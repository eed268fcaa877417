"""A server's data ports, and the handshake on each new data connection.

::

    trainer                              server
                                     ←   challenge
    answer, its MAC                  →
                                     ←   MAC; or it closes
    HELLO, descriptor of its memory  →
                                     ←   HELLO, descriptor of its memory; or ERROR, and it closes

If the job has certificates, both ends of a TCP connection perform a TLS handshake first (`transport.tls`).
The first three lines are exchanged only if the job has a key (`fleet.wire.proof`): each end proves that it
has the key, with a MAC over random numbers from both ends, and the server does not answer a peer without the
key. The trainer calls `greet`. On the server `DataPorts` calls `accept`, which finds the session by the
identity in the trainer's HELLO and resumes the session over this connection. No other module sends or
receives a frame of the handshake.
"""

import contextlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.certificates import Certificates
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.transport.connection import Directions
from fleet.parameter_server.transport.sockets import (
    ConnectionEndedError,
    check_user,
    drain,
    hang_up,
    is_given_up,
    listen,
    listen_here,
    receive_exactly,
    send_all,
    tune,
)
from fleet.parameter_server.transport.tls import TlsSocket
from fleet.process.connections import HalfOpen, own
from fleet.wire import (
    HEADER_BYTES,
    NO_TABLES,
    Conversation,
    Header,
    Hello,
    Identity,
    Kind,
    Side,
    pack_header,
    read_header,
)
from fleet.wire.messages import pack_error, pack_hello, read_error, read_hello
from fleet.wire.proof import CHALLENGE_BYTES, MAC_BYTES, greeting_mac

__all__ = [
    "GREETING_SECONDS",
    "Caller",
    "DataPorts",
    "NotGreetedError",
    "Resumable",
    "accept",
    "greet",
    "receive_with",
    "send_with",
]

GREETING_SECONDS: Final = 10.0
"""The default time limit for each part of the handshake that the other end sends."""
_DESCRIPTOR: Final = struct.Struct("i")
_DRAIN_SECONDS: Final = 1.0
_PAUSE_SECONDS: Final = 0.1
"""The pause after a failed ``accept()``, for example because no file descriptor is free."""
_log = logging.getLogger(__name__)


class NotGreetedError(TimeoutError):
    """The server accepted a connection but did not send a greeting in time, perhaps because it is busy."""


def greet(
    connected: socket.socket,
    identity: Identity,
    ours: Hello,
    block_bytes: Mapping[int, int],
    *,
    descriptors: Sequence[int],
    share: Callable[[Hello, Sequence[int]], bool],
    timeout_seconds: float,
    key: bytes = b"",
    row_bytes: Mapping[int, int] = NO_TABLES,
) -> tuple[Directions, Hello]:
    """Perform the trainer's side of the handshake.

    Parameters
    ----------
    connected : socket.socket
        The socket, which has no timeout when this function returns.
    identity : Identity
        The identity of the trainer.
    ours : Hello
    block_bytes : mapping of int to int
        The size of each block on the wire in bytes.
    descriptors : sequence of int
        The descriptor of the trainer's memory if the trainer offers to share it; otherwise empty.
    share : callable
        Called with the server's greeting and the descriptors that came with the greeting, which are closed
        afterwards; returns whether memory is shared.
    timeout_seconds : float
        The time limit for each of the server's answers.
    key : bytes
        The key of the job; empty if it has none.
    row_bytes : mapping of int to int
        The size of each table's rows in bytes.

    Returns
    -------
    tuple of Directions and Hello
        The directions of the connection, and the server's greeting.

    Raises
    ------
    NotGreetedError
        The server did not answer in time.
    FleetError
        The server refuses the trainer, or violates the protocol.
    OSError
        The connection broke.
    """
    sending = Conversation(Side.TRAINER, identity, block_bytes, remote=False, row_bytes=row_bytes)
    receiving = Conversation(Side.SERVER, identity, block_bytes, remote=True, row_bytes=row_bytes)
    connected.settimeout(timeout_seconds)
    try:
        if isinstance(connected, TlsSocket):
            connected.handshake()
        if key:
            _prove_to_server(connected, key)
        sending.advance(_send(connected, identity, Kind.HELLO, pack_hello(ours), descriptors))
        answer = _first_header(connected)
        receiving.advance(answer)
        with _payload_of(connected, answer) as (payload, received):
            if answer.kind is Kind.ERROR:
                raise read_error(payload)
            theirs = read_hello(payload)
            sending.shares = receiving.shares = share(theirs, received)
    except TimeoutError as error:
        raise NotGreetedError(f"it did not greet within {timeout_seconds:g} s") from error
    connected.settimeout(None)
    return Directions(sending, receiving), theirs


class Resumable(Protocol):
    """The interface of a server's session that the handshake uses; see `server.TrainerSession`."""

    @property
    def block_bytes(self) -> Mapping[int, int]:
        """The size of each block on the wire, in bytes."""

    @property
    def row_bytes(self) -> Mapping[int, int]:
        """The size of a row of each table on the wire, in bytes."""

    def resume(self, caller: "Caller") -> None:
        """Resume the session on a new connection: answer the caller, or raise the reason for a refusal."""

    def refused(self) -> None:
        """Record that the trainer has received the error of a failed session."""


class Caller:
    """A trainer that has sent its greeting and waits for the server's answer.

    Parameters
    ----------
    connected : socket.socket
        The socket, which has a timeout until the trainer is answered.
    identity : Identity
    receiving : Conversation
        The state of the direction from the trainer.
    hello : Hello
        The trainer's greeting.
    descriptors : sequence of int
        The descriptor of the trainer's memory, if offered for sharing; valid while `Resumable.resume` runs.
    """

    def __init__(
        self,
        connected: socket.socket,
        identity: Identity,
        receiving: Conversation,
        hello: Hello,
        descriptors: Sequence[int],
    ) -> None:
        self.connected = connected
        self.hello = hello
        self.descriptors = descriptors
        self._identity = identity
        self._receiving = receiving

    def check_waiting(self) -> None:
        """Raise an error if the trainer has stopped waiting for the answer.

        Raises
        ------
        ConnectionEndedError
            The trainer has stopped waiting.
        """
        if is_given_up(self.connected):
            raise ConnectionEndedError("it was given up at the other end before it was greeted")

    def answer(
        self,
        ours: Hello,
        block_bytes: Mapping[int, int],
        descriptors: Sequence[int],
        row_bytes: Mapping[int, int] = NO_TABLES,
    ) -> Directions:
        """Send the server's greeting, with a descriptor of the server's memory if memory is shared.

        Raises
        ------
        OSError
            The connection broke.
        """
        sending = Conversation(Side.SERVER, self._identity, block_bytes, remote=False, row_bytes=row_bytes)
        sending.advance(_send(self.connected, self._identity, Kind.HELLO, pack_hello(ours), descriptors))
        sending.shares = self._receiving.shares = bool(descriptors)
        self.connected.settimeout(None)
        return Directions(sending, self._receiving)


def accept(
    connected: socket.socket, find: Callable[[Identity], Resumable], half_open: HalfOpen, key: bytes
) -> None:
    """Perform the server's side of the handshake, and resume the trainer's session on the connection.

    Parameters
    ----------
    connected : socket.socket
        The socket, which has a timeout during the handshake and none afterwards.
    find : callable
        Returns the session of a trainer; raises an error if the trainer has not joined.
    half_open : HalfOpen
        Limits the number and the duration of connections that have not completed the greeting.
    key : bytes
        The key of the job; empty if it has none.

    Raises
    ------
    FleetError
        The caller was refused, and has received the error.
    OSError
        The caller does not have the key, the connection ended, or the time limit expired.
    """
    # This limits each receive; `half_open` limits the whole greeting, which a stranger could send byte by
    # byte.
    connected.settimeout(GREETING_SECONDS)
    identity, session = Identity(0, 0, 0), None
    try:
        # The descriptors stay open while the session resumes. Resuming may have to wait for a step, so
        # `half_open` does not limit it.
        with contextlib.ExitStack() as received:
            with half_open.bounded(connected):
                if isinstance(connected, TlsSocket):
                    connected.handshake()
                if key:
                    _check_caller(connected, key)
                header = _first_header(connected)
                identity = Identity(header.job, header.trainer, header.attempt)
                session = find(identity)
                receiving = Conversation(
                    Side.TRAINER, identity, session.block_bytes, remote=True, row_bytes=session.row_bytes
                )
                receiving.advance(header)
                payload, descriptors = received.enter_context(_payload_of(connected, header))
            session.resume(Caller(connected, identity, receiving, read_hello(payload), descriptors))
    # A caller without the key, or without TLS, raises an OSError instead, and is told nothing.
    except FleetError as error:
        _send(connected, identity, Kind.ERROR, pack_error(error))
        drain(connected, _DRAIN_SECONDS)
        if session is not None:
            session.refused()
        raise


class DataPorts:
    """The TCP port of a server, and a Unix socket for processes on the same host.

    Parameters
    ----------
    address : str
        The address to bind for TCP; see `bind_address`.
    settings : Settings
    find : callable
        Returns the session of a trainer; raises an error if the trainer has not joined.
    key : bytes
        The key of the job; empty if it has none.
    receive_bytes : int, optional
        The size of the kernel's receive buffers, unless the settings specify a size.
    certificates : Certificates, optional
        The certificates for TLS over TCP.

    Attributes
    ----------
    port : int
        The TCP port; 0 before `start`.
    name : str
        The name of the Unix socket; empty if there is none.
    """

    def __init__(
        self,
        address: str,
        settings: Settings,
        find: Callable[[Identity], Resumable],
        key: bytes = b"",
        *,
        receive_bytes: int | None = None,
        certificates: Certificates | None = None,
    ) -> None:
        self.port = 0
        self.name = ""
        self._address = address
        self._settings = settings
        self._find = find
        self._key = key
        self._half_open = HalfOpen()
        self._receive_bytes = receive_bytes
        self._certificates = certificates
        self._listeners: list[socket.socket] = []
        self._closing = False

    def start(self) -> None:
        """Bind the ports and start to accept connections.

        Raises
        ------
        OSError
            The address cannot be bound.
        """
        listener = listen(self._address)
        self.port = listener.getsockname()[1]
        self._listeners.append(listener)
        if self._settings.transport != "tcp":
            try:
                here, self.name = listen_here()
                self._listeners.append(here)
            except OSError as error:
                _log.debug("processes of this host send data over TCP too, without a Unix socket: %s", error)
        for each in self._listeners:
            threading.Thread(target=self._accept, args=(each,), name="fleet-accept", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections. May be called repeatedly."""
        self._closing = True
        for listener in self._listeners:
            # On Linux, closing alone does not wake the thread that waits in accept().
            hang_up(listener)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connected, address = listener.accept()
            except OSError as error:
                if self._closing:
                    return
                _log.warning("cannot accept a data connection: %s; trying again", error)
                time.sleep(_PAUSE_SECONDS)
                continue
            whence = address[0] if connected.family != socket.AF_UNIX else "this host"
            try:
                threading.Thread(
                    target=self._let_in, args=(connected, whence), name="fleet-greet", daemon=True
                ).start()
            except RuntimeError as error:  # no thread can be started at present; the peer may retry
                _log.warning("cannot take a data connection from %s: %s", whence, error)
                connected.close()

    def _let_in(self, connected: socket.socket, whence: str) -> None:
        try:
            if connected.family == socket.AF_UNIX:
                own(connected)
                check_user(connected)
            else:
                tune(connected, self._settings.socket_buffer_bytes)
                if self._receive_bytes and self._settings.socket_buffer_bytes is None:
                    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, self._receive_bytes)
                if self._certificates is not None:
                    connected = TlsSocket(connected, self._certificates)
            accept(connected, self._find, self._half_open, self._key)
        except PermissionError as error:  # the peer detects the same, and uses TCP instead
            _log.debug("no memory is shared: %s", error)
            connected.close()
        except (FleetError, OSError) as error:
            if not self._closing:
                _log.warning("refused a data connection from %s: %s", whence, error)
            connected.close()


def send_with(connection: socket.socket, payload: bytes, descriptors: Sequence[int]) -> None:
    """Send one or more bytes together with copies of file descriptors.

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
    """Receive bytes until `destination` is full; return the file descriptor that came with them, if any.

    The caller must close the descriptors.

    Raises
    ------
    ConnectionEndedError
        The peer closed the connection earlier.
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


def _prove_to_server(connected: socket.socket, key: bytes) -> None:
    """Prove to the server that this trainer has the key, and check the server's proof in turn."""
    challenge, answer = _receive(connected, CHALLENGE_BYTES), secrets.token_bytes(CHALLENGE_BYTES)
    send_all(connected, [answer, greeting_mac(key, Side.TRAINER, challenge, answer)])
    expected = greeting_mac(key, Side.SERVER, challenge, answer)
    if not hmac.compare_digest(_receive(connected, MAC_BYTES), expected):
        raise ConnectionError("the server there does not have this job's key (FLEET_JOB_KEY)")


def _check_caller(connected: socket.socket, key: bytes) -> None:
    """Check the caller's proof of the key, then prove to the caller that this server has the key, too."""
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    send_all(connected, [challenge])
    answer, mac = _receive(connected, CHALLENGE_BYTES), _receive(connected, MAC_BYTES)
    if not hmac.compare_digest(mac, greeting_mac(key, Side.TRAINER, challenge, answer)):
        raise ConnectionError("it does not have this job's key (FLEET_JOB_KEY)")
    send_all(connected, [greeting_mac(key, Side.SERVER, challenge, answer)])


def _receive(connected: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    receive_exactly(connected, memoryview(buffer))
    return bytes(buffer)


def _first_header(connected: socket.socket) -> Header:
    """Receive the first header; reject a peer with another protocol after the first bytes."""
    buffer = memoryview(bytearray(HEADER_BYTES))
    # A peer with another protocol may send fewer bytes than a header, and then wait for an answer.
    receive_exactly(connected, buffer[:4])
    read_header(buffer[:4])
    receive_exactly(connected, buffer[4:])
    header = read_header(buffer)
    if header is None:
        raise RemoteProtocolError(f"a greeting of {len(buffer)} bytes, expected {HEADER_BYTES}")
    return header


@contextlib.contextmanager
def _payload_of(connected: socket.socket, header: Header) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Yield a frame's payload and file descriptors; close the descriptors at the end of the block."""
    payload = memoryview(bytearray(header.payload_bytes))
    descriptors = receive_with(connected, payload)
    try:
        yield bytes(payload), descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _send(
    connected: socket.socket, identity: Identity, kind: Kind, payload: bytes, descriptors: Sequence[int] = ()
) -> Header:
    header = Header(kind, identity.job, identity.attempt, identity.trainer, payload_bytes=len(payload))
    # Descriptors go with the payload: the receiver reads a header by a plain recv(), in which the kernel
    # would drop them.
    send_all(connected, [pack_header(header)])
    send_with(connected, payload, descriptors)
    return header
