"""The outgoing direction of one connection. Any thread may send frames; they leave in order.

`Outgoing.send` never waits. If no other frame is queued, the calling thread itself passes a small frame to
the kernel, which is faster than waking another thread. The event loop's thread sends queued frames whenever
the kernel accepts bytes. The loop's pool reads large lazy bytes, because reading them may convert them, or
wait for a step.
"""

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from fleet.errors import FleetError
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.parameter_server.transport.event_loop import EventLoop
from fleet.parameter_server.transport.sockets import hang_up
from fleet.parameter_server.transport.tls import TlsSocket
from fleet.process import progress
from fleet.wire import Conversation, Header, pack_header

__all__ = ["RUN_BYTES", "SMALL_BYTES", "TURN_BYTES", "Outgoing", "OutgoingFrame"]

RUN_BYTES: Final = 1 << 18
"""The size of a connection's buffer for lazy bytes, which limits the bytes of one read."""
SMALL_BYTES: Final = 1 << 16
"""The largest payload for which no other thread is woken, to use it or to pass it to the kernel."""
TURN_BYTES: Final = 1 << 20
"""The number of bytes that the loop moves for one connection before it serves the others."""
_ALIGNMENT_BYTES: Final = 64
_BATCH: Final = 128
"""The largest number of queued frames, or of buffers, in one kernel call."""
_log = logging.getLogger(__name__)


class OutgoingFrame(NamedTuple):
    """A frame to send."""

    header: Header
    payload: bytes | memoryview | LazyBytes


class Outgoing:
    """The outgoing direction of a connection.

    Parameters
    ----------
    connected : socket.socket
        The connection, which must be non-blocking before the first `flush`.
    peer : str
        The name of the other end, for messages.
    conversation : Conversation
        The state of the direction, which frames advance.
    loop : EventLoop
    changed : callable
        Called by the loop's thread after `blocked` has become True, and after the pool has sent its part.

    Attributes
    ----------
    frames_sent : int
        The number of frames that were passed to the kernel, or were about to be; they may not have arrived.
    blocked : bool
        Whether the kernel accepts no more bytes at present. Call `unblock` as soon as it does again.
    in_pool : bool
        Whether the pool is reading and sending lazy bytes.
    has_failed : bool
        Whether sending has failed or was refused, so that every later frame is dropped.
    refusal : FleetError or None
        The reason why a frame could not be sent, unless the connection broke.
    flushed : Event
        Set once all frames have been sent and the direction has ended, or nothing more can be sent.
    """

    def __init__(
        self,
        connected: socket.socket,
        peer: str,
        conversation: Conversation,
        loop: EventLoop,
        changed: Callable[[], None],
    ) -> None:
        self.frames_sent = 0
        self.blocked = self.in_pool = self.has_failed = False
        self.refusal: FleetError | None = None
        self.flushed = threading.Event()
        self._socket = connected
        self._tls = connected if isinstance(connected, TlsSocket) else None
        self._peer = peer
        self._conversation = conversation
        self._loop = loop
        self._changed = changed
        self._lock = threading.Lock()
        """Guards the queue: keeps frames in order, and ensures that no frame follows the end."""
        self._finishing = False
        self._queue: deque[bytes | memoryview | tuple[LazyBytes, int]] = deque()
        """What to send. Only the beginning of a frame is `bytes`; lazy bytes have the next offset to read."""
        self._has_large = False
        """Whether the queue may contain anything except whole small frames."""
        self._leaving: list[bytes | memoryview] = []
        """The buffers of the next kernel call."""
        self._flushing = True
        """Whether a thread is passing bytes to the kernel, or is about to; only this thread uses `_leaving`.

        True from the beginning: frames stay in the queue until the connection calls `flush` as it starts.
        """
        self._runs = memoryview(b"")
        """The buffer for lazy bytes, allocated on first use."""

    def send(self, *frames: OutgoingFrame) -> None:
        """Send frames without waiting; unless lazy, a payload must not change until the kernel has it."""
        with self._lock:
            if self._finishing or self.has_failed:
                return
            try:
                for header, payload in frames:
                    self._conversation.advance(header)
                    packed = pack_header(header)
                    if isinstance(payload, LazyBytes):
                        self._queue += (packed, (payload, 0))
                        self._has_large = True
                    elif len(payload) > SMALL_BYTES:
                        self._queue += (packed, memoryview(payload))
                        self._has_large = True
                    else:
                        self._queue.append(b"".join((packed, payload)))
                if self._flushing or self.blocked or not self._queue:
                    return
                self._flushing = True
                if threading.get_ident() == self._loop.ident:
                    self._loop.call_next(self._send_answers)  # together with the handler's other answers
                elif self._has_large or len(self._queue) > _BATCH:
                    self._loop.call(self.flush)
                else:
                    self._send_small()
            except BaseException as raised:
                self._fail(raised)
                if not isinstance(raised, Exception):  # raised by a signal handler, so the caller must get it
                    raise

    def flush(self) -> None:
        """Pass queued bytes to the kernel; called by the one thread for which `_flushing` is True."""
        sent = 0
        try:
            while self._leaving or self._gather():
                sent += self._pass_on()
                if sent >= TURN_BYTES and not self.in_pool:
                    self._loop.call(self.flush)
                    return
        except BlockingIOError:
            self._block()
        except Exception as raised:  # noqa: BLE001 - the connection reports it at its end
            self.in_pool = False
            self._fail(raised)

    def unblock(self) -> None:
        """Continue sending, because the kernel accepts bytes again; called by the loop's thread."""
        self._flushing, self.blocked = True, False  # in this order: `send` must always see one of them
        self.flush()

    def finish(self) -> None:
        """End this direction after the queued frames; called by the loop's thread, after `refuse`."""
        with self._lock:
            idle = not self._flushing and not self.blocked
        if idle:
            self._end()

    def refuse(self, *, now: bool = False) -> None:
        """Drop all later frames and, if `now`, the queued frames too."""
        with self._lock:
            self._finishing = True
            self.has_failed |= now

    def _send_answers(self) -> None:
        """Pass the frames that a handler has queued to the kernel; called by the loop's thread."""
        try:
            with self._lock:
                if not self._has_large and len(self._queue) <= _BATCH:
                    self._send_small()
                    if not self._finishing or self.blocked:
                        return
        except Exception as raised:  # noqa: BLE001 - the connection reports it at its end
            self._fail(raised)
            return
        self.flush()

    def _send_small(self) -> None:
        """Pass the queued frames, all of them small, to the kernel in one call; call with the lock held."""
        whole, taken, blocks = b"".join(self._queue), 0, False  # type: ignore[arg-type]  # all are bytes
        self.frames_sent += len(self._queue)
        self._queue.clear()
        try:
            taken = self._socket.sendmsg((whole,))
            if self._tls is not None:
                self._tls.flush()
        except BlockingIOError:
            blocks = True
        progress.count("bytes_sent", taken)
        if taken < len(whole):
            self._leaving.append(memoryview(whole)[taken:])
            blocks = True
        if blocks:
            self._block()
        else:
            self._flushing = False

    def _flush_lazily(self) -> None:
        """Pass queued bytes to the kernel, and read lazy bytes; called by the pool."""
        self.flush()
        self._loop.call(self._changed)

    def _gather(self) -> bool:
        """Move the buffers of the next kernel call from the queue to `_leaving`; this reads lazy bytes.

        Returns False if this thread has nothing left to send.
        """
        used_bytes, leaving, queued = 0, self._leaving, self._queue
        while queued and len(leaving) < _BATCH:
            entry = queued[0]
            if not isinstance(entry, tuple):
                leaving.append(entry)
                self.frames_sent += type(entry) is bytes
                queued.popleft()
                continue
            lazy, begin = entry
            missing = len(lazy) - begin
            if len(lazy) > SMALL_BYTES and not self.in_pool:
                if not leaving:
                    self.in_pool = True
                    self._loop.submit(self._flush_lazily)
                    return False
                break
            if used_bytes and used_bytes + missing > RUN_BYTES:
                break  # a payload that fits in one run is not divided
            if not self._runs:
                self._runs = memoryview(bytearray(RUN_BYTES))
            run = self._runs[used_bytes:][:missing]
            lazy.read(begin, run)
            used_bytes += -(-len(run) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            leaving.append(run)
            if len(run) < missing:
                queued[0] = lazy, begin + len(run)
                break
            queued.popleft()
        return bool(leaving) or self._has_more()

    def _has_more(self) -> bool:
        """Gather frames that were queued meanwhile; if there are none, end this flush and return False."""
        if self._tls is not None:
            self._tls.flush()
        with self._lock:
            flushing = bool(self._queue)
            self._has_large &= flushing
            # Before `_flushing`: the next thread that flushes must not take itself for the pool.
            self.in_pool &= flushing
            self._flushing = flushing
            ends = self._finishing and not flushing
        if ends:
            self._end()
        return self._flushing and self._gather()

    def _pass_on(self) -> int:
        """Pass bytes to the kernel; return the number of bytes that it has accepted."""
        leaving, first = self._leaving, 0
        taken = rest = self._socket.sendmsg(leaving)
        progress.count("bytes_sent", taken)
        while first < len(leaving) and rest >= len(leaving[first]):
            rest -= len(leaving[first])
            first += 1
        del leaving[:first]
        if rest:
            leaving[0] = memoryview(leaving[0])[rest:]
        return taken

    def _block(self) -> None:
        self.in_pool = False  # first: as soon as the rest is set, the loop may flush
        self.blocked, self._flushing = True, False  # in this order: `send` must always see one of them
        self._loop.call(self._changed)

    def _end(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self.flushed.set()

    def _fail(self, raised: BaseException) -> None:
        """Hang up after a failure or signal during sending, because part of a frame may be missing."""
        self.has_failed = True
        if isinstance(raised, FleetError):  # the protocol forbids a frame of this end
            self.refusal = raised
        elif isinstance(raised, Exception) and not isinstance(raised, OSError):
            _log.error("a frame for %s could not be read", self._peer, exc_info=raised)
            self.refusal = FleetError(
                f"a frame for {self._peer} could not be read ({type(raised).__name__}: {raised}); its "
                "traceback is in the log"
            )
        else:
            _log.debug("sending to %s ended: %r", self._peer, raised)
        self.flushed.set()
        hang_up(self._socket)
