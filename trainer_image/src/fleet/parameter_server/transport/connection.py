"""One data connection after its handshake, which sends and receives frames concurrently.

Both ends work in the same way. `send` never blocks. It passes a small frame to the kernel itself if no other
frame is queued, which is faster than waking the sending thread. The sending thread dequeues all frames,
checks them against the protocol and passes them to the kernel in one call; it reads lazy bytes in runs of
limited size. The receiving thread reads a header, lets the kernel write the payload into its receive buffer,
and delivers the frame.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from fleet.errors import FleetError, PeerLostError, RemoteProtocolError
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.parameter_server.transport.sockets import (
    BytesMoved,
    ConnectionEndedError,
    bytes_moved,
    drain,
    hang_up,
)
from fleet.process import progress
from fleet.wire import HEADER_BYTES, Conversation, Header, pack_header, read_header

__all__ = [
    "BrokenConnectionError",
    "BufferOf",
    "Connection",
    "Deliver",
    "Directions",
    "End",
    "Frame",
    "OutgoingFrame",
    "receive_exactly",
    "receive_header",
    "send_all",
]

RUN_BYTES: Final = 1 << 18
"""The size of a connection's buffer for lazy bytes, which limits the bytes of one read."""
_ALIGNMENT_BYTES: Final = 64
_BATCH: Final = 64
_DRAIN_SECONDS: Final = 10.0
_IOV_MAX: Final = 512
_SMALL_BYTES: Final = 1 << 16
"""The largest payload that `send` passes to the kernel itself."""
_log = logging.getLogger(__name__)


class BrokenConnectionError(PeerLostError):
    """The connection ended before the session was over; the peer may still be alive."""


class Frame(NamedTuple):
    """A received frame; its payload is empty if the bytes were written to a receive buffer."""

    header: Header
    payload: bytes | memoryview = b""


class OutgoingFrame(NamedTuple):
    """A frame to send."""

    header: Header
    payload: bytes | memoryview | LazyBytes


class End(NamedTuple):
    """The end of a connection: by the protocol (None), or by an error."""

    error: FleetError | None


Deliver = Callable[[Frame | End], None]
"""Called by the receiving thread with each frame in order, and finally once with an `End`."""
BufferOf = Callable[[Header], memoryview | None]
"""Returns the receive buffer for a header's payload; None if the payload needs newly allocated memory."""


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
        The connected socket, in blocking mode; this object closes it.
    peer : str
        The name of the other end, for messages.
    directions : Directions
    buffer_of : callable
        See `BufferOf`; called by the receiving thread.
    deliver : callable
        See `Deliver`.

    Attributes
    ----------
    frames_sent : int
        The number of frames that the kernel has accepted, completely or partly; they may not have arrived.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        directions: Directions,
        buffer_of: BufferOf,
        deliver: Deliver,
    ) -> None:
        self.frames_sent = 0
        self._socket = connected
        self._peer = peer
        self._sending = directions.sending
        self._receiving = directions.receiving
        self._buffer_of = buffer_of
        self._deliver = deliver
        self._lock = threading.Lock()
        """Guards the queue: keeps frames in order, and ensures that no frame follows the end."""
        self._started = self._finishing = False
        self._queue: queue.SimpleQueue[OutgoingFrame | memoryview | None] = queue.SimpleQueue()
        """Frames for the sending thread, or the rest of a partly sent frame; None ends the thread."""
        self._queued = self._dequeued = 0
        """The number of entries ever queued, and the number of those that the sending thread has sent."""
        self._sends_directly = False
        """Whether `send` may use the socket itself when the queue is empty."""
        self._refusal: FleetError | None = None
        """The reason why a frame of this end could not be sent; the receiving thread reports it."""
        self._runs = memoryview(b"")
        """The buffer for lazy bytes, allocated on first use."""
        self._sender = threading.Thread(target=self._send, name=f"fleet-send {peer}", daemon=True)
        self._receiver = threading.Thread(target=self._receive, name=f"fleet-receive {peer}", daemon=True)

    def start(self) -> None:
        """Start both threads, unless the connection has already been finished."""
        with self._lock:
            if self._finishing:
                return
            self._started = True
            self._sends_directly = type(self._socket) is socket.socket  # TLS needs a single sending thread
            self._sender.start()
            self._receiver.start()

    def send(self, frame: OutgoingFrame) -> None:
        """Send a frame without waiting; unless lazy, the payload must not change until the kernel has it."""
        payload = frame.payload
        with self._lock:
            try:
                if (
                    self._sends_directly
                    and self._queued == self._dequeued
                    and not isinstance(payload, LazyBytes)
                    and len(payload) <= _SMALL_BYTES
                ):
                    self._send_directly(frame.header, payload)
                else:
                    self._queued += 1
                    self._queue.put(frame)
            except BaseException as raised:
                self._fail(raised)
                if not isinstance(raised, Exception):  # raised by a signal handler, so the caller must get it
                    raise

    def bytes_moved(self) -> BytesMoved | None:
        """Return the bytes that the connection has moved so far; None if the system does not count them."""
        return bytes_moved(self._socket)

    def hang_up(self) -> None:
        """End the connection as if it had broken; an `End` is delivered."""
        hang_up(self._socket)

    def finish(self, timeout_seconds: float) -> None:
        """Send all queued frames, let the peer read them, and close; drop frames that arrive meanwhile."""
        if self._end():
            _join(self._sender, timeout_seconds)
            if threading.current_thread() is self._receiver:
                drain(self._socket, timeout_seconds)
            else:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
                _join(self._receiver, timeout_seconds)
        self.close()

    def close(self) -> None:
        """Close immediately; an `End` is delivered, unless one has already been delivered."""
        started = self._end()
        hang_up(self._socket)
        if started:
            _join(self._sender)
            _join(self._receiver)
        self._socket.close()

    def _end(self) -> bool:
        """Make the sending thread end; return whether the threads were ever started."""
        with self._lock:
            self._finishing = True
            self._sends_directly = False
            self._queue.put(None)
            return self._started

    def _send_directly(self, header: Header, payload: bytes | memoryview) -> None:
        """Pass a frame to the kernel; leave any part that it does not accept to the sending thread."""
        self._sending.advance(header)
        self.frames_sent += 1
        whole = b"".join((pack_header(header), payload))
        try:
            taken = self._socket.send(whole, socket.MSG_DONTWAIT)
        except BlockingIOError:
            taken = 0
        progress.count("bytes_sent", taken)
        if taken < len(whole):
            self._queued += 1
            self._queue.put(memoryview(whole)[taken:])

    def _send(self) -> None:
        try:
            while self._send_batch():
                pass
        except Exception as raised:  # noqa: BLE001 - the receiving thread reports it
            self._fail(raised)

    def _send_batch(self) -> bool:
        """Wait for frames, and send those that are queued; return False at the end.

        The frames are local to this call, so that no reference keeps their memory while the thread waits for
        more.
        """
        batch: list[OutgoingFrame | memoryview] = []
        frame = self._queue.get()
        while frame is not None:
            batch.append(frame)
            if len(batch) == _BATCH or self._queue.empty():
                break
            frame = self._queue.get()
        if not batch:
            return False
        if frame is None:
            self._queue.put(None)  # queue the end again, after this batch
        for buffers in self._gather(batch):
            send_all(self._socket, buffers)
            progress.count("bytes_sent", sum(map(len, buffers)))
        self._dequeued += len(batch)
        return True

    def _gather(self, batch: list[OutgoingFrame | memoryview]) -> Iterator[list[bytes | memoryview]]:
        """Yield the buffers of each kernel call in turn; lazy bytes are read just before their call."""
        buffers: list[bytes | memoryview] = []
        used_bytes = 0
        for frame in batch:
            if isinstance(frame, memoryview):
                buffers.append(frame)
                continue
            self._sending.advance(frame.header)
            self.frames_sent += 1
            header, payload = pack_header(frame.header), frame.payload
            if not isinstance(payload, LazyBytes):
                buffers += (header, payload)
                continue
            if not self._runs:
                self._runs = memoryview(bytearray(RUN_BYTES))
            if used_bytes + len(payload) > RUN_BYTES:  # a payload that fits in one run is read whole
                yield buffers
                buffers, used_bytes = [], 0
            buffers.append(header)
            for begin in range(0, len(payload), RUN_BYTES):
                if begin:
                    yield buffers
                    buffers, used_bytes = [], 0
                run = self._runs[used_bytes:][: len(payload) - begin]
                payload.read(begin, run)
                buffers.append(run)
                used_bytes += -(-len(run) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        yield buffers

    def _fail(self, raised: BaseException) -> None:
        """Hang up after a failure or signal during sending, because part of a frame may be missing."""
        self._sends_directly = False
        self._queue.put(None)
        if isinstance(raised, FleetError):  # the protocol forbids a frame of this end
            self._refusal = raised
        elif isinstance(raised, Exception) and not isinstance(raised, OSError):
            _log.error("a frame for %s could not be read", self._peer, exc_info=raised)
            self._refusal = FleetError(
                f"a frame for {self._peer} could not be read ({type(raised).__name__}: {raised}); its "
                "traceback is in the log"
            )
        else:
            _log.debug("sending to %s ended: %r", self._peer, raised)
        hang_up(self._socket)

    def _receive(self) -> None:
        connected, receiving = self._socket, self._receiving
        buffer = memoryview(bytearray(HEADER_BYTES))
        error: FleetError | None = None
        calls_back = False
        try:
            while not receiving.over:
                header = receive_header(connected, buffer, receiving)
                calls_back = True
                landing = self._buffer_of(header)
                calls_back = False
                payload = landing if landing is not None else memoryview(bytearray(header.payload_bytes))
                receive_exactly(connected, payload)
                progress.count("bytes_received", HEADER_BYTES + header.payload_bytes)
                if self._finishing:
                    _join(self._sender, _DRAIN_SECONDS)  # first: draining ends this end's sending
                    drain(connected, _DRAIN_SECONDS)
                    break
                calls_back = True
                self._deliver(Frame(header, payload if landing is None else b""))
                calls_back = False
        except FleetError as raised:
            error = raised
        except Exception as raised:  # noqa: BLE001 - the session reports it
            # An OSError raised in a callback, for example by a user's optimizer, is not a broken connection.
            if isinstance(raised, OSError) and not calls_back:
                broken = BrokenConnectionError(f"the data connection with {self._peer} broke: {raised}")
                error = self._refusal or broken
            else:
                _log.warning("a frame of %s could not be taken", self._peer, exc_info=raised)
                error = FleetError(
                    f"a frame of {self._peer} could not be taken ({type(raised).__name__}: {raised}); its "
                    "traceback is in the log"
                )
        self._deliver(End(error))


def _join(thread: threading.Thread, timeout_seconds: float | None = None) -> None:
    if thread is not threading.current_thread():
        thread.join(timeout_seconds)


def receive_header(connected: socket.socket, buffer: memoryview, receiving: Conversation) -> Header:
    """Receive the header of the next frame.

    Parameters
    ----------
    connected : socket.socket
    buffer : memoryview
        A buffer of the size of a header, which is reused.
    receiving : Conversation
        The state of the incoming direction, which the header advances.

    Raises
    ------
    RemoteProtocolError
        The peer violated the protocol.
    OSError
        The connection ended.
    """
    receive_exactly(connected, buffer)
    header = read_header(buffer)
    if header is None:
        raise RemoteProtocolError(f"a header of {len(buffer)} bytes is incomplete, expected {HEADER_BYTES}")
    receiving.advance(header)
    return header


def receive_exactly(connection: socket.socket, destination: memoryview) -> None:
    """Fill `destination` from the socket.

    Raises
    ------
    ConnectionEndedError
        The peer closed the connection before the buffer was full; the message gives the position.
    OSError
        The connection broke.
    """
    received, wanted = 0, len(destination)
    while received < wanted:
        count = connection.recv_into(destination[received:], wanted - received, socket.MSG_WAITALL)
        if count == 0:
            where = f", after {received} of {wanted} bytes" if received else ""
            raise ConnectionEndedError(f"it was closed at the other end{where}")
        received += count


def send_all(connection: socket.socket, buffers: Sequence[bytes | memoryview]) -> None:
    """Send every byte of the buffers, in order, without joining them first.

    Raises
    ------
    OSError
        The connection broke.
    """
    pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
    first = 0
    while first < len(pending):
        sent = connection.sendmsg(pending[first : first + _IOV_MAX])
        while first < len(pending) and sent >= len(pending[first]):
            sent -= len(pending[first])
            first += 1
        if sent:
            pending[first] = pending[first][sent:]
