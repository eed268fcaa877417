"""Norms over blocks of several servers: who has told its part, and what the parts add up to.

Pure book-keeping: parts come in by calls and go out by a callable. Every server adds the same numbers in
the same order, so all of them clip by the same factor, and two runs are equal to the bit.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from fleet.plan.clipping import NormPlan
from fleet.update import clip_coefficient, total_of

__all__ = ["AwaitedNorm", "KnownNorm", "NormBook", "NormPart"]


@dataclass(frozen=True, slots=True)
class NormPart:
    """One server's part of a norm: the sum of squares of each of its blocks."""

    step: int
    key: str
    server: int
    sums: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class KnownNorm:
    """A norm to which nothing is missing any more."""

    step: int
    norm: NormPlan
    coefficient: float
    """What the gradients are multiplied by."""


@dataclass(frozen=True, slots=True)
class AwaitedNorm:
    """A norm to which this server has given its part, and others have not."""

    step: int
    norm: NormPlan
    servers: tuple[int, ...]
    """Whose parts are missing."""


@dataclass(slots=True)
class _Parts:
    own: dict[int, float] = field(default_factory=dict)
    told: bool = False
    others: dict[int, Mapping[int, float]] = field(default_factory=dict)


class NormBook:
    """The norms of one server.

    Parameters
    ----------
    norms : sequence of NormPlan
    server : int
        This server's index.
    tell : callable
        Called with this server's part and the other servers that need it; must not wait for them.
    """

    def __init__(
        self,
        norms: Sequence[NormPlan],
        server: int,
        tell: Callable[[NormPart, Sequence[int]], None],
    ) -> None:
        self._norm_of = {block: norm for norm in norms for block in norm.blocks}
        self._norms = {norm.key: norm for norm in norms}
        self._server = server
        self._tell = tell
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, str], _Parts] = {}

    def __contains__(self, block: int) -> bool:
        """Whether a block's gradient is clipped by a norm."""
        return block in self._norm_of

    def note(self, step: int, block: int, sum_of_squares: float) -> KnownNorm | None:
        """Take the sum of squares of one of this server's own blocks.

        Returns
        -------
        KnownNorm or None
            What is known now; each norm of a step is returned by exactly one call.
        """
        norm = self._norm_of[block]
        with self._lock:
            for over in [known for known in self._parts if known[1] == norm.key and known[0] < step]:
                del self._parts[over]  # told again by a server that did not learn that it had been heard
            parts = self._parts.setdefault((step, norm.key), _Parts())
            parts.own[block] = sum_of_squares
            if len(parts.own) < len(norm.blocks):
                return None
            parts.told = True
            known = self._take_known(step, norm)
        others = [server for server in norm.servers if server != self._server]
        if others:
            self._tell(NormPart(step, norm.key, self._server, dict(parts.own)), others)
        return known

    def hear(self, part: NormPart, present_step: int) -> KnownNorm | None:
        """Take another server's part; one that was heard before, or of a step that is over, is dropped.

        Parameters
        ----------
        part : NormPart
        present_step : int
            The number of steps that the blocks of this norm have made.

        Returns
        -------
        KnownNorm or None
            As of `note`.

        Raises
        ------
        KeyError
            This server has no part in such a norm with that server.
        """
        norm = self._norms[part.key]
        if part.server == self._server or part.server not in norm.servers:
            raise KeyError(part.key)
        with self._lock:
            if part.step < present_step:
                return None
            self._parts.setdefault((part.step, part.key), _Parts()).others[part.server] = part.sums
            return self._take_known(part.step, norm)

    def first_block(self, key: str) -> int:
        """Return one of this server's blocks that has a part in a norm; KeyError for an unknown norm."""
        return self._norms[key].blocks[0]

    def awaited(self) -> AwaitedNorm | None:
        """Return a norm that waits for other servers; None while there is none."""
        with self._lock:
            for (step, key), parts in self._parts.items():
                norm = self._norms[key]
                missing = tuple(
                    server for server in norm.servers if server != self._server and server not in parts.others
                )
                if parts.told and missing:
                    return AwaitedNorm(step, norm, missing)
        return None

    def _take_known(self, step: int, norm: NormPlan) -> KnownNorm | None:
        parts = self._parts[step, norm.key]
        if not parts.told or len(parts.others) + 1 < len(norm.servers):
            return None
        del self._parts[step, norm.key]
        sums = dict(parts.own)
        for theirs in parts.others.values():
            sums |= theirs
        return KnownNorm(step, norm, clip_coefficient(total_of(sums), norm.max_norm))
