"""How far a trainer has come and what it waits for, as the others read it in its heartbeat. Pure.

Trainers meet in two ways: in the exchange of a backward pass's gradients, and in calls that all of them make
(a barrier, the end of the job). Each way has connections of its own, so the two never mix; but a trainer that
waits in one while another waits in the other would wait for ever, and is told so instead.
"""

import json
from dataclasses import dataclass, replace
from enum import StrEnum

__all__ = ["Standing", "Way"]


class Way(StrEnum):
    """How a trainer meets the others in what it waits for."""

    CALL = "call"
    EXCHANGE = "exchange"
    OTHER = ""
    """In a part of a call in which all have met already; nobody can be elsewhere."""


@dataclass(frozen=True)
class Standing:
    """One trainer at one moment.

    Attributes
    ----------
    calls, exchanges : int
        How many of each this trainer has begun.
    way : Way
    what : str
        What it waits for; empty while it waits for nothing.
    """

    calls: int = 0
    exchanges: int = 0
    way: Way = Way.OTHER
    what: str = ""

    def begin(self, what: str, way: Way) -> "Standing":
        """Return what follows when this trainer begins to wait."""
        return Standing(self.calls + (way is Way.CALL), self.exchanges + (way is Way.EXCHANGE), way, what)

    def end(self) -> "Standing":
        """Return what follows when the wait is over."""
        return replace(self, way=Way.OTHER, what="")

    def to_text(self) -> str:
        """Return this as `from_text` reads it."""
        return json.dumps([self.calls, self.exchanges, self.way, self.what])

    @classmethod
    def from_text(cls, text: str) -> "Standing":
        """Return what `to_text` wrote."""
        calls, exchanges, way, what = json.loads(text)
        return cls(calls, exchanges, Way(way), what)

    def never_meets(self, other: "Standing") -> bool:
        """Whether this trainer and another wait for each other in different places.

        The other's may be older than this one, not newer: whoever waited for something that this trainer has
        not begun since still waits for it.
        """
        ways = {self.way, other.way}
        if ways != {Way.CALL, Way.EXCHANGE}:
            return False
        calling, exchanging = (self, other) if self.way is Way.CALL else (other, self)
        return calling.calls > exchanging.calls and exchanging.exchanges > calling.exchanges
