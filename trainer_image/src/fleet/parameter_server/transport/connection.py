"""A data connection in use: it sends and receives at the same time, and neither waits for the other.

Both ends are alike. `send` enqueues. Only a small frame that has none before it is handed to the kernel at
once, as to wake the sending thread would take longer. That thread takes what is there, checks it against the
protocol and hands it to the kernel in one call; of what may still change it reads a run at a time. The
receiving thread reads a header, lets the kernel write the payload into its receive buffer, and delivers the
frame.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeVar

from fleet.errors import FleetError, PeerLostError, RemoteProtocolError
from fleet.parameter_server.transport.lazy import LazyBytes
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
"""How much of lazy bytes is read at once, and how much of them a connection holds."""
_ALIGNMENT_BYTES: Final = 64
_BATCH: Final = 64
_IOV_MAX: Final = 512
_DRAIN_SECONDS: Final = 10.0
_SMALL_BYTES: Final = 1 << 16
"""Of the largest payload that leaves without the sending thread."""
_log = logging.getLogger(__name__)

Q = TypeVar("Q")
T = TypeVar("T")


class BrokenConnectionError(PeerLostError):
    """The connection ended before the protocol did. What became of the peer is not known yet."""


class Frame(NamedTuple):
    """One frame that has come; without its payload where that has landed in a receive buffer."""

    header: Header
    payload: bytes | memoryview = b""


class OutgoingFrame(NamedTuple):
    """One frame on its way out."""

    header: Header
    payload: bytes | memoryview | LazyBytes


class End(NamedTuple):
    """Nothing more comes: by the protocol (None), or because of an error."""

    error: FleetError | None


Deliver = Callable[[Frame | End], None]
"""Takes what a connection has received, in order and in the receiving thread; an `End` comes once, last."""
BufferOf = Callable[[Header], memoryview | None]
"""Returns the receive buffer of the payload that follows a header; None for one of the payload's own."""


@dataclass(frozen=True, slots=True)
class Directions:
    """Both directions of a connection whose handshake is done."""

    sending: Conversation
    receiving: Conversation


class _SendQueue:
    """Frames that wait for the sending thread, or what is left of one that has begun to leave."""

    def __init__(self) -> None:
        self._frames: queue.SimpleQueue[OutgoingFrame | memoryview | None] = queue.SimpleQueue()
        self._put = 0
        self._sent = 0

    @property
    def is_done(self) -> bool:
        """Whether the sending thread has handed over all that was put here."""
        return self._sent == self._put

    def put(self, frame: OutgoingFrame | memoryview) -> None:
        """Enqueue; not to be called by two threads at once."""
        self._put += 1
        self._frames.put(frame)

    def note(self, sent: int) -> None:
        """Take note that so many were handed over."""
        self._sent += sent

    def close(self) -> None:
        """Let `take` return an empty batch once what is there has been taken."""
        self._frames.put(None)

    def take(self) -> list[OutgoingFrame | memoryview]:
        """Wait for a frame and take those that have queued up behind it; empty at the end."""
        batch: list[OutgoingFrame | memoryview] = []
        frame = self._frames.get()
        while frame is not None:
            batch.append(frame)
            if len(batch) == _BATCH or self._frames.empty():
                break
            frame = self._frames.get()
        if frame is None and batch:
            self._frames.put(None)
        return batch


class _Outgoing:
    """What is gathered for one call of the kernel.

    Parameters
    ----------
    send : callable
        Hands buffers to the kernel, and returns when their memory may be used again.
    """

    def __init__(self, send: Callable[[Sequence[bytes | memoryview]], None]) -> None:
        self._send = send
        self._buffers: list[bytes | memoryview] = []
        self._runs = memoryview(b"")
        """Where lazy bytes are read to; allocated for the first ones."""
        self._used_bytes = 0

    def add(self, frame: OutgoingFrame | memoryview) -> None:
        """Gather a frame; hand over what there is whenever there is no room for a run of lazy bytes."""
        if isinstance(frame, memoryview):
            self._buffers.append(frame)
            return
        header, payload = pack_header(frame.header), frame.payload
        if not isinstance(payload, LazyBytes):
            self._buffers += (header, payload)
            return
        if not self._runs:
            self._runs = memoryview(bytearray(RUN_BYTES))
        if self._used_bytes + len(payload) > RUN_BYTES:  # what fits into one run is read at once
            self.flush()
        self._buffers.append(header)
        for begin in range(0, len(payload), RUN_BYTES):
            if begin:
                self.flush()
            run = self._runs[self._used_bytes :][: len(payload) - begin]
            payload.read(begin, run)
            self._buffers.append(run)
            self._used_bytes += -(-len(run) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def flush(self) -> None:
        """Hand over what has been gathered."""
        buffers, self._buffers, self._used_bytes = self._buffers, [], 0
        self._send(buffers)


class _Sender:
    """The half of a connection that sends. All but the thread's own part may be called by any thread.

    Parameters
    ----------
    connected : socket.socket
    peer : str
        How messages call the other end.
    sending : Conversation
        Advanced by each frame.
    """

    def __init__(self, connected: socket.socket, peer: str, sending: Conversation) -> None:
        self.frames_sent = 0
        """How many frames were handed to the kernel, or begun to be; they may not have arrived."""
        self.refused: FleetError | None = None
        """Why a frame could not leave; the connection is hung up, and its receiving thread reports it."""
        self._socket = connected
        self._peer = peer
        self._sending = sending
        self._at_once = type(connected) is socket.socket  # TLS has one thread make its records
        self._queue = _SendQueue()
        self._lock = threading.Lock()
        """Held while a frame is taken, so that they keep their order, and by whoever begins or ends."""
        self._runs = False
        self._thread = threading.Thread(target=self._run, name=f"fleet-send {peer}", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        with self._lock:
            self._runs = True
            self._thread.start()

    def send(self, frame: OutgoingFrame) -> None:
        """Take a frame; never waits."""
        with self._lock, self._hanging_up():
            payload = frame.payload
            at_once = self._at_once and self._runs and self._queue.is_done
            if at_once and not isinstance(payload, LazyBytes) and len(payload) <= _SMALL_BYTES:
                self._send_now(frame, payload)
            else:
                self._queue.put(frame)

    def end(self) -> None:
        """Take nothing more, and let the thread end once what was taken has left."""
        with self._lock:
            self._runs = False
            self._queue.close()

    def join(self, timeout_seconds: float | None = None) -> None:
        """Wait for the thread to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)

    def _send_now(self, frame: OutgoingFrame, payload: bytes | memoryview) -> None:
        """Hand a frame to the kernel, and what it does not take at once to the thread."""
        self._begin(frame)
        whole = b"".join((pack_header(frame.header), payload))
        taken = _send_at_once(self._socket, whole)
        progress.count("bytes_sent", taken)
        if taken < len(whole):
            self._queue.put(memoryview(whole)[taken:])

    def _run(self) -> None:
        outgoing = _Outgoing(self._hand_over)
        with self._hanging_up():
            while self._send_batch(outgoing):
                pass

    def _send_batch(self, outgoing: _Outgoing) -> bool:
        """Send what waits, and hold none of it while the next is waited for; return False at the end."""
        batch = self._queue.take()
        for frame in batch:
            if isinstance(frame, OutgoingFrame):
                self._begin(frame)
            outgoing.add(frame)
        if batch:
            outgoing.flush()
        self._queue.note(len(batch))
        return bool(batch)

    def _begin(self, frame: OutgoingFrame) -> None:
        self._sending.advance(frame.header)
        self.frames_sent += 1

    def _hand_over(self, buffers: Sequence[bytes | memoryview]) -> None:
        send_all(self._socket, buffers)
        progress.count("bytes_sent", sum(map(len, buffers)))

    @contextlib.contextmanager
    def _hanging_up(self) -> Iterator[None]:
        """Hang up where sending fails or a signal interrupts it, as a part of a frame may be missing then."""
        try:
            yield
        except BaseException as raised:
            self._runs = False
            self._queue.close()
            self.refused = self._refusal(raised)
            hang_up(self._socket)
            if not isinstance(raised, Exception):
                raise

    def _refusal(self, raised: BaseException) -> FleetError | None:
        """Return what the receiving thread is to report, where it does not see the reason itself."""
        if isinstance(raised, FleetError):  # a frame of ours that may not leave
            return raised
        if isinstance(raised, Exception) and not isinstance(raised, OSError):
            _log.error("a frame for %s could not be read", self._peer, exc_info=raised)
            return FleetError(
                f"a frame for {self._peer} could not be read ({type(raised).__name__}: {raised}); its "
                "traceback is in the log"
            )
        _log.debug("sending to %s ended: %r", self._peer, raised)
        return None


class Connection:
    """One data connection whose greeting is done.

    Parameters
    ----------
    connected : socket.socket
        Blocking; closed by this object.
    peer : str
        How messages call the other end.
    directions : Directions
    buffer_of : callable
        As `BufferOf`; called by the receiving thread.
    deliver : callable
        As `Deliver`.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        directions: Directions,
        buffer_of: BufferOf,
        deliver: Deliver,
    ) -> None:
        self._socket = connected
        self._peer = peer
        self._receiving = directions.receiving
        self._buffer_of = buffer_of
        self._deliver = deliver
        self._lock = threading.Lock()
        self._started = False
        self._finishing = False
        self._sender = _Sender(connected, peer, directions.sending)
        self._receiver = threading.Thread(target=self._receive, name=f"fleet-receive {peer}", daemon=True)

    def start(self) -> None:
        """Start both threads, unless somebody has finished this connection already."""
        with self._lock:
            if self._finishing:
                return
            self._started = True
            self._sender.start()
            self._receiver.start()

    @property
    def frames_sent(self) -> int:
        """How many frames were handed to the kernel, or begun to be; they may not have arrived."""
        return self._sender.frames_sent

    def send(self, frame: OutgoingFrame) -> None:
        """Send a frame; never waits. The payload must not change until the kernel has it, if not lazy."""
        self._sender.send(frame)

    def bytes_moved(self) -> BytesMoved | None:
        """Return how many bytes the connection has moved so far, where the system tells."""
        return bytes_moved(self._socket)

    def hang_up(self) -> None:
        """End the connection as if it had broken; an `End` is delivered."""
        hang_up(self._socket)

    def finish(self, timeout_seconds: float) -> None:
        """Send what is enqueued, let the peer read it, and close; frames that still come are dropped."""
        if self._end():
            self._sender.join(timeout_seconds)
            if threading.current_thread() is self._receiver:
                drain(self._socket, timeout_seconds)
            else:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)
                self._receiver.join(timeout_seconds)
        self.close()

    def close(self) -> None:
        """Close now. An `End` is delivered, unless one was before."""
        started = self._end()
        hang_up(self._socket)
        if started:
            self._sender.join()
            if self._receiver is not threading.current_thread():
                self._receiver.join()
        self._socket.close()

    def _end(self) -> bool:
        """Let the sending thread come to an end, and return whether the threads were ever started."""
        with self._lock:
            self._finishing = True
            self._sender.end()
            return self._started

    def _receive(self) -> None:
        error: FleetError | None = None
        try:
            buffer = memoryview(bytearray(HEADER_BYTES))
            receiving = self._receiving
            while not receiving.over:
                header = receive_header(self._socket, buffer, receiving)
                landed = self._ask(self._buffer_of, header)
                payload = memoryview(bytearray(header.payload_bytes if landed is None else 0))
                receive_exactly(self._socket, payload if landed is None else landed)
                progress.count("bytes_received", HEADER_BYTES + header.payload_bytes)
                if self._finishing:
                    self._sender.join(_DRAIN_SECONDS)  # the last words: draining closes their direction
                    drain(self._socket, _DRAIN_SECONDS)
                    break
                self._ask(self._deliver, Frame(header, payload))
        except FleetError as raised:
            error = raised
        except OSError as raised:
            broken = BrokenConnectionError(f"the data connection with {self._peer} broke: {raised}")
            error = self._sender.refused or broken
        except Exception as raised:  # noqa: BLE001 - somebody waits for it
            error = self._not_taken(raised)
        self._deliver(End(error))

    def _ask(self, call: Callable[[Q], T], what: Q) -> T:
        """Call back: an OSError of a user's optimizer or mode is no broken connection."""
        try:
            return call(what)
        except OSError as raised:
            raise self._not_taken(raised) from raised

    def _not_taken(self, raised: Exception) -> FleetError:
        _log.warning("a frame of %s could not be taken", self._peer, exc_info=raised)
        return FleetError(
            f"a frame of {self._peer} could not be taken ({type(raised).__name__}: {raised}); its "
            "traceback is in the log"
        )


def receive_header(connected: socket.socket, buffer: memoryview, receiving: Conversation) -> Header:
    """Receive one frame up to its payload.

    Parameters
    ----------
    connected : socket.socket
    buffer : memoryview
        Of the size of a header, to be reused.
    receiving : Conversation
        Advanced by the header.

    Raises
    ------
    RemoteProtocolError
        The peer broke the protocol.
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
        The peer closed before the buffer was full; the message says where.
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


def _send_at_once(connection: socket.socket, content: bytes) -> int:
    """Return how many of the bytes the kernel takes without waiting."""
    try:
        return connection.send(content, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0
