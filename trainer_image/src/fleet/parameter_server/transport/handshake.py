"""The handshake: what both ends of a new data connection say before anything else.

::

    trainer                              server
                                     ←   challenge
    answer, its MAC                  →
                                     ←   MAC; or it closes
    HELLO, descriptor of its memory  →
                                     ←   HELLO, descriptor of its memory; or ERROR, and it closes

Before all of it, over TCP, both ends agree on TLS where the job has certificates (`transport.tls`). The
first three lines only where the job has a key (`fleet.wire.proof`): each end proves that it has it, over a
random number of either, and the server tells nothing to one that does not. The trainer calls `greet`. The
server calls `accept`, which finds the session by the identity in the header of the trainer's HELLO and lets
it resume over this connection. No other module sends or receives a frame of the handshake.
"""

import contextlib
import hmac
import os
import secrets
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.transport.connection import Directions, receive_exactly, receive_header, send_all
from fleet.parameter_server.transport.local_sockets import receive_with, send_with
from fleet.parameter_server.transport.sockets import ConnectionEndedError, drain, is_given_up
from fleet.parameter_server.transport.tls import TlsSocket
from fleet.process.connections import HalfOpen
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
    "NotGreetedError",
    "Resumable",
    "StrangerError",
    "accept",
    "greet",
]

GREETING_SECONDS: Final = 10.0
"""How long either end waits for the other one's part of the handshake, unless told otherwise."""
_DRAIN_SECONDS: Final = 1.0


class StrangerError(ConnectionError):
    """Whoever connected has not the key of the job. Nobody has been told."""


class NotGreetedError(TimeoutError):
    """The server took a connection and did not answer in time: it still takes a frame of the one before."""


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
    """Make a trainer's part of the handshake.

    Parameters
    ----------
    connected : socket.socket
        Blocks again when this returns.
    identity : Identity
        Who speaks.
    ours : Hello
    block_bytes : mapping of int to int
        How many bytes of each block travel.
    descriptors : sequence of int
        Of the trainer's memory, where it offers to share it; empty otherwise.
    share : callable
        Gets the server's greeting and the descriptors that came with it, which are closed afterwards;
        returns whether memory is shared.
    timeout_seconds : float
        For each of the server's answers.
    key : bytes
        The job's; empty where there is none.
    row_bytes : mapping of int to int
        How many bytes a row of each table has.

    Returns
    -------
    tuple of Directions and Hello
        With what the server has said.

    Raises
    ------
    NotGreetedError
        The server did not answer in time.
    FleetError
        It refuses; or it breaks the protocol.
    OSError
        The connection broke.
    """
    directions = _begin(identity, block_bytes, row_bytes)
    connected.settimeout(timeout_seconds)
    try:
        _secure(connected, key)
        directions.sending.advance(_send(connected, identity, Kind.HELLO, pack_hello(ours), descriptors))
        theirs = _hear_server(connected, directions, share)
    except TimeoutError as error:
        raise NotGreetedError(f"it did not greet within {timeout_seconds:g} s") from error
    connected.settimeout(None)
    return directions, theirs


def _begin(identity: Identity, block_bytes: Mapping[int, int], row_bytes: Mapping[int, int]) -> Directions:
    """Return both directions of a trainer's new connection."""
    sending = Conversation(Side.TRAINER, identity, block_bytes, remote=False, row_bytes=row_bytes)
    receiving = Conversation(Side.SERVER, identity, block_bytes, remote=True, row_bytes=row_bytes)
    return Directions(sending, receiving)


class Resumable(Protocol):
    """A server's session with one trainer, as the handshake sees it."""

    @property
    def block_bytes(self) -> Mapping[int, int]:
        """How many bytes of each block travel."""

    @property
    def row_bytes(self) -> Mapping[int, int]:
        """How many bytes a row of each table has."""

    def resume(self, caller: "Caller") -> None:
        """Go on over a new connection: answer the caller, or raise why not."""

    def refused(self) -> None:
        """Take note that a caller has been told an error."""


class Caller:
    """A trainer that has greeted and waits for the server's answer.

    Parameters
    ----------
    connected : socket.socket
        With a time-out, until it is answered.
    identity : Identity
    receiving : Conversation
        What comes from the trainer.
    hello : Hello
        What the trainer has said.
    descriptors : sequence of int
        Of its memory, if it offers to share it; valid as long as `Resumable.resume` runs.
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
        """Check that the trainer still waits: it may have waited long for a frame to be taken.

        Raises
        ------
        ConnectionEndedError
            It has given up.
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
        """Send the server's greeting, with the descriptor of its memory where that is shared.

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
    connected: socket.socket,
    find: Callable[[Identity], Resumable],
    half_open: HalfOpen | None = None,
    key: bytes = b"",
) -> None:
    """Make a server's part of the handshake, and let a session resume over the connection.

    Parameters
    ----------
    connected : socket.socket
        Gets a time-out for the handshake, and blocks again afterwards.
    find : callable
        Returns the session of a trainer; raises for one that has not joined.
    half_open : HalfOpen, optional
        Bounds what the caller may take until it has greeted.
    key : bytes
        The job's; empty where there is none.

    Raises
    ------
    FleetError
        It is not who may speak here. The peer has been told.
    StrangerError
        It has not the key.
    OSError
        The connection ended, or nothing came in time.
    """
    connected.settimeout(GREETING_SECONDS)
    identity, session = Identity(0, 0, 0), None
    try:
        with contextlib.ExitStack() as received:
            with (half_open or HalfOpen()).bounded(connected):
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
    except FleetError as error:
        _send(connected, identity, Kind.ERROR, pack_error(error))
        drain(connected, _DRAIN_SECONDS)
        if session is not None:
            session.refused()
        raise


def _hear_server(
    connected: socket.socket, directions: Directions, share: Callable[[Hello, Sequence[int]], bool]
) -> Hello:
    """Receive the server's greeting, or why it refuses, and settle whether memory is shared."""
    answer = receive_header(connected, memoryview(bytearray(HEADER_BYTES)), directions.receiving)
    with _payload_of(connected, answer) as (payload, descriptors):
        if answer.kind is Kind.ERROR:
            raise read_error(payload)
        theirs = read_hello(payload)
        directions.sending.shares = directions.receiving.shares = share(theirs, descriptors)
    return theirs


def _secure(connected: socket.socket, key: bytes) -> None:
    """Encrypt a trainer's connection, and have both ends prove that they have the key, where there is one."""
    if isinstance(connected, TlsSocket):
        connected.handshake()
    if key:
        _prove_to_server(connected, key)


def _prove_to_server(connected: socket.socket, key: bytes) -> None:
    """Prove that this trainer has the key, and have the server prove it before it is told anything."""
    challenge, answer = _receive(connected, CHALLENGE_BYTES), secrets.token_bytes(CHALLENGE_BYTES)
    send_all(connected, [answer, greeting_mac(key, Side.TRAINER, challenge, answer)])
    expected = greeting_mac(key, Side.SERVER, challenge, answer)
    if not hmac.compare_digest(_receive(connected, MAC_BYTES), expected):
        raise StrangerError("what listens there has not the key of this job (FLEET_JOB_KEY)")


def _check_caller(connected: socket.socket, key: bytes) -> None:
    """Have a caller prove that it has the key, and prove it to the caller."""
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    send_all(connected, [challenge])
    answer, mac = _receive(connected, CHALLENGE_BYTES), _receive(connected, MAC_BYTES)
    if not hmac.compare_digest(mac, greeting_mac(key, Side.TRAINER, challenge, answer)):
        raise StrangerError("it has not the key of this job (FLEET_JOB_KEY)")
    send_all(connected, [greeting_mac(key, Side.SERVER, challenge, answer)])


def _receive(connected: socket.socket, count: int) -> bytes:
    buffer = bytearray(count)
    receive_exactly(connected, memoryview(buffer))
    return bytes(buffer)


def _first_header(connected: socket.socket) -> Header:
    """Receive a header; whoever speaks another protocol is found out by its first bytes."""
    buffer = memoryview(bytearray(HEADER_BYTES))
    receive_exactly(connected, buffer[:4])
    read_header(buffer[:4])
    receive_exactly(connected, buffer[4:])
    header = read_header(buffer)
    if header is None:
        raise RemoteProtocolError(f"a greeting of {len(buffer)} bytes, expected {HEADER_BYTES}")
    return header


@contextlib.contextmanager
def _payload_of(connected: socket.socket, header: Header) -> Iterator[tuple[bytes, Sequence[int]]]:
    """Receive what follows a header, and the descriptors that come with it, which are closed at the end."""
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
    send_all(connected, [pack_header(header)])
    send_with(connected, payload, descriptors)
    return header
