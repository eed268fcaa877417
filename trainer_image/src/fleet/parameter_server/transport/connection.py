"""A data connection: sends and receives frames concurrently after the handshake.

Both ends work in the same way. `Connection` receives and delivers frames in the event loop's thread: many
small frames in one kernel call, and a large payload directly into its receive buffer. It receives nothing
while a frame waits for a receive buffer, or while the pool works on a frame, so that frames are used in
order.

`Outgoing` sends, for any thread, in order, and never waits. If no other frame is queued, the calling thread
itself passes a small frame to the kernel, which is faster than waking another thread. The event loop's thread
sends queued frames whenever the kernel accepts bytes. The loop's pool reads large lazy bytes, because reading
them may convert them, or wait for a step.
"""

import contextlib
import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

from fleet.errors import DeadlineExceededError, FleetError, PeerLostError
from fleet.parameter_server.transport.arena import LazyBytes
from fleet.parameter_server.transport.event_loop import READ, WRITE, EventLoop
from fleet.parameter_server.transport.sockets import BytesMoved, ConnectionEndedError, bytes_moved, hang_up
from fleet.parameter_server.transport.tls import TlsSocket
from fleet.process import progress
from fleet.wire import HEADER_BYTES, TENSORS, Conversation, Header, pack_header, read_header

__all__ = [
    "RUN_BYTES",
    "SMALL_BYTES",
    "BrokenConnectionError",
    "BufferOf",
    "Connection",
    "Deliver",
    "Directions",
    "End",
    "Frame",
    "NotYet",
    "OutgoingFrame",
    "Work",
]

RUN_BYTES: Final = 1 << 18
"""The size of a connection's buffer for lazy bytes, which limits the bytes of one read."""
SMALL_BYTES: Final = 1 << 16
"""The largest payload that is handled or sent without waking another thread."""
_TURN_BYTES: Final = 1 << 20
"""The number of bytes that the loop moves for one connection before it serves the others."""
_ALIGNMENT_BYTES: Final = 64
_BATCH: Final = 128
"""The largest number of queued frames, or of buffers, in one kernel call."""
_WORK_SECONDS: Final = 600.0
"""The time limit for handling one frame, which may include the update of a block."""
_log = logging.getLogger(__name__)


class BrokenConnectionError(PeerLostError):
    """The connection broke before the session ended; the peer may still be alive."""


class Frame(NamedTuple):
    """A received frame; its payload is empty if its bytes were written to a receive buffer."""

    header: Header
    payload: bytes | memoryview = b""


class OutgoingFrame(NamedTuple):
    """A frame to be sent."""

    header: Header
    payload: bytes | memoryview | LazyBytes


class End(NamedTuple):
    """The end of a connection, with its error; the error is None after a normal end."""

    error: FleetError | None


class NotYet(NamedTuple):
    """The result of a `BufferOf` whose frame must wait, for example until a buffer is free.

    Attributes
    ----------
    seconds : float or None
        The time after which the connection asks again even without a call of `Connection.resume`; None if it
        waits for that call.
    """

    seconds: float | None = None


Work = Callable[[], object]
"""Long or blocking work for a frame, which the loop's pool runs; the result is ignored."""
Deliver = Callable[[Frame | End], Work | None]
"""Called by the event loop with each frame in order, and finally once with an `End`; must not wait.

Returns None, or work on the frame. The loop's pool then does the work before the next frame is delivered.
"""
BufferOf = Callable[[Header], memoryview | NotYet | None]
"""Returns the receive buffer for a block's bytes, or None if the connection must allocate memory.

After `NotYet`, it is called again for the same header.
"""


@dataclass(frozen=True, slots=True)
class Directions:
    """The protocol states of a connection's two directions after the handshake."""

    sending: Conversation
    receiving: Conversation


class Connection:
    """A data connection, from the end of the handshake until it is closed.

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
        """Received bytes that have not been processed yet."""
        self._header: Header | None = None
        """The header of the frame that is being received."""
        self._payload: memoryview | None = None
        """The memory for the payload of that frame; None until the memory is available."""
        self._filled = 0
        """The number of bytes of the payload that have arrived."""
        self._lands = False
        """Whether the memory for the payload is a receive buffer."""
        self._large = False
        """Whether the previous payload was large.

        If so, only a header is received next, so that another large payload goes directly into its memory.
        """
        self._paused = False
        """Whether receiving is paused, because the next frame must wait."""
        self._timed = False
        """Whether a timer is running, after which the connection asks for a receive buffer again."""
        self._worker = 0
        """The identifier of the thread that works on a frame; -1 until the work begins, 0 without work."""
        self._ended = self._closing = self._closed = False
        """Whether the end has been delivered (or is being), `_close` was called, and the socket is closed."""
        self._over = threading.Event()
        """Set once the end has been delivered."""
        self._gone = threading.Event()
        """Set once the peer will send nothing more."""

    @property
    def frames_sent(self) -> int:
        """The number of frames passed to the kernel, or about to be passed; they may not have arrived."""
        return self._outgoing.frames_sent

    def start(self) -> None:
        """Start to send and receive, unless `finish` or `close` was called earlier."""
        # `finish` or `close` of another thread may come first. Then the loop never sees this connection, and
        # the other thread closes the socket itself.
        with self._starting:
            if self._finishing:
                return
            self._started = True
            # Not earlier: the handshake uses blocking calls with a timeout on this socket.
            self._socket.setblocking(False)
        self._loop.call(self._begin)

    def resume(self) -> None:
        """Request a receive buffer again after `NotYet`. Any thread may call this."""
        self._loop.call(self._ask_again)

    def bytes_moved(self) -> BytesMoved | None:
        """Return the connection's byte counts, or None if the system does not provide them."""
        return bytes_moved(self._socket)

    def hang_up(self) -> None:
        """Shut down the connection as if it had broken; an `End` is delivered."""
        hang_up(self._socket)

    def finish(self, timeout_seconds: float) -> None:
        """Send all queued frames and close after the peer has read them; drop frames that still arrive."""
        with self._starting:
            self._finishing = True
        self._outgoing.refuse()
        if self._started and not self._is_own_thread:
            self._loop.call(self._finish)
            self._outgoing.flushed.wait(timeout_seconds)
            self._gone.wait(timeout_seconds)
        self.close()

    def close(self) -> None:
        """Close the connection immediately; deliver an `End` unless one was delivered before.

        Raises
        ------
        DeadlineExceededError
            The work on a frame does not end.
        """
        with self._starting:
            self._finishing = True
        self._outgoing.refuse(now=True)
        # The socket is only shut down here, and the loop closes it: otherwise a descriptor that the loop or
        # the pool still uses could be reused for another connection.
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
        """True if the calling thread serves this connection, so that waiting here would deadlock."""
        return threading.get_ident() in (self._loop.ident, self._worker)

    # The methods below are called by the loop's thread, except `_work`.

    def _begin(self) -> None:
        self._outgoing.flush()
        self._serve()  # TLS may hold received bytes already

    def _serve(self, events: int = READ) -> None:
        """Send and receive as much as the socket allows now."""
        if events & WRITE and self._outgoing.blocked:
            self._outgoing.unblock()
        # A queued call or a timer may reach this method after the connection has been closed.
        if events & READ and not self._paused and not self._closed:
            if self._finishing:
                self._discard()
            elif not self._ended:
                self._read()
        # In the usual state there is nothing to change; this runs for every event.
        if self._watched != READ or self._paused or self._ended or self._finishing or self._outgoing.blocked:
            self._watch()

    def _watch(self) -> None:
        """Watch the socket for the events that the connection needs next."""
        # A paused socket is not watched: the selector is level-triggered, so unread bytes would wake the loop
        # again and again.
        reads = not self._paused and (not self._ended or self._finishing) and not self._gone.is_set()
        events = 0 if self._closed else (READ if reads else 0) | (WRITE if self._outgoing.blocked else 0)
        if events != self._watched:
            before, self._watched = self._watched, events
            self._loop.watch(self._socket, before, events, self._serve)

    def _read(self) -> None:
        """Receive the available data and deliver its frames."""
        buffer, begin, end, received = self._loop.buffer, 0, len(self._rest), 0
        # All connections share this buffer, so bytes that could not be used yet were copied out, and are now
        # copied in again.
        buffer[:end] = self._rest
        self._rest = b""
        drained = False
        try:
            while True:
                if end or self._header is not None:
                    begin = self._take_frames(begin, end)
                if self._paused or self._ended or drained:
                    break
                if received >= _TURN_BYTES:
                    # This is not left to the selector: TLS may have taken the remaining bytes out of the
                    # socket, which then would not become readable.
                    self._loop.call(self._serve)
                    break
                if (payload := self._payload) is not None:
                    wanted, begin, end = payload[self._filled :], 0, 0
                else:
                    buffer[: end - begin] = buffer[begin:end]
                    begin, end = 0, end - begin
                    wanted = buffer[end : HEADER_BYTES if self._large else None]
                count = self._receive(wanted, end)
                # Fewer bytes than asked for mean that no more have arrived. This saves a call that would
                # return EAGAIN.
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
        """Deliver the frames in the loop's buffer; return the offset of the first unused byte."""
        buffer = self._loop.buffer
        while not self._paused and not self._ended:
            header = self._header
            if header is None:
                header = read_header(buffer[begin:end]) if end - begin >= HEADER_BYTES else None
                if header is None:
                    break
                # The header is checked before memory is allocated, because the peer may claim any size.
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
        """Stop receiving until a receive buffer may be free."""
        self._paused = True
        if landing.seconds is not None and not self._timed:
            self._timed = True
            self._loop.call_later(landing.seconds, self._time_out)

    def _receive(self, wanted: memoryview, kept: int) -> int:
        """Receive into memory; return the number of bytes, or 0 if none are available."""
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
        """Convert a callback's exception, such as an OSError from a user's optimizer, to a FleetError."""
        if isinstance(raised, FleetError):
            return raised
        _log.warning("a frame of %s could not be taken", self._peer, exc_info=raised)
        return FleetError(
            f"a frame of {self._peer} could not be taken ({type(raised).__name__}: {raised}); its "
            "traceback is in the log"
        )

    def _work(self, work: Work) -> None:
        """Handle a frame in a thread of the pool."""
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
        # This call may be late: the frame may have found a buffer meanwhile, and the pause may be that of a
        # frame in the pool, which ends it itself.
        if self._paused and not self._worker:
            self._paused = False
            self._serve()

    def _time_out(self) -> None:
        self._timed = False
        self._ask_again()

    def _end(self, error: FleetError | None) -> None:
        """Deliver the end of the connection; then discard all data that the peer still sends."""
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
            # This runs even if `deliver` raises, because `close` and `fence` wait for `_over`.
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
        """Discard received bytes until the peer closes.

        Closing a socket with unread bytes resets the connection, and after a reset the peer could not read an
        error that this end has sent.
        """
        if self._gone.is_set():
            return
        try:
            for _ in range(_TURN_BYTES // len(self._loop.buffer)):
                if not self._receive(self._loop.buffer, 0):
                    break
        except FleetError as raised:
            self._gone.set()
            self._end(raised)

    def _close(self) -> None:
        """Deliver the end and close the socket, once no thread handles a frame."""
        self._closing = True
        # `_worked` or `_sending_changed` calls this again as soon as the pool no longer uses the socket.
        if self._worker or self._outgoing.in_pool or self._closed:
            return
        self._outgoing.flushed.set()
        self._gone.set()
        if not self._ended:
            self._end(self._broken(ConnectionEndedError("it was closed at this end")))
        # The session may have closed the connection while its end was delivered.
        if not self._closed:
            self._closed = True
            self._watch()
            self._socket.close()


class Outgoing:
    """The sending direction of a connection.

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
        """The data to send. Only a frame's beginning is `bytes`; lazy bytes have the next offset to read."""
        self._has_large = False
        """Whether the queue may contain large or lazy payloads."""
        self._leaving: list[bytes | memoryview] = []
        """The buffers to pass to the kernel in the next call."""
        self._flushing = True
        """Whether a thread is passing bytes to the kernel, or is about to; only this thread uses `_leaving`.

        True from the beginning: frames stay in the queue until the connection calls `flush` as it starts.
        """
        self._runs = memoryview(b"")
        """The buffer for lazy bytes, allocated on first use."""

    def send(self, *frames: OutgoingFrame) -> None:
        """Send frames without blocking. Unless lazy, a payload must not change until the kernel has it."""
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
        """Pass queued bytes to the kernel. Only the thread that has set `_flushing` may call this."""
        sent = 0
        try:
            while self._leaving or self._gather():
                sent += self._pass_on()
                if sent >= _TURN_BYTES and not self.in_pool:
                    self._loop.call(self.flush)
                    return
        except BlockingIOError:
            self._block()
        except Exception as raised:  # noqa: BLE001 - the connection reports it at its end
            self.in_pool = False
            self._fail(raised)

    def unblock(self) -> None:
        """Continue to send when the kernel accepts bytes again. Called by the loop's thread."""
        self._flushing, self.blocked = True, False  # in this order: `send` must always see one of them
        self.flush()

    def finish(self) -> None:
        """Close this direction after the queued frames. Called by the loop's thread after `refuse`."""
        with self._lock:
            idle = not self._flushing and not self.blocked
        if idle:
            self._end()

    def refuse(self, *, now: bool = False) -> None:
        """Drop all later frames; if `now` is True, drop the queued frames as well."""
        with self._lock:
            self._finishing = True
            self.has_failed |= now

    def _send_answers(self) -> None:
        """Pass the frames that a handler has queued to the kernel. Called by the loop's thread."""
        try:
            with self._lock:
                if not self._has_large and len(self._queue) <= _BATCH:
                    self._send_small()
                    # `finish` does not end the direction while this thread is sending, so `flush` has to.
                    if not self._finishing or self.blocked:
                        return
        except Exception as raised:  # noqa: BLE001 - the connection reports it at its end
            self._fail(raised)
            return
        self.flush()

    def _send_small(self) -> None:
        """Pass the queued frames, all of them small, to the kernel in one call. The caller holds the lock."""
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
        """Read lazy bytes and pass queued bytes to the kernel. Called by a thread of the pool."""
        self.flush()
        self._loop.call(self._changed)

    def _gather(self) -> bool:
        """Move buffers for the next kernel call from the queue to `_leaving`, and read lazy bytes.

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
            # What precedes large lazy bytes leaves first, from the loop's thread; then the pool continues
            # from here.
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
            # The buffer is free: this method runs only once the kernel has all that an earlier call put here.
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
        """Gather frames that were queued meanwhile; if there are none, stop flushing and return False."""
        # This comes before the thread stops flushing, because encrypted bytes of its last call may remain.
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
        """Pass bytes to the kernel; return the number of bytes that it accepted."""
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
        """End the connection after an error during sending, because a frame may have been sent in part."""
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
        # The receiving direction notices this, and delivers the end with `refusal`, if there is one.
        hang_up(self._socket)
