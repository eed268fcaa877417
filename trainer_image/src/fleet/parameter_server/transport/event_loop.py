"""The event loop for all data connections of a process: one thread, and a pool for long work.

One thread waits for all sockets, so that the number of threads does not depend on the number of connections.
It must never wait for anything else: work that takes long, or may wait for another thread, is submitted to
the pool. The pool has a fixed number of threads, so work must not wait for other work that has not begun.
"""

import contextlib
import heapq
import itertools
import logging
import queue
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from fleet.process.connections import own

__all__ = ["READ", "WRITE", "EventLoop", "WorkPool"]

READ: Final = selectors.EVENT_READ
WRITE: Final = selectors.EVENT_WRITE
_BUFFER_BYTES: Final = 1 << 18
_JOIN_SECONDS: Final = 1.0
"""The time limit on waiting for the loop's thread to end, because a user's optimizer may be running in it."""
_log = logging.getLogger(__name__)


class WorkPool:
    """A pool of threads for long or blocking work.

    Parameters
    ----------
    num_threads : int
        The number of threads.
    """

    def __init__(self, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads = [
            # Daemon threads: a user's optimizer that does not return must not keep the process from ending.
            threading.Thread(target=self._run, name=f"fleet-work-{number}", daemon=True)
            for number in range(num_threads)
        ]

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[[], None]) -> None:
        """Queue a function for the pool. The function must not raise."""
        self._queue.put(work)

    def close(self) -> None:
        """Let the threads end after the queued work, without waiting for them."""
        for _ in self._threads:
            self._queue.put(None)

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()
            del work  # so that no reference keeps its memory while the thread waits


class EventLoop:
    """A thread that calls the handlers of ready sockets, with a pool of threads for long work.

    Parameters
    ----------
    num_workers : int
        The number of threads of the pool.

    Attributes
    ----------
    buffer : memoryview
        Memory for the loop's thread; its content is valid only until the current handler returns.
    ident : int
        The identifier of the loop's thread; 0 before it runs.
    submit : callable
        Queues work for the pool; see `WorkPool.submit`.
    call_next : callable
        Calls a function as soon as the current handler returns; only in the loop's thread.
    """

    def __init__(self, num_workers: int) -> None:
        self.buffer = memoryview(bytearray(_BUFFER_BYTES))
        self._pool = WorkPool(num_workers)
        self.submit = self._pool.submit
        self._calls: deque[Callable[[], None]] = deque()
        self._next: list[Callable[[], None]] = []
        self.call_next = self._next.append
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._asleep = False
        """Whether the thread may be waiting for sockets, so that `call` has to wake it."""
        self._closing = False
        self.ident = 0
        self._thread = threading.Thread(target=self._run, name="fleet-io", daemon=True)

    def start(self) -> None:
        """Start the threads. They also run the calls and the work that were queued before."""
        self._selector = selectors.DefaultSelector()
        self._wakes, self._woken = socket.socketpair()
        for each in (self._wakes, self._woken):
            own(each).setblocking(False)
        self._pool.start()
        self._thread.start()

    def close(self) -> None:
        """End the threads after all queued calls and work. The caller must first close the connections."""
        if self._thread.is_alive() and not self._closing:
            self._closing = True
            self._wake()
            self._thread.join(_JOIN_SECONDS)
            # After the loop's thread, which may still submit work.
            self._pool.close()

    def wait_for(self, event: threading.Event, timeout_seconds: float) -> bool:
        """Wait until an event is set or the loop's thread ends; return False after a timeout.

        The loop's own thread must not call this.
        """
        until = time.monotonic() + timeout_seconds
        while not event.wait(min(_JOIN_SECONDS, timeout_seconds)) and self._thread.is_alive():
            if time.monotonic() >= until:
                return False
        return True

    def call(self, function: Callable[[], None]) -> None:
        """Queue a function that the loop's thread calls. Any thread may call this method."""
        self._calls.append(function)
        if self._asleep:
            self._wake()

    def call_later(self, seconds: float, function: Callable[[], None]) -> None:
        """Call a function after a delay in seconds. Only the loop's thread may call this method."""
        # The number decides between equal times, because functions cannot be compared.
        heapq.heappush(self._timers, (time.monotonic() + seconds, next(self._numbers), function))

    def watch(
        self, connected: socket.socket, before: int, events: int, handler: Callable[[int], None]
    ) -> None:
        """Set the events for which a socket is watched. Only the loop's thread may call this method.

        Parameters
        ----------
        connected : socket.socket
        before, events : int
            The previous and the new events: `READ`, `WRITE`, both, or 0 for none.
        handler : callable
            Called with those of the events that have occurred.
        """
        if not before:
            self._selector.register(connected, events, handler)
        elif not events:
            self._selector.unregister(connected)
        else:
            self._selector.modify(connected, events, handler)

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # its buffer is full: the thread will wake anyway
            self._wakes.send(b"\0")

    def _run(self) -> None:
        self.ident = threading.get_ident()
        self._selector.register(self._woken, READ, self._take_wake)
        try:
            while not self._closing or self._calls:
                self._asleep = True  # before `_calls` is read, so that every later call wakes this thread
                seconds = 0.0 if self._calls or self._closing else None
                if self._timers and seconds is None:
                    seconds = max(0.0, self._timers[0][0] - time.monotonic())
                due: list[tuple[Callable[..., None], tuple[int, ...]]] = [
                    (key.data, (events,)) for key, events in self._selector.select(seconds)
                ]
                self._asleep = False
                # Only the calls that are queued now run in this round: handlers queue themselves again, and
                # sockets and timers must get their turn.
                due += [(self._calls.popleft(), ()) for _ in range(len(self._calls))]
                while self._timers and self._timers[0][0] <= time.monotonic():
                    due.append((heapq.heappop(self._timers)[2], ()))
                for function, arguments in due:
                    try:
                        function(*arguments)
                        while self._next:
                            self._next.pop()()
                    except Exception:  # noqa: BLE001 - other connections go on
                        _log.exception("a data connection could not be served")
        finally:
            self._selector.close()
            self._wakes.close()
            self._woken.close()

    def _take_wake(self, _: int) -> None:
        with contextlib.suppress(OSError):
            while self._woken.recv_into(self.buffer):
                pass
