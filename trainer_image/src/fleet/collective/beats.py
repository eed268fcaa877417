"""The heartbeats of all trainers, and what is known from them.

Of those that wait, one looks at everybody's heartbeats, and puts down for all what it has found; the others
read that. So all together ask for as many keys as there are trainers, and not for its square. Whoever finds
that nobody looks, or that who did has put down nothing new for two heartbeats, looks from then on itself: so
none is needed for it in particular, and one that ends is missed as soon as any other.
"""

from collections.abc import Sequence

from fleet.collective.board import Board
from fleet.collective.heartbeats import Beat, Digest, Missed, digest_of
from fleet.collective.rendezvous import Place
from fleet.collective.standing import Standing
from fleet.environment.deadlines import Deadlines
from fleet.process.clock import WatchClock

__all__ = ["Beats"]

_FOUND = "what heartbeats say"


class Beats:
    """One trainer's heartbeat, and what it knows of the others'.

    Parameters
    ----------
    board : Board
    place : Place
    deadlines : Deadlines
    clock : WatchClock
    """

    def __init__(self, board: Board, place: Place, deadlines: Deadlines, clock: WatchClock) -> None:
        self._board = board
        self._place = place
        self._deadlines = deadlines
        self._clock = clock
        self._own = Beat(-1, Standing())
        self._seen: dict[int, tuple[int, float]] = {}
        self._text, self._since = "", 0.0
        self._digest = Digest()
        """What was put down last, as text and read, and when this trainer saw it first."""

    def start(self) -> None:
        """Beat once, so that the others find this trainer."""
        self._board.start()
        self.beat(Standing())

    def beat(self, standing: Standing) -> None:
        """Put down a number that was not there before, and where this trainer stands."""
        self._own = Beat(self._own.number + 1, standing)
        self._board.put(self._place.rank, self._own)

    def look(self) -> Digest:
        """Return what is known of all by now; look at everybody's heartbeats where nobody else does."""
        now = self._clock.now()
        self._put("", self._claim(()), now)  # or read what is there
        if self._digest.ended:
            self._take_turn(self._digest.missed, now)
        elif self._digest.looker != self._place.rank and now - self._since > self._patience_seconds:
            before = self._digest.aged(now - self._since)
            looker = Missed(before.looker, before.number, now - self._since)
            self._take_turn([*before.missed, looker], now)
        if self._digest.looker == self._place.rank:
            self._put(self._text, self._found(now), now)
        return self._digest.aged(now - self._since)

    def leave(self) -> None:
        """Wait for nobody any more: if this trainer looks for the others, let one of them do."""
        if self._digest.looker == self._place.rank and not self._digest.ended:
            ended = Digest(self._place.rank, self._own.number, missed=self._digest.missed)
            self._put(self._text, ended, self._clock.now())

    def unchanged(self, missed: Sequence[Missed]) -> list[Missed]:
        """Return whose heartbeats are still the ones that were missed."""
        beats = self._board.beats([each.rank for each in missed])
        return [each for each in missed if beats[each.rank].number == each.number]

    def all_are_stuck(self) -> None:
        """Say that this trainer waits where others never come; wait a little until all others say so too."""
        self._board.all_are_stuck(self._place.size, self._deadlines.silent_seconds)

    @property
    def _patience_seconds(self) -> float:
        """For how long who looks may put down nothing new."""
        return 2 * self._deadlines.heartbeat_seconds

    def _take_turn(self, missed: Sequence[Missed], now: float) -> None:
        """Look for all from now on, unless another does so first; go on missing whom the last one missed."""
        if self._put(self._text, self._claim(missed), now):
            self._seen = {each.rank: (each.number, now - each.seconds) for each in missed}

    def _claim(self, missed: Sequence[Missed]) -> Digest:
        return Digest(self._place.rank, self._own.number, ended=False, missed=missed)

    def _found(self, now: float) -> Digest:
        """Look at everybody's heartbeats."""
        beats = self._board.beats(self._place.others)
        for rank, beat in beats.items():
            if rank not in self._seen or self._seen[rank][0] != beat.number:
                self._seen[rank] = (beat.number, now)
        silence = {rank: now - self._seen[rank][1] for rank in beats}
        missed = {rank: seconds for rank, seconds in silence.items() if seconds > self._patience_seconds}
        beats[self._place.rank] = self._own
        return digest_of(
            self._place.rank, dict(sorted(beats.items())), missed, self._deadlines.silent_seconds
        )

    def _put(self, expected: str, digest: Digest, now: float) -> bool:
        """Put a digest down if the one there is as expected, and read what is there then."""
        text = digest.to_text()
        there = self._board.exchange(_FOUND, expected, text)
        if there != self._text:
            self._text, self._since, self._digest = there, now, Digest.from_text(there)
        return there == text
