"""The port of a server's control service, which stands before gRPC's own.

gRPC takes any number of connections from anybody, and keeps descriptors and memory for each; it does not say
which of them a call has come over until the call is served. So where the job has a key gRPC listens on a
loopback address, and what comes to the server's endpoint is passed on to it. Until a call has proved the key
over it, a connection is one of the few that may be open without. Proved once, it stays as long as its ends
want it to. All of it happens in the thread that passes on: what has to go is closed before another is taken.
"""

import contextlib
import logging
import socket
import threading
import time
from functools import partial
from typing import Final

from fleet.process.connections import ConnectionLimit, Pair, own, relay_loop

__all__ = ["LOOPBACK", "Front"]

LOOPBACK: Final = "127.0.0.1"
_AT_ONCE: Final = 64
"""How many are taken before what comes over the others is passed on."""
_PAUSE_SECONDS: Final = 0.1
"""Before another one is taken, where there was no descriptor for it."""
_CLOSE_SECONDS: Final = 5.0
_TELL_SECONDS: Final = 60.0
_log = logging.getLogger(__name__)


class _Guest:
    """A connection that has come."""

    def __init__(self, connected: socket.socket, host: str) -> None:
        self.connected = connected
        self.host = host
        self.pair: Pair | None = None
        """Once it is passed on."""
        self.peer = ""
        """What gRPC then calls it."""


class Front:
    """Passes connections on to gRPC, and bounds those over which nothing has proved the key.

    Parameters
    ----------
    listener : socket.socket
        Where others come; closed by this object.
    port : int
        Where gRPC listens, on the loopback address.
    most : int
        How many connections may be open that have proved nothing. They have no deadline: one that stays
        takes the place of nobody who comes.
    """

    def __init__(self, listener: socket.socket, port: int, most: int) -> None:
        self._listener = own(listener)
        self._listener.setblocking(False)
        self._port = port
        self._unproved = ConnectionLimit[_Guest](most)
        self._peers: dict[str, _Guest] = {}
        """Those that have proved nothing, by what gRPC calls them."""
        self._closed = False
        self._told_at = float("-inf")
        self._loop = relay_loop()
        self._loop.call_soon_threadsafe(self._listen)

    def proved(self, peer: str) -> None:
        """Take note, from any thread, that a call from this peer, as gRPC calls it, has proved the key."""
        if peer in self._peers:
            self._loop.call_soon_threadsafe(self._settle, peer)

    def close(self) -> None:
        """Take no further connection; those that there are stay. Safe to repeat."""
        closed = threading.Event()
        self._loop.call_soon_threadsafe(self._close, closed)
        closed.wait(_CLOSE_SECONDS)

    def _listen(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._listener, self._accept)

    def _close(self, closed: threading.Event) -> None:
        if not self._closed:
            self._closed = True
            self._loop.remove_reader(self._listener)
            self._listener.close()
        closed.set()

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                connected, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            own(connected).setblocking(False)
            guest = _Guest(connected, str(address[0]))
            self._loop.add_reader(connected, self._pass_on, guest)
            if (surplus := self._unproved.add(guest, guest.host)) is not None:
                self._end(surplus)

    def _pause(self, error: OSError) -> None:
        """Take none for a moment: there is no descriptor left, and this would be called again at once."""
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_PAUSE_SECONDS, self._listen)
        now = time.monotonic()
        if now - self._told_at >= _TELL_SECONDS:
            self._told_at = now
            _log.warning("cannot take a connection with the control service: %s; trying again", error)

    def _pass_on(self, guest: _Guest) -> None:
        """Connect a guest with gRPC, now that it has said its first word or has gone."""
        self._loop.remove_reader(guest.connected)
        inner = None
        try:
            if not guest.connected.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("it said nothing")
            inner = own(socket.socket())
            inner.setblocking(False)
            inner.connect_ex((LOOPBACK, self._port))  # in progress; what becomes of it is the pair's to find
            for each in (guest.connected, inner):
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            port = inner.getsockname()[1]
        except OSError:
            if inner is not None:
                inner.close()
            self._end(guest)
            return
        guest.peer = f"ipv4:{LOOPBACK}:{port}"
        guest.pair = Pair(self._loop, guest.connected, inner, partial(self._forget, guest))
        self._peers[guest.peer] = guest

    def _settle(self, peer: str) -> None:
        if (guest := self._peers.pop(peer, None)) is not None:
            self._unproved.remove(guest, guest.host)

    def _end(self, guest: _Guest) -> None:
        if guest.pair is not None:
            guest.pair.close()
            return
        self._loop.remove_reader(guest.connected)
        with contextlib.suppress(OSError):
            guest.connected.close()
        self._forget(guest)

    def _forget(self, guest: _Guest) -> None:
        self._unproved.remove(guest, guest.host)
        if self._peers.get(guest.peer) is guest:
            del self._peers[guest.peer]
