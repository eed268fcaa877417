"""Passes what comes over one connection on to another, for any number of pairs in one thread.

A pod may have few threads, and trainer 0 has two or three connections with each of thousands of trainers.
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
    asyncio.run_coroutine_threadsafe(_both_ways(one, other), loop)


@functools.lru_cache(maxsize=1)
def _loop(process: int) -> asyncio.AbstractEventLoop:
    """Start the event loop of this process, or return it; a fork has no thread of its parent's."""
    del process
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="fleet-gate", daemon=True).start()
    return loop


async def _both_ways(one: socket.socket, other: socket.socket) -> None:
    await asyncio.gather(_one_way(one, other), _one_way(other, one))
    one.close()
    other.close()


async def _one_way(source: socket.socket, sink: socket.socket) -> None:
    """Pass on what comes until the end, and the end too."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(OSError):
        while part := await loop.sock_recv(source, _CHUNK_BYTES):
            await loop.sock_sendall(sink, part)
    for each, how in ((sink, socket.SHUT_WR), (source, socket.SHUT_RD)):
        with contextlib.suppress(OSError):
            each.shutdown(how)
