"""A data connection in use: one thread receives, one sends, and neither waits for the other.

Both ends are alike. `send` only enqueues. The sending thread takes what is there, checks it against the
protocol and hands it to the kernel in one call. The receiving thread reads a header, asks its handler where
the payload belongs, lets the kernel write it there, and tells the handler.
"""

import contextlib
import logging
import queue
import socket
import threading
from collections.abc import Callable
from typing import Final, Protocol, TypeVar

from fleet import progress
from fleet.errors import FleetError, PeerLostError, RemoteProtocolError
from fleet.parameter_server.transport.sockets import (
    BytesMoved,
    bytes_moved,
    drain,
    hang_up,
    receive_exactly,
    send_all,
)
from fleet.wire import HEADER_BYTES, Conversation, Header, pack_header, read_header

__all__ = ["BrokenConnectionError", "Connection", "FrameHandler", "Item", "receive_header"]

_BATCH: Final = 64
_DRAIN_SECONDS: Final = 10.0
_log = logging.getLogger(__name__)

T = TypeVar("T")


class BrokenConnectionError(PeerLostError):
    """The connection ended before the protocol did. What became of the peer is not known yet."""


Item = tuple[Header, bytes | memoryview]


class FrameHandler(Protocol):
    """Whose frames a connection receives. Called by the receiving thread only."""

    def destination(self, header: Header) -> memoryview | None:
        """Return where a payload of ``header.payload_bytes`` belongs; None for a buffer of its own."""

    def received(self, header: Header, payload: memoryview) -> None:
        """Take a whole frame."""

    def ended(self, error: FleetError | None) -> None:
        """Learn, once, that nothing more comes: by the protocol (None), or because of an error."""


class Connection:
    """The threads and the queue of one data connection whose greeting is done.

    Parameters
    ----------
    connected : socket.socket
        Blocking; closed by this object.
    peer : str
        How messages call the other end.
    sending, receiving : Conversation
        The two directions, both greeted.
    handler : FrameHandler
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        sending: Conversation,
        receiving: Conversation,
        handler: FrameHandler,
    ) -> None:
        self._socket = connected
        self._peer = peer
        self._sending = sending
        self._receiving = receiving
        self._handler = handler
        self._lock = threading.Lock()
        self._started = False
        self._finishing = False
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self._refused: FleetError | None = None
        self.frames_sent = 0
        """How many frames were handed to the kernel, or begun to be; they may not have arrived."""
        self._receiver = threading.Thread(target=self._receive, name=f"fleet-receive {peer}", daemon=True)
        self._sender = threading.Thread(target=self._send, name=f"fleet-send {peer}", daemon=True)

    def start(self) -> None:
        """Start both threads, unless somebody has finished this connection already."""
        with self._lock:
            if self._finishing:
                return
            self._started = True
            self._sender.start()
            self._receiver.start()

    def send(self, header: Header, payload: bytes | memoryview = b"") -> None:
        """Enqueue a frame; never waits. The payload must not change until the kernel has it."""
        self._queue.put((header, payload))

    def bytes_moved(self) -> BytesMoved | None:
        """Return how many bytes the connection has moved so far, where the system tells."""
        return bytes_moved(self._socket)

    def hang_up(self) -> None:
        """End the connection as if it had broken; the handler hears of it."""
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
        """Close now. The handler hears of it, unless it has heard of an end before."""
        started = self._end()
        hang_up(self._socket)
        for thread in (self._sender, self._receiver) if started else ():
            if thread is not threading.current_thread():
                thread.join()
        self._socket.close()

    def _end(self) -> bool:
        """Let the sending thread come to an end, and return whether the threads were ever started."""
        with self._lock:
            self._finishing = True
            self._queue.put(None)
            return self._started

    def _receive(self) -> None:
        error: FleetError | None = None
        try:
            buffer = memoryview(bytearray(HEADER_BYTES))
            while not self._receiving.over:
                header = receive_header(self._socket, buffer, self._receiving)
                payload = self._told(self._handler.destination, header)
                if payload is None:
                    payload = memoryview(bytearray(header.payload_bytes))
                receive_exactly(self._socket, payload)
                progress.count("bytes_received", HEADER_BYTES + len(payload))
                if self._finishing:
                    self._sender.join(_DRAIN_SECONDS)  # the last words: draining closes their direction
                    drain(self._socket, _DRAIN_SECONDS)
                    break
                self._told(self._handler.received, header, payload)
        except FleetError as raised:
            error = raised
        except OSError as raised:
            broken = BrokenConnectionError(f"the data connection with {self._peer} broke: {raised}")
            error = self._refused or broken
        except Exception as raised:  # noqa: BLE001 - somebody waits for it
            error = self._not_taken(raised)
        self._handler.ended(error)

    def _told(self, tell: Callable[..., T], *what: object) -> T:
        """Call the handler: an OSError of a user's optimizer or mode is no broken connection."""
        try:
            return tell(*what)
        except OSError as raised:
            raise self._not_taken(raised) from raised

    def _not_taken(self, raised: Exception) -> FleetError:
        _log.warning("a frame of %s could not be taken", self._peer, exc_info=raised)
        return FleetError(
            f"a frame of {self._peer} could not be taken ({type(raised).__name__}: {raised}); its "
            "traceback is in the log"
        )

    def _send(self) -> None:
        try:
            while batch := self._next_batch():
                buffers: list[bytes | memoryview] = []
                for header, payload in batch:
                    self._sending.advance(header)
                    buffers += (pack_header(header), payload)
                self.frames_sent += len(batch)
                send_all(self._socket, buffers)
                progress.count("bytes_sent", sum(map(len, buffers)))
        except OSError as error:  # the receiving thread sees the same end, and reports it
            _log.debug("sending to %s ended: %s", self._peer, error)
            hang_up(self._socket)
        except FleetError as error:  # a frame of ours that may not leave; the receiving thread reports it
            self._refused = error
            hang_up(self._socket)

    def _next_batch(self) -> list[Item]:
        """Wait for a frame and take those that have queued up behind it; empty at the end."""
        batch: list[Item] = []
        item = self._queue.get()
        while item is not None:
            batch.append(item)
            if len(batch) == _BATCH or self._queue.empty():
                return batch
            item = self._queue.get()
        if batch:
            self._queue.put(None)
        return batch


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
