"""A gate before torch's store, which knows no key: who comes proves first that it is of the job.

Trainer 0's store listens on its own loopback address, at a port of its own; the gate listens where the store
would, and passes on the connections that have proven the key of the job, by a MAC over a random number of
each end. The other trainers have a door: a port on their loopback address, behind which a connection to the
gate proves the key and is proven to. What the store is told and asked for passes both untouched, so that it
is torch's own at both ends.
"""

import contextlib
import hmac
import ipaddress
import secrets
import socket
import time
from typing import Final

from fleet.process.half_open import HalfOpen
from fleet.process.relay import Relay
from fleet.wire import Side
from fleet.wire.proof import CHALLENGE_BYTES, MAC_BYTES, greeting_mac

__all__ = ["door_to", "gate_before", "is_elsewhere", "is_here", "listen_at", "loopback_of"]

_DIAL_SECONDS: Final = 5.0
_PAUSE_SECONDS: Final = 0.1
_LOOPBACK: Final = "127.0.0.1"


def gate_before(port: int, listener: socket.socket, key: bytes, half_open: HalfOpen | None = None) -> Relay:
    """Open the gate before a store of this machine.

    Parameters
    ----------
    port : int
        The store's, on the loopback address.
    listener : socket.socket
        Where the others come.
    key : bytes
        The job's.
    half_open : HalfOpen, optional
        Bounds what strangers may take.
    """
    strangers = half_open or HalfOpen()

    def onward(connected: socket.socket) -> socket.socket:
        with strangers.bounded(connected):
            _check(connected, key)
        return socket.create_connection((_LOOPBACK, port), _DIAL_SECONDS)

    return Relay(listener, onward, tells=True)


def door_to(host: str, port: int, key: bytes, patience_seconds: float = 0.0) -> Relay:
    """Open a door on this machine that leads to the gate of another.

    Parameters
    ----------
    host, port : str, int
        Where the gate is, or will be.
    key : bytes
        The job's.
    patience_seconds : float
        For how long a gate that is not there yet is dialled again. Who has come to the door waits meanwhile:
        torch's client logs a stack for each connection that ends.
    """

    def onward(_: socket.socket) -> socket.socket:
        dialled = _dial(host, port, patience_seconds)
        try:
            _prove(dialled, key)
        except OSError:
            dialled.close()
            raise
        return dialled

    return Relay(socket.create_server((_LOOPBACK, 0)), onward)


def _dial(host: str, port: int, patience_seconds: float) -> socket.socket:
    deadline = time.monotonic() + patience_seconds
    while True:
        try:
            return socket.create_connection((host, port), _DIAL_SECONDS)
        except (ConnectionRefusedError, socket.gaierror):  # it has not begun to listen, or has no name yet
            if time.monotonic() >= deadline:
                raise
            time.sleep(_PAUSE_SECONDS)


def listen_at(host: str, port: int) -> socket.socket:
    """Listen where others look for this process: at its address, or on all where that is elsewhere.

    Raises
    ------
    OSError
        The port is taken.
    """
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        if is_here(host):
            family = socket.AF_INET6 if address.version == 6 else socket.AF_INET
            return socket.create_server((host, port), family=family)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def loopback_of(host: str) -> str | None:
    """Return the loopback address that a host stands for; None where it stands for any other."""
    found = _addresses(host)
    if not found or not all(ipaddress.ip_address(each).is_loopback for each in found):
        return None
    return min(found, key=lambda each: ":" in each)


def is_here(host: str) -> bool:
    """Whether an address of a host is one of this machine."""
    for address in _addresses(host):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
            return True
    return False


def is_elsewhere(host: str) -> bool:
    """Whether a host is known, and no address of it is one of this machine."""
    return bool(_addresses(host)) and not is_here(host)


def _addresses(host: str) -> list[str]:
    """Return what a host stands for; nothing where nobody knows it."""
    try:
        return [str(each[4][0]).partition("%")[0] for each in socket.getaddrinfo(host, None)]
    except OSError:
        return []


def _check(connected: socket.socket, key: bytes) -> None:
    """Have whoever has come prove the key, and prove it in turn; ConnectionError if it does not."""
    challenge = secrets.token_bytes(CHALLENGE_BYTES)
    connected.sendall(challenge)
    answer, mac = _receive(connected, CHALLENGE_BYTES), _receive(connected, MAC_BYTES)
    if not hmac.compare_digest(mac, greeting_mac(key, Side.TRAINER, challenge, answer, of="store")):
        raise ConnectionError("it has not the key of this job; give all trainers the same FLEET_JOB_KEY")
    connected.sendall(greeting_mac(key, Side.SERVER, challenge, answer, of="store"))


def _prove(dialled: socket.socket, key: bytes) -> None:
    """Prove the key to the gate, and have it prove the same before it is told anything."""
    challenge, answer = _receive(dialled, CHALLENGE_BYTES), secrets.token_bytes(CHALLENGE_BYTES)
    dialled.sendall(answer + greeting_mac(key, Side.TRAINER, challenge, answer, of="store"))
    expected = greeting_mac(key, Side.SERVER, challenge, answer, of="store")
    if not hmac.compare_digest(_receive(dialled, MAC_BYTES), expected):
        raise ConnectionError("what listens there has not the key of this job (FLEET_JOB_KEY)")


def _receive(connected: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = connected.recv(count - len(received))
        if not part:
            raise ConnectionError(
                "it was closed at the other end before the key of the job was proven; give all trainers the "
                "same FLEET_JOB_KEY"
            )
        received += part
    return received
