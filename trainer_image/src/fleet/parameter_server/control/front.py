"""A relay in front of a server's gRPC port, which limits unauthenticated connections.

gRPC accepts any number of connections from any host, uses descriptors and memory for each, and does not
reveal which connection a call uses until the call is served. Therefore, if the job has a key, gRPC listens on
a loopback address, and this module relays connections from the server's endpoint to that
address. Only a few connections may be open on which no call has proved the key; the number of proved
connections is not limited. One thread does all of this, so a surplus connection is closed before the next one
is accepted.
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
"""The maximum number of connections to accept before open connections are served again."""
_PAUSE_SECONDS: Final = 0.1
"""The pause before the next accept if no file descriptor was free."""
_CLOSE_SECONDS: Final = 5.0
_LOG_SECONDS: Final = 60.0
_log = logging.getLogger(__name__)


class _Guest:
    """A connection that the relay has accepted."""

    def __init__(self, connected: socket.socket, host: str) -> None:
        self.connected = connected
        self.host = host
        self.pair: Pair | None = None
        """The relay between the peer and gRPC; None until the peer has sent a byte."""
        self.peer = ""
        """The peer name that gRPC uses for the connection; empty until the connection is relayed."""


class Front:
    """A relay to gRPC that limits the number of connections without a proof of the job's key.

    Parameters
    ----------
    listener : socket.socket
        The listening socket at the server's endpoint; this object closes it.
    port : int
        gRPC's port on the loopback address.
    most : int
        The number of connections that may be open without a proof. They have no deadline: a surplus
        connection evicts the oldest connection of the host that has the most.
    """

    def __init__(self, listener: socket.socket, port: int, most: int) -> None:
        self._listener = own(listener)
        self._listener.setblocking(False)
        self._port = port
        self._unproved = ConnectionLimit[_Guest](most)
        self._peers: dict[str, _Guest] = {}
        """Connections without a proof, by their names in gRPC."""
        self._closed = False
        self._logged_at = float("-inf")
        self._loop = relay_loop()
        self._loop.call_soon_threadsafe(self._listen)

    def proved(self, peer: str) -> None:
        """Record that a call from this peer (as named by gRPC) has proved the key. Thread-safe."""
        if peer in self._peers:
            self._loop.call_soon_threadsafe(self._settle, peer)

    def close(self) -> None:
        """Stop accepting connections; open ones stay open. May be called repeatedly."""
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
        """Stop accepting briefly, because no file descriptor is free and a retry would fail at once."""
        self._loop.remove_reader(self._listener)
        self._loop.call_later(_PAUSE_SECONDS, self._listen)
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            _log.warning("cannot accept a connection of the control service: %s; trying again", error)

    def _pass_on(self, guest: _Guest) -> None:
        """Relay a connection to gRPC once its first byte arrives; close it if the peer disconnects."""
        self._loop.remove_reader(guest.connected)
        inner = None
        try:
            if not guest.connected.recv(1, socket.MSG_PEEK):
                raise ConnectionResetError("the peer closed it without sending anything")
            inner = own(socket.socket())
            inner.setblocking(False)
            inner.connect_ex(
                (LOOPBACK, self._port)
            )  # the connection is in progress; the relay detects the outcome
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
