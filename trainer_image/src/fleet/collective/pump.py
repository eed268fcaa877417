"""Passes what comes over one connection on to another, for any number of pairs in one thread.

A pod may have few threads, and trainer 0 has two or three connections with each of thousands of trainers.
What comes is passed on in the callback that tells of it: a coroutine for each way costs three times as much.
"""

import asyncio
import contextlib
import functools
import os
import socket
import threading
from typing import Final

__all__ = ["pass_on"]

_CHUNK_BYTES: Final = 1 << 16
_starting = threading.Lock()


def pass_on(one: socket.socket, other: socket.socket) -> None:
    """Pass on what comes over either to the other until both have ended; they are closed then."""
    for each in (one, other):
        each.setblocking(False)
    with _starting:
        loop = _loop(os.getpid())
    loop.call_soon_threadsafe(_Pair, loop, one, other)


@functools.lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Start the event loop of this process, or return it; a fork has no thread of its parent's."""
    del process
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fleet-gate", daemon=True).start()
    return loop


class _Pair:
    """Two connections, of which the loop holds this object as long as either is open."""

    def __init__(self, loop: asyncio.AbstractEventLoop, one: socket.socket, other: socket.socket) -> None:
        self._loop = loop
        self._open = 2
        for source, sink in ((one, other), (other, one)):
            loop.add_reader(source, self._pass_on, source, sink)

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
            source.close()
            sink.close()
