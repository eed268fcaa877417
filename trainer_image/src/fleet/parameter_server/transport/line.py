"""A session's frames in both directions, whichever connection carries them.

A connection may break while both processes live. So every frame is kept until the other end is known to have
it, which each frame that comes says of those before. A later connection begins with a greeting in which both
ends say how many frames of the session they have taken; what comes after these is sent again, and nothing
else. A frame is therefore taken exactly once, whatever the training mode makes of it, and its memory must
not change before the other end has it.
"""

import socket
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

from fleet.errors import FleetError, RemoteProtocolError
from fleet.parameter_server.transport.connection import BrokenConnectionError, Connection, FrameHandler, Item
from fleet.parameter_server.transport.handshake import Directions
from fleet.parameter_server.transport.sockets import BytesMoved
from fleet.wire import START, TRANSITIONS, Header, Identity, Kind, Side

__all__ = ["Line", "LineEndedError"]

_LAST_WORDS: Final[Mapping[Side, frozenset[Kind]]] = {
    side: frozenset(
        kind for kinds in table.values() for kind, following in kinds.items() if not table[following]
    )
    for side, table in TRANSITIONS.items()
}
"""What each side sends only once, as nothing may follow."""


class LineEndedError(FleetError):
    """Nobody needs another connection: this end has closed the session."""


class Line:
    """One end of a session.

    Parameters
    ----------
    peer : str
        How messages call the other end.
    side : Side
        Who sends here.
    identity : Identity
        What every frame repeats.
    handler : FrameHandler
        Whose frames they are. Learns of each connection's end.
    """

    def __init__(self, peer: str, side: Side, identity: Identity, handler: FrameHandler) -> None:
        self._peer = peer
        self._side = side
        self._identity = identity
        self._other = Side.SERVER if side is Side.TRAINER else Side.TRAINER
        self._handler = handler
        self.taken = 0
        """How many frames have come so far."""
        self._taken_place = START
        self._sent_place = START
        """Where this side's direction stands after the frames that the other end is known to have."""
        self._confirmed = 0
        self._unconfirmed: deque[Item] = deque()
        self._carried_from = 0
        """With which frame the present connection began."""
        self._handed = 0
        """How many frames connections that broke had handed to the kernel."""
        self._said_all = False
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._ended = False

    @property
    def has_ended(self) -> bool:
        """Whether this end has closed the session."""
        return self._ended

    def send(
        self, kind: Kind, payload: bytes | memoryview = b"", *, shared: bool = False, **fields: int
    ) -> int:
        """Enqueue a frame; never waits. The payload must not change until the other end has it.

        After the last word of a session, an error for instance, nothing is enqueued any more: other threads
        may not know of it yet.

        Parameters
        ----------
        kind : Kind
        payload : bytes or memoryview
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
        with self._changed:
            if not self._said_all:
                self._said_all = kind in _LAST_WORDS[self._side]
                self._unconfirmed.append((header, payload))
                if self._connection is not None:
                    self._connection.send(header, payload)
            return self._confirmed + len(self._unconfirmed)

    def wait_until_taken(self, count: int, timeout_seconds: float) -> bool:
        """Wait a while for the other end to have the first `count` frames; return whether it has."""
        with self._changed:
            return self._changed.wait_for(lambda: self._confirmed >= count, timeout_seconds)

    def attach(self, connected: socket.socket, directions: Directions, confirmed: int) -> int:
        """Go on over a new connection whose greeting is done; the one before has been fenced.

        Parameters
        ----------
        connected : socket.socket
            Blocking; closed by this object from now on.
        directions : Directions
            Both greeted.
        confirmed : int
            How many frames the other end has, as its greeting says.

        Returns
        -------
        int
            How many frames are sent again.

        Raises
        ------
        RemoteProtocolError
            The other end claims to have other frames than can be.
        LineEndedError
            This end was closed meanwhile.
        """
        with self._changed:
            if self._ended:
                raise LineEndedError(f"the session with {self._peer} has ended")
            if not self._confirmed <= confirmed <= self._confirmed + len(self._unconfirmed):
                raise RemoteProtocolError(
                    f"{self._peer} greets with {confirmed} frames taken, expected {self._confirmed} to "
                    f"{self._confirmed + len(self._unconfirmed)}; it must join again"
                )
            self._confirm(confirmed)
            directions.sending.resume(self._sent_place)
            directions.receiving.resume(self._taken_place)
            connection = Connection(connected, self._peer, directions.sending, directions.receiving, self)
            for item in self._unconfirmed:
                connection.send(*item)
            self._connection, self._carried_from = connection, confirmed
            again = max(0, self._handed - confirmed)
        connection.start()
        return again

    def fence(self) -> None:
        """End the connection that there is, and wait until nothing of it is being taken any more."""
        connection = self._connection
        if connection is not None:
            connection.close()

    def bytes_moved(self) -> BytesMoved | None:
        """Return what the connection that there is has moved; None where there is none, or nobody tells."""
        connection = self._connection
        return connection.bytes_moved() if connection is not None else None

    def hang_up(self) -> None:
        """End the connection that there is as if it had broken."""
        connection = self._connection
        if connection is not None:
            connection.hang_up()

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

    # What the connection reports.

    def destination(self, header: Header) -> memoryview | None:
        """Ask the handler."""
        return self._handler.destination(header)

    def received(self, header: Header, payload: memoryview) -> None:
        """Count a frame, before anything that follows from it is sent, and pass it on."""
        self.taken += 1
        self._taken_place = self._taken_place.after(self._other, header.kind, header.step)
        if header.taken > self._confirmed:
            with self._changed:
                self._confirm(header.taken)
        self._handler.received(header, payload)

    def ended(self, error: FleetError | None) -> None:
        """Tell the handler, and let a broken connection go.

        In this order: whoever opens the next connection waits in `fence` until this one's end is told.
        """
        connection = self._connection if isinstance(error, BrokenConnectionError) else None
        if connection is not None:
            connection.close()
            with self._changed:
                self._handed = max(self._handed, self._carried_from + connection.frames_sent)
        self._handler.ended(error)
        with self._changed:
            if connection is not None and self._connection is connection:
                self._connection = None

    def _end(self) -> Connection | None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            return self._connection

    def _confirm(self, count: int) -> None:
        """Forget the frames that the other end has."""
        if count > self._confirmed + len(self._unconfirmed):
            raise RemoteProtocolError(
                f"{self._peer} has taken {count} frames, and was sent "
                f"{self._confirmed + len(self._unconfirmed)}"
            )
        while self._confirmed < count:
            header, _ = self._unconfirmed.popleft()
            self._sent_place = self._sent_place.after(self._side, header.kind, header.step)
            self._confirmed += 1
        self._changed.notify_all()
