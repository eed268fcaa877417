"""A server's session with a trainer, over one or more successive data connections.

The session survives a broken connection: the trainer reconnects, and both ends resend the frames that the
other end has not received. Each handshake decides whether the two ends share memory. `Trainers` uses the
frames that a session receives, and sends the answers over it.
"""

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.receive_buffers import Turn
from fleet.parameter_server.server.scheduling import Pacing
from fleet.parameter_server.shard import Shard
from fleet.parameter_server.transport.block_transport import (
    BlockTransport,
    Codec,
    SharedMemoryTransport,
    StreamTransport,
)
from fleet.parameter_server.transport.connection import End, Frame, NotYet, Work
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.parameter_server.transport.handshake import Caller
from fleet.parameter_server.transport.shared_memory import SharedBlocks
from fleet.parameter_server.transport.sockets import ConnectionEndedError
from fleet.parameter_server.transport.stream import Arrivals, ResumableStream, StreamEndedError
from fleet.process import progress
from fleet.wire import NO_STEP, Header, Hello, HyperParameters, Identity, Kind, Side
from fleet.wire.messages import pack_error

__all__ = ["Deliver", "TrainerSession"]

_log = logging.getLogger(__name__)

Deliver = Callable[["TrainerSession", Frame | End], Work | None]
"""A callback for each frame of a session, and for the end of each of the session's connections.

See `transport.connection.Deliver`.
"""


@dataclass(slots=True)
class Ending:
    """The state of a session's end: its error, and what the trainer has confirmed."""

    failure: FleetError | None = None
    """The reason why the trainer must not reconnect, or None."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set once the trainer has confirmed the server's COMPLETE with its GOODBYE."""
    notified: threading.Event = field(default_factory=threading.Event)
    """Set when the failure has been sent to the trainer, or can no longer be sent."""


@dataclass(slots=True)
class _Resumption:
    """The state that is needed to resume a session on another connection."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    """Held during a handshake."""
    name: str | None = None
    """The session's random name, which the trainer's process chooses; None before the first handshake."""
    reaches: bool = False
    """Whether the current connection reaches the trainer; False once the trainer opens another connection."""


class TrainerSession:
    """A server's session with one attempt of a trainer; its `stream` carries the frames.

    Parameters
    ----------
    identity : Identity
        The trainer and its attempt.
    shard : Shard
        The values to send, and the receive buffers of gradients.
    turn : callable
        See `ReceiveBuffers.land`.
    expected : Hello
        The greeting expected from a trainer of this server.
    wire_dtype : str
        The dtype of tensors on the wire; see `Codec`.
    pacing : Pacing or None
        The pacing of the server, if it has one.
    loop : EventLoop
        The loop that serves the connections.
    deliver : callable
        Called by the loop with each frame, and once with the end of each connection.
    on_connected : callable
        Called when the session has a data connection, the first or a later one.
    """

    def __init__(
        self,
        identity: Identity,
        shard: Shard,
        turn: Callable[[int, int], Turn],
        expected: Hello,
        wire_dtype: str,
        pacing: Pacing | None,
        loop: EventLoop,
        *,
        deliver: Deliver,
        on_connected: Callable[["TrainerSession"], None],
    ) -> None:
        self.identity = identity
        self.ending = Ending()
        self.begun = False
        """Whether the trainer has begun a step."""
        self.asked = False
        """Whether the trainer has requested values; earlier answers were meant for its previous process."""
        self.hyper: tuple[bytes, HyperParameters] = b"", NO_STEP
        """The latest hyper-parameters, encoded and decoded; they are decoded only when they change."""
        self._shard = shard
        self._expected = expected
        self._pacing = pacing
        self._on_connected = on_connected
        self._resumption = _Resumption()
        self._codec = Codec(
            shard.plan.blocks,
            wire_dtype,
            # `stream` is made below; only a connection calls this.
            lambda block: shard.buffers.land(identity.trainer, block, turn, self.stream.resume),
        )
        self.converted = self._codec.converted.keys()
        """The blocks whose gradients are converted after they have arrived."""
        self.block_bytes = self._codec.block_bytes
        """The size of each block on the wire in bytes."""
        self.row_bytes = shard.tables.row_bytes
        """The size of one row of each table on the wire in bytes."""
        self.stream = ResumableStream(
            f"trainer {identity.trainer}",
            Side.SERVER,
            identity,
            self._codec.buffer_of if pacing is None else self._paced_buffer_of,
            partial(deliver, self),
            loop,
        )
        self.arrivals = Arrivals(self.stream)
        self._shared: SharedBlocks | None = None
        """The memory that the trainer shares with the server, or None."""
        self.transport: BlockTransport = StreamTransport(self.stream, self._codec)
        """The transport of blocks, which each handshake may change."""
        self.unread: deque[tuple[int, int]] = deque()
        """The frame number and size of each answer with rows that the trainer may not have read."""

    def resume(self, caller: Caller) -> None:
        """Resume the session on a new connection, after the last frame of the old one was processed.

        Parameters
        ----------
        caller : Caller
            The trainer, which waits for the server's greeting.

        Raises
        ------
        FleetError
            This trainer may not connect to this server, or may not reconnect.
        OSError
            The connection broke.
        """
        with self._resumption.lock:
            again = self._resumption.name is not None
            self._fence(caller)
            descriptors = self._share(caller)
            ours = replace(
                self._expected,
                session=caller.hello.session,
                taken=self.stream.taken,
                shared=bool(descriptors),
            )
            directions = caller.answer(ours, self.block_bytes, descriptors, self.row_bytes)
            # Before frames are received: a connection that breaks at once must be recorded first as open,
            # then as lost.
            self._on_connected(self)
            try:
                resent = self.stream.attach(caller.connected, directions, caller.hello.taken)
            except StreamEndedError:
                self._check(caller.hello)  # a failure tells the trainer more than the end of the stream
                raise
            self._resumption.reaches = True
        if again:
            progress.count("reconnections", 1)
            progress.count("frames_resent", resent)
            _log.warning(
                "the data connection with trainer %d is back; %d frames were sent again",
                self.identity.trainer,
                resent,
            )

    def refused(self) -> None:
        """Record that the trainer has received the error of a failed session."""
        if self.ending.failure is not None:
            self.ending.notified.set()

    def fail(self, error: FleetError, timeout_seconds: float) -> None:
        """Close the session with an error, which the trainer receives now or when it reconnects."""
        self.ending.failure = error
        self.stream.send(Kind.ERROR, pack_error(error))
        reaches = self._resumption.reaches
        if self.finish(timeout_seconds) and reaches:
            self.ending.notified.set()

    def finish(self, timeout_seconds: float) -> bool:
        """Send all queued frames, then close the session; return whether it had a connection."""
        return self.stream.finish(timeout_seconds)

    def abandon(self) -> None:
        """Close the session immediately without notifying the trainer."""
        self.finish(0.0)
        self.ending.notified.set()

    def _paced_buffer_of(self, header: Header) -> memoryview | NotYet | None:
        if header.kind is Kind.GRAD and not header.shared and self._pacing is not None:
            delay = self._pacing.begin(self.identity.trainer, header.step, self.stream.resume)
            if delay:
                return NotYet(delay)
        return self._codec.buffer_of(header)

    def _fence(self, caller: Caller) -> None:
        """Close the old connection, and wait until its last frame has been processed."""
        self._check(caller.hello)
        caller.check_waiting()  # a caller that has disconnected must not end the connection that replaced it
        self._resumption.reaches = False
        self._resumption.name = caller.hello.session
        self.stream.fence()
        self._check(caller.hello)  # again: the last frame of the old connection may have failed
        if self.stream.has_ended:
            raise ConnectionEndedError("this server has closed the session in the meantime")
        caller.check_waiting()

    def _check(self, hello: Hello) -> None:
        if self.ending.failure is not None:
            raise self.ending.failure
        expected = self._expected
        if (hello.incarnation, hello.num_blocks) != (expected.incarnation, expected.num_blocks):
            raise RemoteProtocolError(
                f"the trainer's greeting is {hello}, expected {expected}; the trainer must join again"
            )
        if self._resumption.name not in (None, hello.session):
            raise RemoteProtocolError(
                f"another process has connected as trainer {self.identity.trainer} with attempt "
                f"{self.identity.attempt}; give each trainer its own id (PADDLE_TRAINER_ID)"
            )

    def _share(self, caller: Caller) -> Sequence[int]:
        """Choose the transport of blocks; return the descriptor of the server's memory if memory is shared.

        Raises
        ------
        RemoteProtocolError
            An earlier connection of the session chose another transport.
        """
        trainer, values, hello = self.identity.trainer, self._shard.shared_values, caller.hello
        offered = hello.shared and (self._shared is not None or len(caller.descriptors) > 0)
        shares = values is not None and offered
        # Only once frames have been received: a trainer that could not map this server's memory opens a
        # second connection without sharing.
        if self.stream.taken and shares != (self._shared is not None):
            raise RemoteProtocolError(
                "the trainer shared memory on one connection of its session and not on another; the trainer "
                "must join again"
            )
        if not shares or self._shared is None:
            self._shared = self._map(caller.descriptors[0]) if shares else None
            self._shard.buffers.share(trainer, self._shared)
            self.transport = StreamTransport(self.stream, self._codec)
        if values is None or self._shared is None:
            return []
        if not isinstance(self.transport, SharedMemoryTransport):
            self.transport = SharedMemoryTransport(
                self.stream, self._codec, values, self._shared, copies=False
            )
        return [values.descriptor]

    def _map(self, descriptor: int) -> SharedBlocks | None:
        """Map the trainer's memory; return None on failure, in which case tensors use the socket."""
        try:
            return SharedBlocks.receive(descriptor, self._shard.block_bytes, writable=True)
        except OSError as error:
            _log.debug("trainer %d's memory cannot be mapped: %s", self.identity.trainer, error)
            return None
