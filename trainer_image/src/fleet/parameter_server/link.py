"""A server's end of one trainer's session, whichever data connection carries it."""

import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from fleet import progress
from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.line import Line
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

    def begins(self, trainer: int) -> None:
        """Let a trainer begin a step; FleetError refuses it."""

    def connected(self, link: "Link") -> None:
        """Take note that a link has a data connection."""

    def completed(self, link: "Link") -> None:
        """Take note that a trainer has finished."""

    def ended(self, link: "Link", error: FleetError | None) -> None:
        """Take note that a link receives nothing more."""


class Link:
    """Takes one trainer's frames to the training mode, and sends it what the server answers.

    Parameters
    ----------
    identity : Identity
        Which start of which trainer.
    mode : ServerMode
    owner : LinkOwner
    expected : Hello
        How a trainer that means this server greets.
    block_bytes : mapping of int to int
        The blocks of this server.
    """

    def __init__(
        self,
        identity: Identity,
        mode: ServerMode,
        owner: LinkOwner,
        expected: Hello,
        block_bytes: Mapping[int, int],
    ) -> None:
        self.identity = identity
        self.failure: FleetError | None = None
        """Why this trainer may not come back, where it may not."""
        self.left = threading.Event()
        """Set once the trainer knows that the server knows that it has finished."""
        self._mode = mode
        self._owner = owner
        self._expected = expected
        self._block_bytes = block_bytes
        self._session: str | None = None
        self._line = Line(f"trainer {identity.trainer}", Side.SERVER, identity, self)
        self._greeting = threading.Lock()

    def welcome(self, connected: socket.socket, receiving: Conversation, hello: Hello) -> None:
        """Go on over a new connection; what is still being taken from the one before is waited for.

        Parameters
        ----------
        connected : socket.socket
            Blocks, with a time-out.
        receiving : Conversation
            Greeted.
        hello : Hello
            What the trainer has sent.

        Raises
        ------
        FleetError
            This trainer may not speak here, or not any more.
        OSError
            The connection broke.
        """
        with self._greeting:
            self._check(hello)
            again = self._session is not None
            self._session = hello.session
            self._line.fence()
            sending = Conversation(Side.SERVER, self.identity, self._block_bytes, remote=False)
            ours = Hello(
                self._expected.incarnation, self._expected.num_blocks, hello.session, self._line.taken
            )
            sending.advance(_send_now(connected, self.identity, Kind.HELLO, pack_hello(ours)))
            connected.settimeout(None)
            self._owner.connected(self)
            resent = self._line.attach(connected, sending, receiving, hello.taken)
        if again:
            progress.count("reconnections", 1)
            progress.count("frames_resent", resent)
            _log.warning(
                "the data connection with trainer %d is back; %d frames were sent again",
                self.identity.trainer,
                resent,
            )

    def send_value(self, answer: Answer) -> None:
        """Enqueue a block's value, or that it was not stepped."""
        payload = self._mode.value(self.identity.trainer, answer.block) if answer.changed else b""
        kind = Kind.PARAM if answer.changed else Kind.UNCHANGED
        self._line.send(kind, payload, step=answer.step, block=answer.block)

    def complete(self) -> None:
        """Enqueue the answer to COMPLETE."""
        self._line.send(Kind.COMPLETE)

    def fail(self, error: FleetError, timeout_seconds: float) -> None:
        """Tell the trainer of an error, now or when it comes back, and close."""
        self.failure = error
        self._line.send(Kind.ERROR, pack_error(error))
        self.finish(timeout_seconds)

    def finish(self, timeout_seconds: float) -> None:
        """Send what is enqueued, and close."""
        self._line.finish(timeout_seconds)

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
                self._owner.begins(trainer)
                self._mode.begin(trainer, header.step, read_hyper(bytes(payload)))
            case Kind.STEP_END:
                self._owner.answer(self._mode.end(trainer, header.step, read_blocks(bytes(payload))))
            case Kind.PULL:
                self._owner.answer(self._mode.pull(trainer))
            case Kind.COMPLETE:
                self._owner.answer(self._mode.complete(trainer))
                self._owner.completed(self)
            case Kind.CONFIRM:
                self._line.send(Kind.CONFIRM)
            case Kind.GOODBYE:
                self.left.set()
            case Kind.ERROR:
                raise read_error(bytes(payload))

    def ended(self, error: FleetError | None) -> None:
        """Pass the end on."""
        self._owner.ended(self, error)

    def _check(self, hello: Hello) -> None:
        if self.failure is not None:
            raise self.failure
        expected = self._expected
        if (hello.incarnation, hello.num_blocks) != (expected.incarnation, expected.num_blocks):
            raise RemoteProtocolError(f"the trainer greets {hello}, expected {expected}; it must join again")
        if self._session not in (None, hello.session):
            raise RemoteProtocolError(
                f"another process is trainer {self.identity.trainer} with attempt {self.identity.attempt} by "
                "now; give each trainer an id of its own (PADDLE_TRAINER_ID)"
            )


def greet(connected: socket.socket, block_bytes: Mapping[int, int], find: Callable[[Identity], Link]) -> None:
    """Exchange HELLO with whoever connected to the data port, and let its link go on.

    Parameters
    ----------
    connected : socket.socket
        Gets a time-out for the greeting, and blocks again afterwards.
    block_bytes : mapping of int to int
        The blocks of this server.
    find : callable
        Returns the link of a trainer; raises for one that has not joined.

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
        link = find(identity)
        receiving = Conversation(Side.TRAINER, identity, block_bytes, remote=True)
        receiving.advance(header)
        payload = memoryview(bytearray(header.payload_bytes))
        receive_exactly(connected, payload)
        link.welcome(connected, receiving, read_hello(bytes(payload)))
    except FleetError as error:
        _send_now(connected, identity, Kind.ERROR, pack_error(error))
        drain(connected, _DRAIN_SECONDS)
        raise


def _send_now(connected: socket.socket, identity: Identity, kind: Kind, payload: bytes) -> Header:
    header = Header(kind, identity.job, identity.attempt, identity.trainer, payload_bytes=len(payload))
    send_all(connected, [pack_header(header), payload])
    return header
