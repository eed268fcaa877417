"""How a process proves that it has the key of the job, without showing it.

To a server's control service a proof says what is called, when, and a number that is used once, with a
message authentication code (MAC) over them: HMAC-SHA256 under the job's key. On a data connection each end
proves that it has the key now, over a random number of each. Pure: time and random numbers are handed in.
"""

import hashlib
import hmac
from typing import Final, NamedTuple

from fleet.wire.states import Side

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
"""By how much the clocks of two replicas may differ; a proof holds for as long."""
NONCE_BYTES: Final = 16
CHALLENGE_BYTES: Final = 32
MAC_BYTES: Final = 32
_HOLDS_SECONDS: Final = 2 * CLOCK_SECONDS
"""From the earliest moment at which a proof may hold to the last."""
_VERSION: Final = "1"
_LONGEST: Final = 200


class Proof(NamedTuple):
    """What a caller says to prove itself: one line of text."""

    seconds: int
    nonce: str
    mac: str

    def to_text(self) -> str:
        """Return the line."""
        return f"{_VERSION} {self.seconds} {self.nonce} {self.mac}"


def make_proof(key: bytes, server: int, method: str, *, seconds: float, nonce: bytes) -> Proof:
    """Prove that the caller of a method has the key.

    Parameters
    ----------
    key : bytes
    server : int
        Which server is called: another one does not take the proof.
    method : str
    seconds : float
        The time of day, since the epoch.
    nonce : bytes
        `NONCE_BYTES` random bytes that no other proof has.
    """
    moment, number = int(seconds), nonce.hex()
    return Proof(moment, number, _mac(key, server, method, moment, number))


def read_proof(text: str, key: bytes, server: int, method: str, *, seconds: float) -> Proof | None:
    """Return a proof that holds now; None for anything else."""
    if len(text) > _LONGEST or not text.isascii():
        return None
    match text.split(" "):
        case [version, moment, nonce, mac] if version == _VERSION and moment.isdigit() and len(moment) < 16:
            proof = Proof(int(moment), nonce, mac)
        case _:
            return None
    holds = hmac.compare_digest(_mac(key, server, method, proof.seconds, nonce), mac)
    return proof if holds and abs(seconds - proof.seconds) <= CLOCK_SECONDS else None


def greeting_mac(key: bytes, side: Side, challenge: bytes, answer: bytes, *, of: str = "greeting") -> bytes:
    """Return what proves to the other end of a connection that this one has the key.

    Parameters
    ----------
    key : bytes
    side : Side
        Who proves itself: neither can send back what the other one has said.
    challenge, answer : bytes
        The random numbers of the server and of the trainer, `CHALLENGE_BYTES` each.
    of : str
        For what the connection is: proof for one thing proves nothing for another.
    """
    said = b"fleet " + of.encode() + b"\n" + side.name.encode() + b"\n" + challenge + answer
    return hmac.digest(key, said, "sha256")


def _mac(key: bytes, server: int, method: str, seconds: int, nonce: str) -> str:
    said = "\n".join(("fleet call", str(server), method, str(seconds), nonce))
    return hmac.new(key, said.encode(), hashlib.sha256).hexdigest()


class ReplayWindow:
    """Remembers proofs for as long as they hold, so that one which was overheard serves nobody else.

    Parameters
    ----------
    times : int
        How often a proof may come: gRPC repeats a call with the words of the first try.
    """

    def __init__(self, times: int) -> None:
        self._times = times
        self._begun = 0.0
        self._came: dict[str, int] = {}
        self._came_before: dict[str, int] = {}

    def admits(self, proof: Proof, seconds: float) -> bool:
        """Whether a proof that holds has not come too often; it counts as having come.

        Parameters
        ----------
        proof : Proof
        seconds : float
            The time of day, since the epoch.
        """
        if seconds >= self._begun + _HOLDS_SECONDS:
            recent = seconds < self._begun + 2 * _HOLDS_SECONDS
            self._came_before, self._came, self._begun = (self._came if recent else {}), {}, seconds
        self._came[proof.nonce] = self._came.get(proof.nonce, 0) + 1
        return self._came[proof.nonce] + self._came_before.get(proof.nonce, 0) <= self._times
