"""A relay: whoever connects to a listening socket of this process is passed on to another port.

What comes over one connection of a pair is passed on to the other by one thread for all pairs. A pod may have
few threads, and trainer 0 of a collective job has two or three connections with each of thousands of
trainers. What comes is passed on in the callback that tells of it: a coroutine for each way costs three times
as much.
"""

import asyncio
import contextlib
import functools
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from fleet.process.forks import own

__all__ = ["Pair", "Relay", "loop_of_pairs", "pass_on"]

_PAUSE_SECONDS: Final = 0.1
_TELL_SECONDS: Final = 60.0
_CHUNK_BYTES: Final = 1 << 16
_starting = threading.Lock()
_log = logging.getLogger(__name__)

Onward = Callable[[socket.socket], socket.socket]
"""Gives the connection to which one that has come is passed on; what it raises refuses that one."""


class Relay:
    """Passes the connections of a listening socket on to others, byte by byte.

    Parameters
    ----------
    listener : socket.socket
        Closed by this object.
    onward : callable
        As `Onward`.
    tells : bool
        Whether whom it refuses, and what it lacks, is worth a word in the log.
    """

    def __init__(self, listener: socket.socket, onward: Onward, *, tells: bool = False) -> None:
        self.port: int = listener.getsockname()[1]
        self.refusal = ""
        """Why the connection that came last was not passed on; empty where it was."""
        self._listener = own(listener)
        self._onward = onward
        self._tells = tells
        self._closed = False
        self._told_at = float("-inf")
        threading.Thread(target=self._accept, name="fleet-gate", daemon=True).start()

    def close(self) -> None:
        """Take no further connection; those that there are stay."""
        self._closed = True
        with contextlib.suppress(OSError):
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
                    target=self._pass_on, args=(connected, str(address[0])), name="fleet-gate", daemon=True
                ).start()
            except RuntimeError as error:
                connected.close()
                self._pause(error)

    def _pause(self, error: OSError | RuntimeError) -> None:
        """Wait where there is no descriptor or no thread left for the moment, and this is not closed."""
        if not self._closed:
            self.refusal = f"a connection could not be taken: {error}"
            self._tell("%s; trying again", self.refusal)
            time.sleep(_PAUSE_SECONDS)

    def _pass_on(self, connected: socket.socket, whence: str) -> None:
        try:
            onward = self._onward(connected)
        except OSError as error:
            self.refusal = str(error)
            self._tell("refused a connection of %s with the store: %s", whence, self.refusal)
            connected.close()
            return
        self.refusal = ""
        with contextlib.suppress(OSError):  # one that has ended already: its end is passed on
            for each in (own(connected), own(onward)):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pass_on(connected, onward)

    def _tell(self, message: str, *about: str) -> None:
        """Say it, once in a while: who comes may come often."""
        now = time.monotonic()
        if self._tells and now - self._told_at >= _TELL_SECONDS:
            self._told_at = now
            _log.warning(message, *about)


def pass_on(one: socket.socket, other: socket.socket) -> None:
    """Pass on what comes over either to the other until both have ended; they are closed then."""
    for each in (one, other):
        each.setblocking(False)
    loop = loop_of_pairs()
    loop.call_soon_threadsafe(Pair, loop, one, other)


def loop_of_pairs() -> asyncio.AbstractEventLoop:
    """Return the event loop of this process that passes on; it runs in a thread of its own."""
    with _starting:
        return _loop(os.getpid())


@functools.lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Start the event loop of this process, or return it; a fork has no thread of its parent's."""
    del process
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fleet-gate", daemon=True).start()
    return loop


class Pair:
    """Two connections, of which the loop holds this object as long as either is open.

    Parameters
    ----------
    loop : asyncio.AbstractEventLoop
        In whose thread this is made, and `close` called.
    one, other : socket.socket
        Without a time-out.
    ended : callable, optional
        Called once both are closed.
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
            loop.add_reader(source, self._pass_on, source, sink)

    def close(self) -> None:
        """Close both now."""
        for each in self._both:
            self._loop.remove_reader(each)
            self._loop.remove_writer(each)
            each.close()
        if self._ended is not None:
            self._ended()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        """Receive what there is, and send it if the sink takes it."""
        try:
            part = source.recv(_CHUNK_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            part = b""
        if part:
            self._send(part, source, sink)
        else:
            self._end(source, sink)

    def _send(self, part: bytes, source: socket.socket, sink: socket.socket) -> None:
        try:
            sent = sink.send(part)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError:
            self._end(source, sink)
            return
        if sent < len(part):
            self._loop.remove_reader(source)  # nothing more is received before this has left
            self._loop.add_writer(sink, self._send_rest, part[sent:], source, sink)

    def _send_rest(self, rest: bytes, source: socket.socket, sink: socket.socket) -> None:
        self._loop.remove_writer(sink)
        self._loop.add_reader(source, self._pass_on, source, sink)
        self._send(rest, source, sink)

    def _end(self, source: socket.socket, sink: socket.socket) -> None:
        """Pass on the end of one way; close both connections at that of the other."""
        self._loop.remove_reader(source)
        for each, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
            with contextlib.suppress(OSError):
                each.shutdown(how)
        self._open -= 1
        if not self._open:
            self.close()
