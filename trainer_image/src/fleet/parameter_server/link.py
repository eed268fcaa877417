"""A server's end of one trainer's data connection."""

import logging
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.connection import Connection
from fleet.parameter_server.modes import Answer, ServerMode
from fleet.parameter_server.sockets import drain, receive_exactly, send_all
from fleet.wire import (
    HEADER_BYTES,
    Conversation,
    Header,
    Hello,
    Identity,
    Kind,
    Side,
    pack_header,
    read_header,
)
from fleet.wire.messages import pack_error, pack_hello, read_blocks, read_error, read_hello, read_hyper

__all__ = ["Link", "LinkOwner", "greet"]

GREETING_SECONDS: Final = 10.0
_DRAIN_SECONDS: Final = 1.0
_log = logging.getLogger(__name__)


class LinkOwner(Protocol):
    """The server, as its links see it."""

    def answer(self, answers: Sequence[Answer]) -> None:
        """Send values to the trainers that they are meant for."""

    def completed(self, link: "Link") -> None:
        """Take note that a trainer has finished."""

    def ended(self, link: "Link", error: FleetError | None) -> None:
        """Take note that a link receives nothing more."""


class Link:
    """Takes one trainer's frames to the sync mode, and sends it what the server answers.

    Parameters
    ----------
    identity : Identity
        Which start of which trainer.
    mode : ServerMode
    owner : LinkOwner
    connected : socket.socket
    sending, receiving : Conversation
        As `greet` left them.
    """

    def __init__(
        self,
        identity: Identity,
        mode: ServerMode,
        owner: LinkOwner,
        connected: socket.socket,
        sending: Conversation,
        receiving: Conversation,
    ) -> None:
        self.identity = identity
        self._mode = mode
        self._owner = owner
        self._connection = Connection(connected, f"trainer {identity.trainer}", sending, receiving, self)

    def start(self) -> None:
        """Begin to receive, unless somebody has finished this link already."""
        self._connection.start()

    def send_value(self, answer: Answer) -> None:
        """Enqueue a block's value, or that it was not stepped."""
        payload = self._mode.value(self.identity.trainer, answer.block) if answer.changed else b""
        kind = Kind.PARAM if answer.changed else Kind.UNCHANGED
        self._send(kind, payload, step=answer.step, block=answer.block)

    def complete(self) -> None:
        """Enqueue the answer to COMPLETE."""
        self._send(Kind.COMPLETE)

    def fail(self, error: FleetError, timeout_seconds: float) -> None:
        """Tell the trainer of an error, and close."""
        self._send(Kind.ERROR, pack_error(error))
        self.finish(timeout_seconds)

    def finish(self, timeout_seconds: float) -> None:
        """Send what is enqueued, and close."""
        self._connection.finish(timeout_seconds)

    def destination(self, header: Header) -> memoryview | None:
        """Say where a gradient belongs."""
        if header.kind is Kind.GRAD:
            return self._mode.destination(self.identity.trainer, header.block)
        return None

    def received(self, header: Header, payload: memoryview) -> None:
        """Act on a frame."""
        trainer = self.identity.trainer
        match header.kind:
            case Kind.GRAD:
                self._owner.answer(self._mode.gradient(trainer, header.block, header.step))
            case Kind.HYPER:
                self._mode.begin(trainer, header.step, read_hyper(bytes(payload)))
            case Kind.STEP_END:
                self._owner.answer(self._mode.end(trainer, header.step, read_blocks(bytes(payload))))
            case Kind.PULL:
                self._owner.answer(self._mode.pull(trainer))
            case Kind.COMPLETE:
                self._owner.answer(self._mode.complete(trainer))
                self._owner.completed(self)
            case Kind.ERROR:
                raise read_error(bytes(payload))

    def ended(self, error: FleetError | None) -> None:
        """Pass the end on."""
        self._owner.ended(self, error)

    def _send(self, kind: Kind, payload: bytes | memoryview = b"", **fields: int) -> None:
        identity = self.identity
        header = Header(
            kind, identity.job, identity.attempt, identity.trainer, payload_bytes=len(payload), **fields
        )
        self._connection.send(header, payload)


def greet(
    connected: socket.socket,
    incarnation: str,
    block_bytes: Mapping[int, int],
    check: Callable[[Identity], None],
) -> tuple[Identity, Conversation, Conversation]:
    """Exchange HELLO with whoever connected to the data port.

    Parameters
    ----------
    connected : socket.socket
        Gets a time-out for the greeting, and blocks again afterwards.
    incarnation : str
        This server's life.
    block_bytes : mapping of int to int
        The blocks of this server.
    check : callable
        Raises for an identity that has not joined.

    Returns
    -------
    identity, sending, receiving
        Who it is, and the two directions after the greeting.

    Raises
    ------
    FleetError
        It is not who may speak here. The peer has been told.
    OSError
        The connection ended, or nothing came in time.
    """
    connected.settimeout(GREETING_SECONDS)
    buffer = memoryview(bytearray(HEADER_BYTES))
    identity = Identity(0, 0, 0)
    try:
        receive_exactly(connected, buffer[:4])
        read_header(buffer[:4])
        receive_exactly(connected, buffer[4:])
        header = read_header(buffer)
        if header is None:
            raise RemoteProtocolError(f"a greeting of {len(buffer)} bytes, expected {HEADER_BYTES}")
        identity = Identity(header.job, header.trainer, header.attempt)
        check(identity)
        receiving = Conversation(Side.TRAINER, identity, block_bytes, remote=True)
        receiving.advance(header)
        payload = memoryview(bytearray(header.payload_bytes))
        receive_exactly(connected, payload)
        hello = read_hello(bytes(payload))
        if hello != (expected := Hello(incarnation, len(block_bytes))):
            raise RemoteProtocolError(f"the trainer greets {hello}, expected {expected}; it must join again")
    except FleetError as error:
        _send_now(connected, identity, Kind.ERROR, pack_error(error))
        drain(connected, _DRAIN_SECONDS)
        raise
    sending = Conversation(Side.SERVER, identity, block_bytes, remote=False)
    sending.advance(_send_now(connected, identity, Kind.HELLO, pack_hello(expected)))
    connected.settimeout(None)
    return identity, sending, receiving


def _send_now(connected: socket.socket, identity: Identity, kind: Kind, payload: bytes) -> Header:
    header = Header(kind, identity.job, identity.attempt, identity.trainer, payload_bytes=len(payload))
    send_all(connected, [pack_header(header), payload])
    return header
