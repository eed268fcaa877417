"""A fault-injecting network between trainers and the servers' data ports.

The network parses frames, so that it can end a connection exactly between two frames or inside one.
"""

import contextlib
import enum
import os
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fleet.parameter_server.control.client import ControlClient
from fleet.parameter_server.trainer import server_connection, session
from fleet.parameter_server.transport.handshake import receive_with, send_with
from fleet.parameter_server.transport.sockets import ConnectionEndedError, dial_here, hang_up, receive_exactly
from fleet.wire import HEADER_BYTES, Header, Kind, Side, read_header

HOST = "127.0.0.1"


class Fate(enum.Enum):
    """What happens to a frame and to its connection."""

    PASS = "pass"
    CUT_BEFORE = "cut before"
    CUT_AFTER = "cut after"
    CUT_WITHIN = "cut within"
    SWALLOW = "swallow"
    """From this frame on, all data in both directions is dropped without an error."""


@dataclass(frozen=True)
class Passing:
    """A frame in transit through the proxy.

    Attributes
    ----------
    server : int
        The index of the server's data port, in the order of the first connections.
    trainer, step : int
    side : Side
        The sender of the frame.
    kind : Kind
    nth : int
        The number of earlier frames of this kind between the two, in this direction.
    connection : int
        The number of earlier connections of this trainer to this server.
    """

    server: int
    trainer: int
    step: int
    side: Side
    kind: Kind
    nth: int
    connection: int


class Proxy:
    """A proxy that relays frames between trainers and servers of this process.

    Parameters
    ----------
    decide : callable
        Returns the fate of each frame; called in the threads of all connections.
    """

    def __init__(self, decide: Callable[[Passing], Fate]) -> None:
        self._decide = decide
        self._lock = threading.Lock()
        self._counts: Counter[tuple[Any, ...]] = Counter()
        self._ports: list[int | str] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def dial(
        self, host: str, port: int, *, timeout_seconds: float, buffer_bytes: int | None
    ) -> socket.socket:
        """Connect to a server through this proxy, in place of the trainers' own function."""
        del buffer_bytes
        far = socket.create_connection((host, port), timeout=timeout_seconds)
        far.settimeout(None)
        with socket.create_server((HOST, 0)) as listener:
            near = socket.create_connection(listener.getsockname(), timeout=timeout_seconds)
            middle, _ = listener.accept()
        self._start(port, far, middle)
        return near

    def dial_here(self, name: str, *, timeout_seconds: float, buffer_bytes: int | None) -> socket.socket:
        """Connect to a server on this host through this proxy, which also relays file descriptors."""
        far = dial_here(name, timeout_seconds=timeout_seconds, buffer_bytes=buffer_bytes)
        far.settimeout(None)
        near, middle = socket.socketpair(socket.AF_UNIX)
        self._start(name, far, middle)
        return near

    def _start(self, port: int | str, far: socket.socket, middle: socket.socket) -> None:
        with self._lock:
            if port not in self._ports:
                self._ports.append(port)
            server = self._ports.index(port)
            self._sockets += [far, middle]
        swallowing = threading.Event()
        for side, source, target in ((Side.TRAINER, middle, far), (Side.SERVER, far, middle)):
            thread = threading.Thread(
                target=self._carry, args=(server, side, source, target, swallowing), daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Close all connections."""
        for each in self._sockets:
            hang_up(each)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a connection of the proxy is still open"
        for each in self._sockets:
            each.close()

    def _carry(
        self,
        server: int,
        side: Side,
        source: socket.socket,
        target: socket.socket,
        swallowing: threading.Event,
    ) -> None:
        try:
            while True:
                buffer = memoryview(bytearray(HEADER_BYTES))
                receive_exactly(source, buffer)
                header = read_header(buffer)
                assert header is not None
                payload = memoryview(bytearray(header.payload_bytes))
                descriptors = receive_with(source, payload)
                fate = self._decide(self._passing(server, side, header))
                if fate is Fate.SWALLOW:
                    swallowing.set()
                if swallowing.is_set():
                    continue
                if fate is Fate.CUT_WITHIN:
                    half = len(payload) // 2
                    target.sendall(
                        bytes(buffer) + bytes(payload[:half]) if half else buffer[: HEADER_BYTES // 2]
                    )
                elif fate is not Fate.CUT_BEFORE:
                    target.sendall(buffer)
                    send_with(target, bytes(payload), descriptors)
                for descriptor in descriptors:
                    os.close(descriptor)
                if fate is not Fate.PASS:
                    break
        except (ConnectionEndedError, OSError):
            pass
        hang_up(source)
        hang_up(target)

    def _passing(self, server: int, side: Side, header: Header) -> Passing:
        line = (server, side, header.trainer)
        with self._lock:
            nth = self._counts[*line, header.kind]
            self._counts[*line, header.kind] += 1
            connection = self._counts[*line, Kind.HELLO] - 1
        return Passing(server, header.trainer, header.step, side, header.kind, nth, connection)


@contextmanager
def proxied(monkeypatch: Any, decide: Callable[[Passing], Fate]) -> Iterator[Proxy]:
    """Route this process's trainers through a proxy, both over TCP and over connections within this host."""
    proxy = Proxy(decide)
    monkeypatch.setattr(server_connection, "dial", proxy.dial)
    monkeypatch.setattr(server_connection, "dial_here", proxy.dial_here)
    try:
        yield proxy
    finally:
        proxy.close()


class Partition:
    """A network that can be partitioned; it then silently stops relaying data and control messages."""

    def __init__(self) -> None:
        self._whole = threading.Event()
        self._whole.set()
        self._listeners: list[socket.socket] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def cut(self) -> None:
        """Stop relaying data in both directions."""
        self._whole.clear()

    def heal(self) -> None:
        """Resume relaying, beginning with the data that has been held back since the cut."""
        self._whole.set()

    def dial(
        self, host: str, port: int, *, timeout_seconds: float, buffer_bytes: int | None
    ) -> socket.socket:
        """Connect to a data port through this network."""
        del buffer_bytes
        return socket.create_connection(self._listen(host, port), timeout=timeout_seconds)

    def control(self, endpoint: str, *arguments: Any) -> ControlClient:
        """Open a control channel to a server through this network."""
        host, _, port = endpoint.rpartition(":")
        near = self._listen(host, int(port))
        return ControlClient(f"{near[0]}:{near[1]}", *arguments)

    def close(self) -> None:
        """Close all connections."""
        self.heal()
        for each in (*self._listeners, *self._sockets):
            hang_up(each)
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a connection of the partition is still open"
        for each in (*self._listeners, *self._sockets):
            each.close()

    def _listen(self, host: str, port: int) -> tuple[str, int]:
        listener = socket.create_server((HOST, 0))
        self._listeners.append(listener)
        self._start(self._accept, listener, host, port)
        near: tuple[str, int] = listener.getsockname()
        return near

    def _accept(self, listener: socket.socket, host: str, port: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                self._whole.wait()
                far = socket.create_connection((host, port), timeout=10)
                far.settimeout(None)
                self._sockets += [near, far]
                self._start(self._carry, near, far)
                self._start(self._carry, far, near)

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(1 << 16):
                self._whole.wait()
                target.sendall(received)
        self._whole.wait()
        hang_up(target)

    def _start(self, target: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()


@contextmanager
def partition(monkeypatch: Any) -> Iterator[Partition]:
    """Route this process's trainers through a network that can be partitioned."""
    network = Partition()
    monkeypatch.setattr(server_connection, "dial", network.dial)
    monkeypatch.setattr(session, "ControlClient", network.control)
    try:
        yield network
    finally:
        network.close()
