"""Proofs that a process has the job's key; a proof does not reveal the key.

A call of the control service carries its time, a nonce and a message authentication code (MAC) over these and
the method: HMAC-SHA256 with the job's key. On a data connection, each end answers the other end's random
challenge. This module does no I/O: time and random numbers are arguments.
"""

import hashlib
import hmac
from typing import Final, NamedTuple

from fleet.wire.protocol import Side

__all__ = [
    "CHALLENGE_BYTES",
    "CLOCK_SECONDS",
    "MAC_BYTES",
    "NONCE_BYTES",
    "Proof",
    "ReplayWindow",
    "greeting_mac",
    "make_proof",
    "read_proof",
]

CLOCK_SECONDS: Final = 120.0
"""The largest allowed difference between a proof's time and the receiver's clock, in either direction."""
NONCE_BYTES: Final = 16
CHALLENGE_BYTES: Final = 32
MAC_BYTES: Final = 32
_HOLDS_SECONDS: Final = 2 * CLOCK_SECONDS
"""The length of the period during which a proof may be valid."""
_VERSION: Final = "1"
_LONGEST: Final = 200


class Proof(NamedTuple):
    """A caller's proof that it has the job's key, sent with each call."""

    seconds: int
    nonce: str
    mac: str

    def to_text(self) -> str:
        """Encode the proof as a line of text."""
        return f"{_VERSION} {self.seconds} {self.nonce} {self.mac}"


def make_proof(key: bytes, server: int, method: str, *, seconds: float, nonce: bytes) -> Proof:
    """Return a proof that the caller of a method has the key.

    Parameters
    ----------
    key : bytes
    server : int
        The index of the called server; no other server accepts the proof.
    method : str
    seconds : float
        The time in seconds since the epoch.
    nonce : bytes
        `NONCE_BYTES` random bytes, fresh for each proof.
    """
    moment, number = int(seconds), nonce.hex()
    return Proof(moment, number, _mac(key, server, method, moment, number))


def read_proof(text: str, key: bytes, server: int, method: str, *, seconds: float) -> Proof | None:
    """Decode a proof; return None if it is malformed, or not valid at this time."""
    # compare_digest() raises TypeError for other text.
    if len(text) > _LONGEST or not text.isascii():
        return None
    match text.split(" "):
        case [version, moment, nonce, mac] if version == _VERSION and moment.isdigit() and len(moment) < 16:
            proof = Proof(int(moment), nonce, mac)
        case _:
            return None
    # In constant time, so that how long a refusal takes reveals nothing about the right MAC.
    holds = hmac.compare_digest(_mac(key, server, method, proof.seconds, nonce), mac)
    return proof if holds and abs(seconds - proof.seconds) <= CLOCK_SECONDS else None


def greeting_mac(key: bytes, side: Side, challenge: bytes, answer: bytes, *, of: str = "greeting") -> bytes:
    """Return the MAC that proves to the peer that this end of a connection has the key.

    Parameters
    ----------
    key : bytes
    side : Side
        The end that creates the MAC. The side is part of the MAC, so that neither end can reflect the other
        end's MAC.
    challenge, answer : bytes
        The random numbers of the server and of the trainer, with `CHALLENGE_BYTES` bytes each.
    of : str
        The purpose of the connection; a MAC for one purpose is not valid for another.
    """
    said = b"fleet " + of.encode() + b"\n" + side.name.encode() + b"\n" + challenge + answer
    return hmac.digest(key, said, "sha256")


def _mac(key: bytes, server: int, method: str, seconds: int, nonce: str) -> str:
    said = "\n".join(("fleet call", str(server), method, str(seconds), nonce))
    return hmac.new(key, said.encode(), hashlib.sha256).hexdigest()


class ReplayWindow:
    """The proofs that were used and have not expired; detects the replay of an intercepted proof.

    Parameters
    ----------
    times : int
        The number of times that one proof may be used: gRPC retries a call with the first attempt's metadata.
    """

    def __init__(self, times: int) -> None:
        self._times = times
        self._begun = 0.0
        # The uses of each nonce in this period and in the previous one. Two periods are enough, because a
        # proof is valid for at most one.
        self._came: dict[str, int] = {}
        self._came_before: dict[str, int] = {}

    def admits(self, proof: Proof, seconds: float) -> bool:
        """Count a use of a valid proof; return whether the use is allowed.

        Parameters
        ----------
        proof : Proof
        seconds : float
            The time in seconds since the epoch.
        """
        if seconds >= self._begun + _HOLDS_SECONDS:
            recent = seconds < self._begun + 2 * _HOLDS_SECONDS
            self._came_before, self._came, self._begun = (self._came if recent else {}), {}, seconds
        self._came[proof.nonce] = self._came.get(proof.nonce, 0) + 1
        return self._came[proof.nonce] + self._came_before.get(proof.nonce, 0) <= self._times
