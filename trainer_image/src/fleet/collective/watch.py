"""Who is alive, and whom this trainer waits for.

Every trainer puts a heartbeat into the store from a thread that never waits for a step, and looks at the
others' only while its own training waits: so a healthy job costs one small write per trainer and heartbeat.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistError

from fleet.collective.deadlines import Deadlines
from fleet.collective.rendezvous import Place
from fleet.errors import PeerLostError

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
        Called, from the watch's thread, with an error that names a trainer that is lost for good.
    """

    def __init__(
        self, store: Store, place: Place, deadlines: Deadlines, lost: Callable[[PeerLostError], None]
    ) -> None:
        self._store = store
        self._place = place
        self._deadlines = deadlines
        self._lost = lost
        self._others = [rank for rank in range(place.size) if rank != place.rank]
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._waiting: tuple[str, float] | None = None
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
    def waiting(self, what: str) -> Iterator[None]:
        """Say in the log for whom and for what this trainer waits, if the block takes long."""
        self._waiting = (what, time.monotonic())
        try:
            yield
        finally:
            self._waiting = None

    def silent_now(self) -> list[int]:
        """Return who misses at least one heartbeat, by looking twice; trainer 0 if its store is gone."""
        try:
            before = self._beats()
            self._stop.wait(1.5 * self._deadlines.heartbeat_seconds)
            after = self._beats()
        except (DistError, RuntimeError):
            return [0]
        return [rank for rank in self._others if before[rank] == after[rank]]

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
                if self._waiting is not None:
                    self._look(*self._waiting)
                else:
                    self._seen.clear()
                unreachable_since = None
            except PeerLostError as error:
                self._lost(error)
                return
            except (DistError, RuntimeError) as error:
                unreachable_since = unreachable_since or time.monotonic()
                self._note_unreachable(time.monotonic() - unreachable_since, error)

    def _beat(self, number: int) -> None:
        """Put down a number that was not there before, and what this trainer waits for, if for anything."""
        waiting = self._waiting
        with self._lock:
            self._store.set(self._key(self._place.rank), f"{number} {waiting[0] if waiting else ''}")

    def _beats(self) -> dict[int, bytes]:
        with self._lock:
            values = self._store.multi_get([self._key(rank) for rank in self._others])
        return dict(zip(self._others, values, strict=True))

    def _look(self, what: str, since: float) -> None:
        """Compare the others' heartbeats with those seen before; name who is silent, raise if for good."""
        now = time.monotonic()
        for rank, beat in self._beats().items():
            seen = self._seen.get(rank)
            if seen is None or seen[0] != beat:
                self._seen[rank] = (beat, now)
        silence = {rank: now - at for rank, (_, at) in self._seen.items()}
        silent = [rank for rank in self._others if silence[rank] > self._deadlines.silent_seconds]
        gone = [rank for rank in silent if silence[rank] > self._deadlines.lost_seconds]
        if gone:
            raise PeerLostError(
                f"{self._place.names(gone)} gave no sign of life for {silence[gone[0]]:.0f} s "
                f"while {what} waited; see its log for why it ended"
            )
        if now - since > SAID_AFTER_SECONDS:
            elsewhere = [r for r in self._others if self._seen[r][0].decode().partition(" ")[2] != what]
            about = (
                f"no sign of life from {self._place.names(silent)}" if silent else "every trainer is alive"
            )
            if busy := [rank for rank in elsewhere if rank not in silent]:
                about += f", not there yet: {self._place.names(busy)}"
            _log.warning("%s waits since %.0f s; %s", what, now - since, about)

    def _note_unreachable(self, seconds: float, error: Exception) -> None:
        reason = str(error).strip().partition("\n")[0]
        if seconds > self._deadlines.lost_seconds:
            self._lost(
                PeerLostError(f"{self._place.name(0)} was not reachable for {seconds:.0f} s: {reason}")
            )
            self._stop.set()
        else:
            _log.warning("%s is not reachable since %.0f s: %s", self._place.name(0), seconds, reason)
