"""Who is alive, and whom this trainer waits for.

Every trainer puts a heartbeat into the store from a thread that never waits for a step, and looks at the
others' only while its own training waits: so a healthy job costs one small write per trainer and heartbeat.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from fleet.collective.rendezvous import Place
from fleet.collective.standing import Standing, Way
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, FleetError, PeerLostError
from fleet.process.clock import WatchClock

__all__ = ["Watch"]

STORE_SECONDS = 10.0
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
        self._store = store
        # Between two looks of a watch that runs lies a beat, and two calls of the store in vain.
        most_seconds = deadlines.heartbeat_seconds + 2 * STORE_SECONDS
        self._clock = WatchClock(min(most_seconds, deadlines.deadline_seconds / 2), clock)
        self._place = place
        self._deadlines = deadlines
        self._lost = lost
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._standing = Standing()
        self._waiting: tuple[Standing, float] | None = None
        self._going_on: tuple[Standing, float, Callable[[], bool]] | None = None
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fleet-watch", daemon=True)

    def start(self) -> None:
        """Beat once, so that the others find this trainer, and go on from a thread."""
        self._store.set_timeout(timedelta(seconds=STORE_SECONDS))
        self._beat(0)
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
        """Return who misses at least one heartbeat, by looking twice; trainer 0 if its store is gone."""
        try:
            before = self._beats()
            self._stop.wait(1.5 * self._deadlines.heartbeat_seconds)
            after = self._beats()
        except (DistError, RuntimeError):
            return [0]
        return [rank for rank in self._place.others if before[rank] == after[rank]]

    @staticmethod
    def _key(rank: int) -> str:
        return f"beat/{rank}"

    def _run(self) -> None:
        beat = 0
        unreachable_since: float | None = None
        while not self._stop.wait(self._deadlines.heartbeat_seconds):
            beat += 1
            try:
                self._beat(beat)
                if self._present_wait() is not None:
                    self._look()
                else:
                    self._seen.clear()
                unreachable_since = None
            except FleetError as error:
                self._lost(error)
                return
            except (DistError, RuntimeError) as error:
                unreachable_since = unreachable_since or self._clock.now()
                self._note_unreachable(self._clock.now() - unreachable_since, error)

    def _beat(self, number: int) -> None:
        """Put down a number that was not there before, and where this trainer stands."""
        waiting = self._present_wait()
        standing = waiting[0] if waiting is not None else self._standing
        with self._lock:
            self._store.set(self._key(self._place.rank), f"{number} {standing.to_text()}")

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

    def _beats(self) -> dict[int, bytes]:
        with self._lock:
            values = self._store.multi_get([self._key(rank) for rank in self._place.others])
        return dict(zip(self._place.others, values, strict=True))

    def _look(self) -> None:
        """Compare the others' heartbeats with those seen before; name who is silent, raise if for good."""
        now = self._clock.now()
        for rank, beat in self._beats().items():
            seen = self._seen.get(rank)
            if seen is None or seen[0] != beat:
                self._seen[rank] = (beat, now)
        waiting = self._present_wait()  # asked after the others' were read, as `never_meets` wants it
        if waiting is None:
            return
        mine, since = waiting
        theirs = {rank: _standing_in(beat) for rank, (beat, _) in self._seen.items()}
        self._check_that_all_meet(mine, theirs)
        silence = {rank: now - at for rank, (_, at) in self._seen.items()}
        silent = [rank for rank in self._place.others if silence[rank] > self._deadlines.silent_seconds]
        gone = [rank for rank in silent if silence[rank] > self._deadlines.deadline_seconds]
        if gone:
            raise PeerLostError(
                f"{self._place.names(gone)} gave no sign of life for {silence[gone[0]]:.0f} s "
                f"while {mine.what} waited; see its log for why it ended"
            )
        if now - since > SAID_AFTER_SECONDS:
            elsewhere = [rank for rank in self._place.others if theirs[rank].what != mine.what]
            about = (
                f"no sign of life from {self._place.names(silent)}" if silent else "every trainer is alive"
            )
            if busy := [rank for rank in elsewhere if rank not in silent]:
                about += f", not there yet: {self._place.names(busy)}"
            _log.warning("%s waits since %.0f s; %s", mine.what, now - since, about)

    def _check_that_all_meet(self, mine: Standing, theirs: Mapping[int, Standing]) -> None:
        """Raise if another trainer waits where this one will never come to, when the others know it too."""
        for rank, standing in theirs.items():
            if not mine.never_meets(standing):
                continue
            self._store.set(f"stuck/{self._place.rank}", "")
            everybody = [f"stuck/{each}" for each in range(self._place.size)]
            # Whoever ends first would look to the others as if it had been lost.
            with contextlib.suppress(DistError, RuntimeError):
                self._store.wait(everybody, timedelta(seconds=self._deadlines.silent_seconds))
            raise ConfigurationError(
                f"{self._place.name(rank)} waits for {standing.what} after {_passes(standing)}, and this "
                f"trainer, {self._place.rank}, for {mine.what} after {_passes(mine)}: neither would ever go "
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


def _standing_in(beat: bytes) -> Standing:
    return Standing.from_text(beat.decode().partition(" ")[2])


def _passes(standing: Standing) -> str:
    """Return how many backward passes a trainer has ended; the one whose gradients it awaits is none."""
    number = standing.exchanges - (standing.way is Way.EXCHANGE)
    return f"{number} exchange{'' if number == 1 else 's'} of gradients"
