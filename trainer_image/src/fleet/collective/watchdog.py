"""Who is alive, and whom this trainer waits for.

Every trainer puts a heartbeat into the store from a thread that never waits for a step, and learns of the
others' only while its own training waits: so a healthy job costs one small write per trainer and heartbeat,
and one small read where it waits (`beats`).
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from fleet.collective.beats import Beats
from fleet.collective.board import STORE_SECONDS, Board
from fleet.collective.heartbeats import Digest, Missed, Somewhere
from fleet.collective.rendezvous import SHOWN, Place
from fleet.collective.silent import Silent
from fleet.collective.standing import Standing, Way
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, FleetError, PeerLostError
from fleet.process.clock import WatchClock

__all__ = ["Watch"]

SAID_AFTER_SECONDS = 5.0

_log = logging.getLogger(__name__)


class Watch:
    """Tells the others that this trainer lives, and says who keeps it waiting.

    Parameters
    ----------
    store
        Used by this object only: a blocked call of another thread must not keep the heartbeat waiting.
    lost
        Called, from the watch's thread, with an error that names a trainer for which this one waits in vain.
    clock : callable
        Seconds of a monotonic clock.
    """

    def __init__(
        self,
        store: Store,
        place: Place,
        deadlines: Deadlines,
        lost: Callable[[FleetError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        # Between two looks of a watch that runs lies a beat, and two calls of the store in vain.
        most_seconds = deadlines.heartbeat_seconds + 2 * STORE_SECONDS
        self._clock = WatchClock(min(most_seconds, deadlines.deadline_seconds / 2), clock)
        self._place = place
        self._deadlines = deadlines
        self._lost = lost
        self._standing = Standing()
        self._waiting: tuple[Standing, float] | None = None
        self._going_on: tuple[Standing, float, Callable[[], bool]] | None = None
        self._stop = threading.Event()
        board = Board(store)
        self._beats = Beats(board, place, deadlines, self._clock)
        self._silent = Silent(board, place, deadlines.heartbeat_seconds, self._stop.wait)
        self._thread = threading.Thread(target=self._run, name="fleet-watch", daemon=True)

    def start(self) -> None:
        """Beat once, so that the others find this trainer, and go on from a thread."""
        self._beats.start()
        self._thread.start()

    def close(self) -> None:
        """Stop beating; this trainer has left."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(STORE_SECONDS)

    @contextlib.contextmanager
    def waiting(
        self, what: str, way: Way = Way.OTHER, until: Callable[[], bool] | None = None
    ) -> Iterator[None]:
        """Say in the log for whom and for what this trainer waits, if the block takes long.

        Parameters
        ----------
        what : str
        way : Way
        until : callable, optional
            The wait goes on after the block until this is true: of a GPU, which waits while the script does
            not. Called from the watch's thread, whose current device is none in particular: it must make no
            call of CUDA.
        """
        self._standing = self._standing.begin(what, way)
        self._waiting = waiting = (self._standing, self._clock.now())
        self._going_on = None
        try:
            yield
        finally:
            self._waiting = None
            self._standing = self._standing.end()
        if until is not None:
            self._going_on = (*waiting, until)

    def silent_now(self) -> list[int]:
        """Return who misses at least one heartbeat; trainer 0 if its store is gone."""
        try:
            return self._silent.now()
        except (DistError, RuntimeError):
            return [0]

    def _run(self) -> None:
        unreachable_since: float | None = None
        while not self._stop.wait(self._deadlines.heartbeat_seconds):
            try:
                waiting = self._present_wait()
                self._beats.beat(waiting[0] if waiting is not None else self._standing)
                if waiting is not None:
                    self._judge(self._beats.look())
                else:
                    self._beats.leave()
                unreachable_since = None
            except FleetError as error:
                self._lost(error)
                return
            except (DistError, RuntimeError) as error:
                unreachable_since = unreachable_since or self._clock.now()
                self._note_unreachable(self._clock.now() - unreachable_since, error)

    def _present_wait(self) -> tuple[Standing, float] | None:
        """Return for what this trainer, or its GPU, waits, and since when."""
        if (waiting := self._waiting) is not None:
            return waiting
        if (going_on := self._going_on) is None:
            return None
        standing, since, done = going_on
        if not done():
            # Only one that waits for long holds the script up as well, which could yet come elsewhere.
            lasting = self._clock.now() - since > self._deadlines.silent_seconds
            return standing if lasting else replace(standing, way=Way.OTHER), since
        if self._going_on is going_on:
            self._going_on = None
        return None

    def _judge(self, digest: Digest) -> None:
        """Name who is silent, and raise if for good, or if another waits where this one never comes."""
        now = self._clock.now()
        waiting = self._present_wait()  # asked after the others' were read, as `never_meets` wants it
        if waiting is None:
            return
        mine, since = waiting
        self._check_that_all_meet(mine, digest.places)
        missed = [each for each in digest.missed if each.rank != self._place.rank]
        silent = [each for each in missed if each.seconds > self._deadlines.silent_seconds]
        gone = [each for each in silent if each.seconds > self._deadlines.deadline_seconds]
        if gone and (gone := self._beats.unchanged(gone)):
            names = self._place.names([each.rank for each in gone], _number_of(gone, digest))
            raise PeerLostError(
                f"{names} gave no sign of life for {gone[0].seconds:.0f} s "
                f"while {mine.what} waited; see its log for why it ended"
            )
        if now - since > SAID_AFTER_SECONDS and digest.places:
            about = "every trainer is alive"
            if silent:
                names = self._place.names([each.rank for each in silent], _number_of(silent, digest))
                about = f"no sign of life from {names}"
            if busy := self._names_of_busy(mine, digest.places):
                about += f", not there yet: {busy}"
            _log.warning("%s waits since %.0f s; %s", mine.what, now - since, about)

    def _names_of_busy(self, mine: Standing, places: Sequence[Somewhere]) -> str:
        """Return the names of those who live and do not wait for what this trainer waits for."""
        ranks, number = [], 0
        for place in places:
            if place.standing.what != mine.what:
                alive = place.ranks[: place.alive]
                ranks += [rank for rank in alive if rank != self._place.rank]
                number += place.alive - (self._place.rank in alive)
        return self._place.names(sorted(ranks), number)

    def _check_that_all_meet(self, mine: Standing, places: Sequence[Somewhere]) -> None:
        """Raise if another trainer waits where this one will never come to, when the others know it too."""
        for place in places:
            others = [rank for rank in place.ranks if rank != self._place.rank]
            if not others or not mine.never_meets(place.standing):
                continue
            # Whoever ends first would look to the others as if it had been lost.
            with contextlib.suppress(DistError, RuntimeError):
                self._beats.beat(mine)  # which may have begun to wait since its last heartbeat
                self._beats.look()
                self._beats.all_are_stuck()
            raise ConfigurationError(
                f"{self._place.name(others[0])} waits for {place.standing.what} after "
                f"{_passes(place.standing)}, and this trainer, {self._place.rank}, for {mine.what} after "
                f"{_passes(mine)}: neither would ever go "
                "on; give every trainer the same number of batches, and let each make the same calls"
            )

    def _note_unreachable(self, seconds: float, error: Exception) -> None:
        reason = str(error).strip().partition("\n")[0]
        if seconds > self._deadlines.deadline_seconds:
            self._lost(
                PeerLostError(f"{self._place.name(0)} was not reachable for {seconds:.0f} s: {reason}")
            )
            self._stop.set()
        else:
            _log.warning("%s is not reachable since %.0f s: %s", self._place.name(0), seconds, reason)


def _number_of(named: Sequence[Missed], digest: Digest) -> int:
    """Return how many there are where a digest names only the first."""
    return max(len(named), digest.silent) if len(named) >= SHOWN else len(named)


def _passes(standing: Standing) -> str:
    """Return how many backward passes a trainer has ended; the one whose gradients it awaits is none."""
    number = standing.exchanges - (standing.way is Way.EXCHANGE)
    return f"{number} exchange{'' if number == 1 else 's'} of gradients"
