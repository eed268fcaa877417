"""Accepted connections of this process: limits, relaying, and closing in forked children.

A peer in the job authenticates within milliseconds. Until then its connection is half-open and occupies a
thread or file descriptors. `ConnectionLimit` and `HalfOpen` limit the number and duration of half-open
connections.
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Final, Generic, TypeVar

__all__ = ["MAX_HALF_OPEN", "ConnectionLimit", "HalfOpen", "Pair", "Relay", "own", "relay", "relay_loop"]

MAX_HALF_OPEN: Final = 64
_GREETING_SECONDS: Final = 10.0
_PAUSE_SECONDS: Final = 0.1
_LOG_INTERVAL_SECONDS: Final = 60.0
_CHUNK_BYTES: Final = 1 << 16
_starting = threading.Lock()
_owned: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
_log = logging.getLogger(__name__)

Connection = TypeVar("Connection", bound=Hashable)
Onward = Callable[[socket.socket], socket.socket]
"""Opens the onward connection for an accepted connection; an OSError refuses the accepted connection."""


def own(connection: socket.socket) -> socket.socket:
    """Make forked children close their copy of a socket, which would otherwise keep the connection open."""
    _owned.add(connection)
    return connection


def _close_in_child() -> None:
    for connection in list(_owned):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


class ConnectionLimit(Generic[Connection]):
    """Limits half-open connections by evicting the oldest connection of the host that has the most.

    A host that opens many connections therefore evicts only its own.

    Parameters
    ----------
    most : int
        The number of connections allowed.
    """

    def __init__(self, most: int = MAX_HALF_OPEN) -> None:
        self._most = most
        self._count = 0
        self._hosts: dict[str, dict[Connection, None]] = {}
        """The connections of each host, oldest first."""

    def add(self, connection: Connection, host: str) -> Connection | None:
        """Count a connection; return the connection to close if the limit is exceeded, else None."""
        self._hosts.setdefault(host, {})[connection] = None
        self._count += 1
        if self._count <= self._most:
            return None
        largest = max(self._hosts, key=lambda each: len(self._hosts[each]))
        evicted = next(iter(self._hosts[largest]))
        self.remove(evicted, largest)
        return evicted

    def remove(self, connection: Connection, host: str) -> None:
        """Stop counting a connection; do nothing if it is not counted."""
        of_host = self._hosts.get(host, {})
        if connection in of_host:
            del of_host[connection]
            self._count -= 1
            if not of_host:
                del self._hosts[host]


class HalfOpen:
    """Limits the number and duration of connections that are still authenticating.

    Parameters
    ----------
    most : int
        The number of connections allowed.
    seconds : float
        The time limit for the whole authentication.
    """

    def __init__(self, most: int = MAX_HALF_OPEN, seconds: float = _GREETING_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._limit = ConnectionLimit[socket.socket](most)

    @contextlib.contextmanager
    def bounded(self, connected: socket.socket) -> Iterator[None]:
        """Limit a connection while it authenticates; close it after a timeout or when it is evicted.

        Raises
        ------
        ConnectionError
            No thread is free to limit the time, so the connection must be refused.
        """
        host = _host_of(connected)
        with self._lock:
            evicted = self._limit.add(connected, host)
        if evicted is not None:
            _shut_down(evicted)
        timer = threading.Timer(self._seconds, _shut_down, (connected,))
        timer.daemon = True
        try:
            try:
                timer.start()
            except RuntimeError as error:
                raise ConnectionError(str(error)) from error
            yield
        finally:
            timer.cancel()
            with self._lock:
                self._limit.remove(connected, host)


def _host_of(connected: socket.socket) -> str:
    """Return the peer's address, or an empty string for a Unix socket or a closed connection."""
    try:
        name = connected.getpeername()
    except OSError:
        return ""
    return str(name[0]) if connected.family != socket.AF_UNIX else ""


def _shut_down(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):
        # Not close(): that would leave a thread blocked in recv(), and free a descriptor number that the
        # thread still uses.
        connected.shutdown(socket.SHUT_RDWR)


class Relay:
    """Accepts connections and relays bytes between each of them and an onward connection.

    Parameters
    ----------
    listener : socket.socket
        The listening socket, which the relay closes.
    onward : callable
        See `Onward`.
    log_refusals : bool
        Whether to log refused connections and a lack of file descriptors or threads.
    """

    def __init__(self, listener: socket.socket, onward: Onward, *, log_refusals: bool = False) -> None:
        self.port: int = listener.getsockname()[1]
        self.refusal = ""
        """The reason why the latest connection was refused; empty if it was relayed."""
        self._listener = own(listener)
        self._onward = onward
        self._log_refusals = log_refusals
        self._closed = False
        self._logged_at = float("-inf")
        threading.Thread(target=self._accept, name="fleet-gate", daemon=True).start()

    def close(self) -> None:
        """Stop accepting connections; established connections stay open."""
        self._closed = True
        with contextlib.suppress(OSError):
            # On Linux, close() alone does not wake the thread that is blocked in accept().
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connected, address = self._listener.accept()
            except OSError as error:
                self._pause(error)
                continue
            try:
                threading.Thread(
                    target=self._connect, args=(connected, str(address[0])), name="fleet-gate", daemon=True
                ).start()
            except RuntimeError as error:
                connected.close()
                self._pause(error)

    def _pause(self, error: OSError | RuntimeError) -> None:
        """Pause before another attempt to accept, because file descriptors or threads have run out."""
        if not self._closed:
            self.refusal = f"a connection could not be accepted: {error}"
            self._warn("%s; trying again", self.refusal)
            time.sleep(_PAUSE_SECONDS)

    def _connect(self, connected: socket.socket, host: str) -> None:
        try:
            onward = self._onward(connected)
        except OSError as error:
            self.refusal = str(error)
            self._warn("refused a connection of %s to the store: %s", host, self.refusal)
            connected.close()
            return
        self.refusal = ""
        with contextlib.suppress(OSError):  # if one connection has already ended, the relay closes the other
            for each in (own(connected), own(onward)):
                # The store's requests are small. Nagle's algorithm and delayed acknowledgments would add up
                # to 40 ms to each.
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        relay(connected, onward)

    def _warn(self, message: str, *values: str) -> None:
        """Log a warning at most once a minute, because an unauthenticated host may connect often."""
        now = time.monotonic()
        if self._log_refusals and now - self._logged_at >= _LOG_INTERVAL_SECONDS:
            self._logged_at = now
            _log.warning(message, *values)


def relay(one: socket.socket, other: socket.socket) -> None:
    """Relay bytes between two connections until both have ended, and then close them."""
    for each in (one, other):
        each.setblocking(False)
    loop = relay_loop()
    loop.call_soon_threadsafe(Pair, loop, one, other)


def relay_loop() -> asyncio.AbstractEventLoop:
    """Return this process's event loop for relayed connections, which runs in a separate thread.

    One thread serves all pairs: a pod may run few threads, and trainer 0 of a collective job has two or three
    connections with each of thousands of trainers.
    """
    with _starting:
        return _loop(os.getpid())


@functools.lru_cache(maxsize=1)
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """Start the event loop of process `pid`, once per process, because a fork does not copy threads."""
    del pid
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fleet-gate", daemon=True).start()
    return loop


class Pair:
    """Two connections whose bytes are relayed to each other.

    The event loop keeps a reference to the pair while either connection is open. Bytes are relayed in the
    loop's callbacks, because a coroutine per direction would take three times the processor time.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        The event loop. The pair must be created and closed in its thread.
    one, other : socket.socket
        Non-blocking connections.
    ended : callable, optional
        Called when both are closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        one: socket.socket,
        other: socket.socket,
        ended: Callable[[], None] | None = None,
    ) -> None:
        self._loop = loop
        self._both = one, other
        self._open = 2
        self._ended = ended
        for source, sink in ((one, other), (other, one)):
            loop.add_reader(source, self._receive, source, sink)

    def close(self) -> None:
        """Close both connections immediately."""
        for each in self._both:
            self._loop.remove_reader(each)
            self._loop.remove_writer(each)
            each.close()
        if self._ended is not None:
            self._ended()

    def _receive(self, source: socket.socket, sink: socket.socket) -> None:
        """Receive the available bytes, and send as many as the sink accepts."""
        try:
            received = source.recv(_CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            received = b""
        if received:
            self._send(received, source, sink)
        else:
            self._end(source, sink)

    def _send(self, data: bytes, source: socket.socket, sink: socket.socket) -> None:
        try:
            sent = sink.send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._end(source, sink)
            return
        if sent < len(data):
            self._loop.remove_reader(source)  # backpressure: receive nothing more before this has been sent
            self._loop.add_writer(sink, self._resume, data[sent:], source, sink)

    def _resume(self, rest: bytes, source: socket.socket, sink: socket.socket) -> None:
        self._loop.remove_writer(sink)
        self._loop.add_reader(source, self._receive, source, sink)
        self._send(rest, source, sink)

    def _end(self, source: socket.socket, sink: socket.socket) -> None:
        """Relay the end of one direction; close both connections once both directions have ended."""
        self._loop.remove_reader(source)
        for each, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                each.shutdown(how)
        self._open -= 1
        if not self._open:
            self.close()
