"""A resumable stream: the frames of one session in both directions, whichever connection carries them.

A connection may break while both processes live. So every frame stays in the unacknowledged queue until the
other end is known to have it, which each frame that comes says of those before. A later connection begins
with a handshake in which both ends say how many frames of the session they have taken; what comes after these
is sent again, and nothing else. A frame is therefore taken exactly once, whatever the training mode makes of
it, and its memory must not change before the other end has it.
"""

import socket
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Final

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.transport.connection import (
    BrokenConnectionError,
    BufferOf,
    Connection,
    Deliver,
    Directions,
    End,
    Frame,
    OutgoingFrame,
)
from fleet.parameter_server.transport.lazy import LazyBytes
from fleet.parameter_server.transport.sockets import BytesMoved
from fleet.wire import START, TRANSITIONS, Header, Identity, Kind, Side

__all__ = ["ResumableStream", "StreamEndedError"]

_LAST_WORDS: Final[Mapping[Side, frozenset[Kind]]] = {
    side: frozenset(
        kind for kinds in table.values() for kind, following in kinds.items() if not table[following]
    )
    for side, table in TRANSITIONS.items()
}
"""What each side sends only once, as nothing may follow."""


class StreamEndedError(FleetError):
    """Nobody needs another connection: this end has closed the session."""


class UnacknowledgedQueue:
    """The frames of one direction that the other end is not known to have.

    Parameters
    ----------
    side : Side
        Who sends them.
    """

    def __init__(self, side: Side) -> None:
        self.acknowledged = 0
        """How many frames the other end has."""
        self.state = START
        """Where the direction stands after these."""
        self._side = side
        self._frames: deque[OutgoingFrame] = deque()
        self._closed = False

    @property
    def sent(self) -> int:
        """How many frames have been sent so far, whether they have arrived or not."""
        return self.acknowledged + len(self._frames)

    @property
    def frames(self) -> Iterable[OutgoingFrame]:
        """The frames that are kept, in order."""
        return self._frames

    def append(self, frame: OutgoingFrame) -> bool:
        """Keep a frame; return False, without keeping it, where the last word has been sent before."""
        if self._closed:
            return False
        self._closed = frame.header.kind in _LAST_WORDS[self._side]
        self._frames.append(frame)
        return True

    def acknowledge(self, count: int) -> None:
        """Drop all but what follows the first `count` frames."""
        while self.acknowledged < count:
            header = self._frames.popleft().header
            self.state = self.state.after(self._side, header.kind, header.step)
            self.acknowledged += 1


class ResumableStream:
    """One end of a session's stream.

    Parameters
    ----------
    peer : str
        How messages call the other end.
    side : Side
        Who sends here.
    identity : Identity
        What every frame repeats.
    buffer_of : callable
        As `BufferOf`.
    deliver : callable
        As `Deliver`, with an `End` for each connection.
    """

    def __init__(
        self, peer: str, side: Side, identity: Identity, buffer_of: BufferOf, deliver: Deliver
    ) -> None:
        self.taken = 0
        """How many frames have come so far."""
        self._peer = peer
        self._side = side
        self._identity = identity
        self._buffer_of = buffer_of
        self._deliver = deliver
        self._received = START
        """Where the other end's direction stands after the frames taken."""
        self._unacknowledged = UnacknowledgedQueue(side)
        self._handed = 0
        """How many frames connections that broke had handed to the kernel."""
        self._changed = threading.Condition()
        self._connection: tuple[Connection, int] | None = None
        """With the number of the frame that it began with."""
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """Whether this end has closed the session."""
        return self._ended

    def send(
        self,
        kind: Kind,
        payload: bytes | memoryview | LazyBytes = b"",
        *,
        shared: bool = False,
        **fields: int,
    ) -> int:
        """Send a frame; never waits. The payload must not change until the other end has it, if not lazy.

        After the last word of a session, an error for instance, nothing is enqueued any more: other threads
        may not know of it yet.

        Parameters
        ----------
        kind : Kind
        payload : bytes, memoryview or LazyBytes
        shared : bool
            Whether the payload lies in memory that both ends share instead.
        **fields : int
            What else the header says: ``step``, ``block``.

        Returns
        -------
        int
            How many frames have been sent so far, whether they have arrived or not.
        """
        of = self._identity
        header = Header(
            kind,
            of.job,
            of.attempt,
            of.trainer,
            taken=self.taken,
            payload_bytes=len(payload),
            shared=shared,
            **fields,
        )
        frame = OutgoingFrame(header, payload)
        with self._changed:
            if self._unacknowledged.append(frame) and self._connection is not None:
                self._connection[0].send(frame)
            return self._unacknowledged.sent

    def wait_until_taken(self, count: int, timeout_seconds: float) -> bool:
        """Wait a while for the other end to have the first `count` frames; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._unacknowledged.acknowledged >= count, timeout_seconds)

    def attach(self, connected: socket.socket, directions: Directions, acknowledged: int) -> int:
        """Go on over a new connection whose handshake is done; the one before has been fenced.

        Parameters
        ----------
        connected : socket.socket
            Blocking; closed by this object from now on.
        directions : Directions
        acknowledged : int
            How many frames the other end has, as its greeting says.

        Returns
        -------
        int
            How many frames are sent again.

        Raises
        ------
        RemoteProtocolError
            The other end claims to have other frames than can be.
        StreamEndedError
            This end was closed meanwhile.
        """
        with self._changed:
            if self._ended:
                raise StreamEndedError(f"the session with {self._peer} has ended")
            queue = self._unacknowledged
            if not queue.acknowledged <= acknowledged <= queue.sent:
                raise RemoteProtocolError(
                    f"{self._peer} greets with {acknowledged} frames taken, expected {queue.acknowledged} to "
                    f"{queue.sent}; it must join again"
                )
            self._acknowledge(acknowledged)
            directions.sending.resume(queue.state)
            directions.receiving.resume(self._received)
            connection = Connection(connected, self._peer, directions, self._buffer_of, self._pass_on)
            for frame in queue.frames:
                connection.send(frame)
            self._connection = connection, acknowledged
            again = max(0, self._handed - acknowledged)
        connection.start()
        return again

    def fence(self) -> None:
        """End the connection that there is, and wait until nothing of it is being taken any more."""
        if (current := self._connection) is not None:
            current[0].close()

    def bytes_moved(self) -> BytesMoved | None:
        """Return what the connection that there is has moved; None where there is none, or nobody tells."""
        current = self._connection
        return current[0].bytes_moved() if current is not None else None

    def hang_up(self) -> None:
        """End the connection that there is as if it had broken."""
        if (current := self._connection) is not None:
            current[0].hang_up()

    def finish(self, timeout_seconds: float) -> bool:
        """Send what is enqueued, let the other end read it, and end the session.

        Returns
        -------
        bool
            Whether there is a connection; without one nothing of it has been sent.
        """
        connection = self._end()
        if connection is not None:
            connection.finish(timeout_seconds)
        return connection is not None

    def close(self) -> None:
        """End the session now."""
        connection = self._end()
        if connection is not None:
            connection.close()

    def _pass_on(self, event: Frame | End) -> None:
        """Deliver what the connection brings; count a frame before anything that answers it is sent."""
        if isinstance(event, End):
            self._pass_on_end(event)
            return
        header = event.header
        self.taken += 1
        other = Side.SERVER if self._side is Side.TRAINER else Side.TRAINER
        self._received = self._received.after(other, header.kind, header.step)
        if header.taken > self._unacknowledged.acknowledged:
            with self._changed:
                self._acknowledge(header.taken)
        self._deliver(event)

    def _pass_on_end(self, end: End) -> None:
        """Deliver the end, and then let a broken connection go.

        In this order: whoever opens the next connection waits in `fence` until this one's end is told.
        """
        current = self._connection if isinstance(end.error, BrokenConnectionError) else None
        if current is not None:
            connection, began_with = current
            connection.close()
            with self._changed:
                self._handed = max(self._handed, began_with + connection.frames_sent)
        self._deliver(end)
        with self._changed:
            if current is not None and self._connection is current:
                self._connection = None

    def _end(self) -> Connection | None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._connection[0] if self._connection is not None else None

    def _acknowledge(self, count: int) -> None:
        """Forget the frames that the other end has; with the lock held."""
        queue = self._unacknowledged
        if count > queue.sent:
            raise RemoteProtocolError(f"{self._peer} has taken {count} frames, and was sent {queue.sent}")
        queue.acknowledge(count)
        self._changed.notify_all()
