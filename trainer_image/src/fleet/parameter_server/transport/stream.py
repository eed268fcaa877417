"""A resumable stream: all frames of a session, carried by one connection after another.

A connection may break while both processes are alive. So a frame stays in the unacknowledged queue until the
other end is known to have it: every header has the number of frames that its sender has received. A later
connection begins with a handshake in which both ends exchange these numbers, and only later frames are
resent. Each frame is therefore received exactly once, and its memory must not change until it is received.
"""

import logging
import socket
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.parameter_server.transport.connection import (
    SMALL_BYTES,
    BrokenConnectionError,
    BufferOf,
    Connection,
    Deliver,
    Directions,
    End,
    Frame,
    OutgoingFrame,
    Work,
)
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.parameter_server.transport.sockets import BytesMoved
from fleet.parameter_server.transport.tls import RECORD_BYTES
from fleet.wire import HEADER_BYTES, NO_BLOCK, TRANSITIONS, Conversation, Header, Identity, Kind, Side, State

__all__ = ["Arrivals", "ResumableStream", "SilenceWatchdog", "StreamEndedError"]

# The time limit is five heartbeats, so the probe has three of them for its reply.
_PROBE_AFTER: Final = 2 / 5
"""The fraction of the time limit on silence after which the peer is probed."""
_PROBE_BYTES: Final = HEADER_BYTES + RECORD_BYTES
"""The largest size of a probe, encrypted or not; two frames together are always longer."""
_log = logging.getLogger(__name__)

_FINAL: Final[Mapping[Side, frozenset[Kind]]] = {
    side: frozenset(
        kind for kinds in table.values() for kind, following in kinds.items() if not table[following]
    )
    for side, table in TRANSITIONS.items()
}
"""For each side, the kinds of frames after which it sends nothing more."""


class StreamEndedError(FleetError):
    """The session has been closed at this end and needs no further connection."""


class ResumableStream:
    """One end of the resumable stream of a session.

    Parameters
    ----------
    peer : str
        The name of the other end, for messages.
    side : Side
        The side of this end.
    identity : Identity
        The identity that every frame carries.
    buffer_of : callable
        See `BufferOf`.
    deliver : callable
        See `Deliver`; an `End` is delivered for each connection.
    loop : EventLoop
        The loop that serves the connections.

    Attributes
    ----------
    peer : str
    taken : int
        The number of frames that have arrived.
    """

    def __init__(
        self,
        peer: str,
        side: Side,
        identity: Identity,
        buffer_of: BufferOf,
        deliver: Deliver,
        loop: EventLoop,
    ) -> None:
        self.taken = 0
        self.peer = peer
        self._side = side
        self._identity = identity
        self._buffer_of = buffer_of
        self._deliver = deliver
        self._loop = loop
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        """Notified when the other end acknowledges frames, and when this end closes the session."""
        self._unacknowledged: deque[OutgoingFrame] = deque()
        """Sent frames that the other end is not known to have received."""
        self._acknowledged = 0
        """The number of frames that the other end is known to have received."""
        self._held: list[OutgoingFrame] = []
        """Frames that are held back, to be sent together with a later frame."""
        self._held_bytes = 0
        self._handed = 0
        """The number of frames that broken connections had passed to the kernel."""
        self._sending = self._received = (State.OPEN, 0)
        """The state and step of each direction, after the acknowledged and after the received frames."""
        self._receiving: Conversation | None = None
        """The incoming direction of the latest connection."""
        self._connection: tuple[Connection, int] | None = None
        """The current connection, and the number of the frame with which it began."""
        self._final_sent = False
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """True if this end has closed the session."""
        return self._ended

    def send(
        self,
        kind: Kind,
        payload: bytes | memoryview | LazyBytes = b"",
        *,
        step: int = 0,
        block: int = NO_BLOCK,
        shared: bool = False,
        more: bool = False,
    ) -> int:
        """Send a frame without blocking. Unless lazy, its payload must not change until the peer has it.

        A frame after the final frame of a session, such as an error, is dropped: other threads may not know
        yet that the session has ended.

        Parameters
        ----------
        kind : Kind
        payload : bytes, memoryview or LazyBytes
        step, block : int
            Fields of the header.
        shared : bool
            Whether the payload is in memory that both ends share, and does not follow the header.
        more : bool
            Whether another frame is certain to follow soon. Small frames are then sent together, in one
            kernel call.

        Returns
        -------
        int
            The number of frames sent so far, whether they have arrived or not.
        """
        job, trainer, attempt = self._identity
        # `taken` is read without the lock: an older number only makes the peer keep its frames for longer.
        header = Header(kind, job, attempt, trainer, step, block, self.taken, len(payload), shared)
        frame = OutgoingFrame(header, payload)
        with self._lock:
            if not self._final_sent:
                self._final_sent = kind in _FINAL[self._side]
                # The frame is kept even without a connection: `attach` sends all unacknowledged frames.
                self._unacknowledged.append(frame)
                self._held.append(frame)
                self._held_bytes += len(payload)
                if not more or self._held_bytes > SMALL_BYTES:
                    if self._connection is not None:
                        self._connection[0].send(*self._held)
                    self._held.clear()
                    self._held_bytes = 0
            return self._acknowledged + len(self._unacknowledged)

    def wait_until_taken(self, count: int, timeout_seconds: float) -> bool:
        """Wait until the peer has received the first `count` frames; return False after a timeout."""
        with self._changed:
            return self._changed.wait_for(lambda: self._acknowledged >= count, timeout_seconds)

    def attach(self, connected: socket.socket, directions: Directions, acknowledged: int) -> int:
        """Continue on a new connection after its handshake; the previous connection must have ended.

        Parameters
        ----------
        connected : socket.socket
            The socket; this object closes it from now on.
        directions : Directions
        acknowledged : int
            The number of frames that the other end has, according to its greeting.

        Returns
        -------
        int
            The number of resent frames.

        Raises
        ------
        RemoteProtocolError
            The other end claims an impossible number of frames.
        StreamEndedError
            This end has been closed meanwhile.
        """
        with self._lock:
            if self._ended:
                raise StreamEndedError(f"the session with {self.peer} has ended")
            sent = self._acknowledged + len(self._unacknowledged)
            if not self._acknowledged <= acknowledged <= sent:
                raise RemoteProtocolError(
                    f"{self.peer} greets with {acknowledged} frames taken, expected {self._acknowledged} to "
                    f"{sent}; it must join again"
                )
            self._acknowledge(acknowledged)
            # In this order: the conversation continues after the last acknowledged frame, and sending the
            # others again advances it.
            directions.sending.resume(*self._sending)
            directions.receiving.resume(*self._received)
            self._receiving = directions.receiving
            connection = Connection(connected, self.peer, directions, self._buffer_of, self._take, self._loop)
            connection.send(*self._unacknowledged)
            # Held frames are unacknowledged, too, so the connection already has them.
            self._held.clear()
            self._held_bytes = 0
            self._connection = connection, acknowledged
            again = max(0, self._handed - acknowledged)
        connection.start()
        return again

    def fence(self) -> None:
        """End the current connection, and wait until its last frame has been handled."""
        # Read once, here and below: the loop's thread may drop the reference at any time.
        if (current := self._connection) is not None:
            current[0].close()

    def resume(self) -> None:
        """Request a receive buffer again after `NotYet`. Any thread may call this."""
        if (current := self._connection) is not None:
            current[0].resume()

    def bytes_moved(self) -> BytesMoved | None:
        """Return the current connection's byte counts, or None if they are unknown."""
        current = self._connection
        return current[0].bytes_moved() if current is not None else None

    def hang_up(self) -> None:
        """Shut down the current connection as if it had broken."""
        if (current := self._connection) is not None:
            current[0].hang_up()

    def finish(self, timeout_seconds: float) -> bool:
        """Send all queued frames, let the peer read them, and end the session.

        Returns
        -------
        bool
            Whether there was a connection; without a connection no queued frame was sent.
        """
        connection = self._end()
        if connection is not None:
            connection.finish(timeout_seconds)
        return connection is not None

    def close(self) -> None:
        """End the session immediately."""
        connection = self._end()
        if connection is not None:
            connection.close()

    def _take(self, event: Frame | End) -> Work | None:
        """Deliver a frame or an end; count a frame as received first, so that an answer acknowledges it."""
        if isinstance(event, End):
            self._take_end(event)
            return None
        self.taken += 1
        if (receiving := self._receiving) is not None:
            self._received = receiving.state, receiving.step
        # Most frames acknowledge nothing new, and need not wait for the lock. Only this thread lets the
        # number grow while a connection is open.
        if event.header.taken > self._acknowledged:
            with self._lock:
                self._acknowledge(event.header.taken)
        return self._deliver(event)

    def _take_end(self, end: End) -> None:
        """Notify the handler that a connection has ended, then forget the connection.

        The order matters: `fence` keeps the next connection waiting until this connection's end is delivered.
        """
        current = self._connection if isinstance(end.error, BrokenConnectionError) else None
        if current is not None:
            connection, began_with = current
            connection.close()
            with self._lock:
                self._handed = max(self._handed, began_with + connection.frames_sent)
        self._deliver(end)
        with self._lock:
            if current is not None and self._connection is current:
                self._connection = None

    def _end(self) -> Connection | None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._connection[0] if self._connection is not None else None

    def _acknowledge(self, count: int) -> None:
        """Drop the frames that the peer has acknowledged. The caller holds the lock."""
        sent = self._acknowledged + len(self._unacknowledged)
        if count > sent:
            raise RemoteProtocolError(
                f"{self.peer} acknowledges {count} frames, expected at most {sent}, which is the number of "
                "frames sent to it"
            )
        # The state is computed again from the frames, because the connection's conversation is already ahead
        # of them.
        (state, step), transitions = self._sending, TRANSITIONS[self._side]
        while self._acknowledged < count:
            header = self._unacknowledged.popleft().header
            state = transitions[state][header.kind]
            step = header.step if header.kind is Kind.HYPER else step
            self._acknowledged += 1
        self._sending = state, step
        self._changed.notify_all()


class Arrivals:
    """Detects the arrival of data on a stream, which shows that the peer is alive.

    The work whose results a peer sends may starve the peer's heartbeat. Within a large frame, the system's
    count of received bytes shows progress, if the system has such a count.

    Parameters
    ----------
    stream : ResumableStream
    """

    def __init__(self, stream: ResumableStream) -> None:
        self._stream = stream
        self._frames = self._bytes = 0

    def look(self) -> bool:
        """Return whether anything has arrived since the last call."""
        moved = self._stream.bytes_moved()
        frames, received = self._stream.taken, moved.received if moved is not None else 0
        came = frames > self._frames or received > self._bytes  # fewer bytes: another connection, or none
        self._frames, self._bytes = frames, received
        return came


class SilenceWatchdog:
    """Ends a connection on which nothing, not even the reply to a probe, has arrived for too long.

    It works only if the system counts transferred bytes, which are the only sign of progress within a large
    frame.

    Parameters
    ----------
    stream : ResumableStream
    limit_seconds : float
        The longest allowed silence.
    """

    def __init__(self, stream: ResumableStream, limit_seconds: float) -> None:
        self._stream = stream
        self._arrivals = Arrivals(stream)
        self._limit_seconds = limit_seconds
        self._moved: BytesMoved | None = None
        self._moved_at = 0.0
        self._probed = False

    def look(self, now: float) -> bool:
        """Check the connection; return whether anything has arrived since the last check.

        Parameters
        ----------
        now : float
            The current time by a monotonic clock.
        """
        moved = self._stream.bytes_moved()
        if moved is None or self._moved is None or _is_alive(self._moved, moved):
            self._moved, self._moved_at, self._probed = moved, now, False
        elif not self._probed and now - self._moved_at >= self._limit_seconds * _PROBE_AFTER:
            self._probed = True
            self._stream.send(Kind.CONFIRM)
        elif self._probed and now - self._moved_at >= self._limit_seconds:
            _log.warning(
                "the data connection with %s has carried nothing for %.0f s, not even the "
                "reply to a probe; closing it",
                self._stream.peer,
                now - self._moved_at,
            )
            self._moved = None
            self._stream.hang_up()
        return self._arrivals.look()


def _is_alive(before: BytesMoved, now: BytesMoved) -> bool:
    """Return whether the peer has sent any data, or has acknowledged more than a probe."""
    return now.received != before.received or now.acknowledged - before.acknowledged > _PROBE_BYTES
