"""A data connection that, after its handshake, sends and receives frames concurrently.

Both ends work in the same way. The event loop's thread receives and delivers frames: it receives many small
frames in one kernel call, and a large payload directly into its receive buffer. It receives nothing while a
frame waits for a receive buffer, or while the pool works on a frame, so that frames are used in order.
`transport.outgoing` has the other direction.
"""

import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from fleet.errors import DeadlineExceededError, FleetError, PeerLostError
from fleet.parameter_server.transport.event_loop import READ, WRITE, EventLoop
from fleet.parameter_server.transport.outgoing import SMALL_BYTES, TURN_BYTES, Outgoing
from fleet.parameter_server.transport.sockets import BytesMoved, ConnectionEndedError, bytes_moved, hang_up
from fleet.process import progress
from fleet.wire import HEADER_BYTES, TENSORS, Conversation, Header, read_header

__all__ = [
    "BrokenConnectionError",
    "BufferOf",
    "Connection",
    "Deliver",
    "Directions",
    "End",
    "Frame",
    "NotYet",
    "Work",
]

_WORK_SECONDS: Final = 600.0
"""The time limit for the use of one frame, which may step a block."""
_log = logging.getLogger(__name__)


class BrokenConnectionError(PeerLostError):
    """The connection ended before the session was over; the peer may still be alive."""


class Frame(NamedTuple):
    """A received frame; its payload is empty if the bytes were written to a receive buffer."""

    header: Header
    payload: bytes | memoryview = b""


class End(NamedTuple):
    """The end of a connection: by the protocol (None), or by an error."""

    error: FleetError | None


class NotYet(NamedTuple):
    """The answer of a `BufferOf` for a frame that must wait, for example because no buffer is free.

    Attributes
    ----------
    seconds : float or None
        The time after which the connection asks again even without a call of `Connection.resume`; None if it
        waits for that call.
    """

    seconds: float | None = None


Work = Callable[[], object]
"""Work on a frame that takes long, or may wait for another thread; the result is ignored."""
Deliver = Callable[[Frame | End], Work | None]
"""Called by the event loop with each frame in order, and finally once with an `End`; must not wait.

Returns None, or work on the frame. The loop's pool then does the work before the next frame is delivered.
"""
BufferOf = Callable[[Header], memoryview | NotYet | None]
"""Returns the receive buffer for the bytes of a block; None if they need newly allocated memory.

After `NotYet`, it is called again for the same header.
"""


@dataclass(frozen=True, slots=True)
class Directions:
    """Both directions of a connection after its handshake."""

    sending: Conversation
    receiving: Conversation


class Connection:
    """One data connection after its handshake.

    Parameters
    ----------
    connected : socket.socket
        The connected socket; this object closes it.
    peer : str
        The name of the other end, for messages.
    directions : Directions
    buffer_of : callable
        See `BufferOf`; called by the event loop.
    deliver : callable
        See `Deliver`.
    loop : EventLoop
        The loop that serves the connection.

    Attributes
    ----------
    send : callable
        Sends frames without waiting; see `Outgoing.send`.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        directions: Directions,
        buffer_of: BufferOf,
        deliver: Deliver,
        loop: EventLoop,
    ) -> None:
        self._socket = connected
        self._peer = peer
        self._receiving = directions.receiving
        self._buffer_of = buffer_of
        self._deliver = deliver
        self._loop = loop
        self._outgoing = Outgoing(connected, peer, directions.sending, loop, self._sending_changed)
        self.send = self._outgoing.send
        self._starting = threading.Lock()
        self._started = self._finishing = False
        self._watched = 0
        """The events for which the loop watches the socket."""

        # Used by the loop's thread:
        self._rest = b""
        """Received bytes that have not been used yet."""
        self._header: Header | None = None
        """The header of the frame that is being received."""
        self._payload: memoryview | None = None
        """The memory of its payload; None until there is memory."""
        self._filled = 0
        """The number of bytes of the payload that have arrived."""
        self._lands = False
        """Whether the memory is a receive buffer."""
        self._large = False
        """Whether the previous payload was large.

        If so, only a header is received next, so that another large payload goes directly into its memory.
        """
        self._paused = False
        """Whether the next frame must wait, so that nothing is received."""
        self._timed = False
        """Whether a timer is running, after which the connection asks for a receive buffer again."""
        self._worker = 0
        """The thread that works on a frame; -1 before it has begun, and 0 without work."""
        self._ended = self._closing = self._closed = False
        """Whether the end has been or is being delivered, the socket is to be closed, and it is closed."""
        self._over = threading.Event()
        """Set once the end has been delivered."""
        self._gone = threading.Event()
        """Set once the peer will send nothing more."""

    @property
    def frames_sent(self) -> int:
        """The frames that were passed to the kernel, or were about to be; they may not have arrived."""
        return self._outgoing.frames_sent

    def start(self) -> None:
        """Start sending and receiving, unless the connection has already been finished."""
        with self._starting:
            if self._finishing:
                return
            self._started = True
            self._socket.setblocking(False)
        self._loop.call(self._begin)

    def resume(self) -> None:
        """Ask for the receive buffer again, after `NotYet`; any thread may call this."""
        self._loop.call(self._ask_again)

    def bytes_moved(self) -> BytesMoved | None:
        """Return the bytes that the connection has moved so far; None if the system does not count them."""
        return bytes_moved(self._socket)

    def hang_up(self) -> None:
        """End the connection as if it had broken; an `End` is delivered."""
        hang_up(self._socket)

    def finish(self, timeout_seconds: float) -> None:
        """Send all queued frames, let the peer read them, and close; drop frames that arrive meanwhile."""
        with self._starting:
            self._finishing = True
        self._outgoing.refuse()
        if self._started and not self._is_own_thread:
            self._loop.call(self._finish)
            self._outgoing.flushed.wait(timeout_seconds)
            self._gone.wait(timeout_seconds)
        self.close()

    def close(self) -> None:
        """Close immediately; an `End` is delivered, unless one has already been delivered.

        Raises
        ------
        DeadlineExceededError
            The work on a frame does not end.
        """
        with self._starting:
            self._finishing = True
        self._outgoing.refuse(now=True)
        hang_up(self._socket)
        if not self._started:
            self._socket.close()
        elif threading.get_ident() == self._loop.ident:
            self._close()
        else:
            self._loop.call(self._close)
            if not self._is_own_thread and not self._loop.wait_for(self._over, _WORK_SECONDS):
                raise DeadlineExceededError(
                    f"the data connection with {self._peer} was not closed within {_WORK_SECONDS:g} s, "
                    "because a frame of it is still being used; the stacks of this process's threads say by "
                    "what (py-spy dump)"
                )

    @property
    def _is_own_thread(self) -> bool:
        """Whether this connection waits for the calling thread, which then must not wait for it."""
        return threading.get_ident() in (self._loop.ident, self._worker)

    # The methods below are called by the loop's thread, except `_work`.

    def _begin(self) -> None:
        self._outgoing.flush()
        self._serve()  # TLS may hold received bytes already

    def _serve(self, events: int = READ) -> None:
        """Send and receive what the socket is ready for."""
        if events & WRITE and self._outgoing.blocked:
            self._outgoing.unblock()
        if events & READ and not self._paused and not self._closed:
            if self._finishing:
                self._discard()
            elif not self._ended:
                self._read()
        if self._watched != READ or self._paused or self._ended or self._finishing or self._outgoing.blocked:
            self._watch()

    def _watch(self) -> None:
        """Watch the socket for the events for which this connection waits."""
        reads = not self._paused and (not self._ended or self._finishing) and not self._gone.is_set()
        events = 0 if self._closed else (READ if reads else 0) | (WRITE if self._outgoing.blocked else 0)
        if events != self._watched:
            before, self._watched = self._watched, events
            self._loop.watch(self._socket, before, events, self._serve)

    def _read(self) -> None:
        """Receive and deliver what has arrived."""
        buffer, begin, end, received = self._loop.buffer, 0, len(self._rest), 0
        buffer[:end] = self._rest
        self._rest = b""
        drained = False
        try:
            while True:
                if end or self._header is not None:
                    begin = self._take_frames(begin, end)
                if self._paused or self._ended or drained:
                    break
                if received >= TURN_BYTES:
                    self._loop.call(self._serve)
                    break
                if (payload := self._payload) is not None:
                    wanted, begin, end = payload[self._filled :], 0, 0
                else:
                    buffer[: end - begin] = buffer[begin:end]
                    begin, end = 0, end - begin
                    wanted = buffer[end : HEADER_BYTES if self._large else None]
                count = self._receive(wanted, end)
                drained = count < len(wanted)
                received += count
                if payload is not None:
                    self._filled += count
                else:
                    end += count
        except FleetError as raised:
            self._end(raised)
        except Exception as raised:  # noqa: BLE001 - the session reports it
            self._end(self._explain(raised))
        progress.count("bytes_received", received)
        self._rest = bytes(buffer[begin:end]) if not self._ended else b""

    def _take_frames(self, begin: int, end: int) -> int:
        """Deliver the frames in the loop's buffer; return the position of the first unused byte."""
        buffer = self._loop.buffer
        while not self._paused and not self._ended:
            header = self._header
            if header is None:
                header = read_header(buffer[begin:end]) if end - begin >= HEADER_BYTES else None
                if header is None:
                    break
                self._receiving.advance(header)
                self._header = header
                begin += HEADER_BYTES
            payload = self._payload
            if payload is None:
                landing = self._buffer_of(header) if header.kind in TENSORS else None
                if isinstance(landing, NotYet):
                    self._wait_for_buffer(landing)
                    break
                self._lands = landing is not None
                payload = landing if landing is not None else memoryview(bytearray(header.payload_bytes))
                self._payload, self._filled = payload, 0
            if missing := header.payload_bytes - self._filled:
                count = min(missing, end - begin)
                payload[self._filled : self._filled + count] = buffer[begin : begin + count]
                begin += count
                self._filled += count
                if count < missing:
                    break
            self._header = self._payload = None
            self._large = header.payload_bytes > SMALL_BYTES
            if self._finishing:
                continue
            work = self._deliver(Frame(header, b"" if self._lands else payload))
            if work is not None:
                self._paused, self._worker = True, -1
                self._loop.submit(partial(self._work, work))
            elif self._receiving.over:
                self._end(None)
        return begin

    def _wait_for_buffer(self, landing: NotYet) -> None:
        """Receive nothing until a buffer may be free."""
        self._paused = True
        if landing.seconds is not None and not self._timed:
            self._timed = True
            self._loop.call_later(landing.seconds, self._time_out)

    def _receive(self, wanted: memoryview, kept: int) -> int:
        """Receive into memory; return 0 if nothing has arrived."""
        try:
            count = self._socket.recv_into(wanted)
            if not count:
                wanted_bytes = HEADER_BYTES if self._payload is None else len(self._payload)
                received = kept if self._payload is None else self._filled
                where = f", after {received} of {wanted_bytes} bytes" if received else ""
                raise ConnectionEndedError(f"it was closed at the other end{where}")
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self._broken(error) from error
        return count

    def _broken(self, error: OSError) -> FleetError:
        return self._outgoing.refusal or BrokenConnectionError(
            f"the data connection with {self._peer} broke: {error}"
        )

    def _explain(self, raised: BaseException) -> FleetError:
        """Return the error for an exception of a callback, which may be an OSError of a user's optimizer."""
        if isinstance(raised, FleetError):
            return raised
        _log.warning("a frame of %s could not be taken", self._peer, exc_info=raised)
        return FleetError(
            f"a frame of {self._peer} could not be taken ({type(raised).__name__}: {raised}); its "
            "traceback is in the log"
        )

    def _work(self, work: Work) -> None:
        """Work on a frame; called by the pool."""
        self._worker = threading.get_ident()
        raised: BaseException | None = None
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the session reports it
            raised = error
        self._loop.call(partial(self._worked, raised))

    def _worked(self, raised: BaseException | None) -> None:
        self._paused, self._worker = False, 0
        if raised is not None:
            self._end(self._explain(raised))
        elif self._receiving.over:
            self._end(None)
        if self._closing:
            self._close()
        else:
            self._serve()

    def _ask_again(self) -> None:
        if self._paused and not self._worker:
            self._paused = False
            self._serve()

    def _time_out(self) -> None:
        self._timed = False
        self._ask_again()

    def _end(self, error: FleetError | None) -> None:
        """Deliver the end; anything that the peer still sends is dropped."""
        if self._ended:
            return
        self._ended = True
        self._header = self._payload = None
        broken = isinstance(error, BrokenConnectionError) or self._outgoing.has_failed
        if broken or self._receiving.over:
            self._gone.set()
        try:
            self._deliver(End(error))
        finally:
            self._watch()
            self._over.set()

    def _finish(self) -> None:
        self._outgoing.finish()
        if not self._worker:
            self._paused = False
            self._serve()

    def _sending_changed(self) -> None:
        if self._closing:
            self._close()
        else:
            self._watch()

    def _discard(self) -> None:
        """Drop received bytes until the peer closes.

        Closing a socket with unread bytes resets the connection, and after a reset the peer could not read an
        error that this end has sent.
        """
        if self._gone.is_set():
            return
        try:
            for _ in range(TURN_BYTES // len(self._loop.buffer)):
                if not self._receive(self._loop.buffer, 0):
                    break
        except FleetError as raised:
            self._gone.set()
            self._end(raised)

    def _close(self) -> None:
        """Deliver the end and close the socket, once nothing works on a frame."""
        self._closing = True
        if self._worker or self._outgoing.in_pool or self._closed:
            return
        self._outgoing.flushed.set()
        self._gone.set()
        if not self._ended:
            self._end(self._broken(ConnectionEndedError("it was closed at this end")))
        if not self._closed:
            self._closed = True
            self._watch()
            self._socket.close()
