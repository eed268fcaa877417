"""What trainers tell each other of themselves while they train, in trainer 0's store, one call at a time."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from fleet.collective.heartbeats import Beat

__all__ = ["STORE_SECONDS", "Board"]

STORE_SECONDS = 10.0
_STUCK, _ALL_STUCK = "how many are stuck", "all are stuck"


class Board:
    """One trainer's way to it.

    Parameters
    ----------
    store
        Used by this object only: a blocked call of another thread must not keep the heartbeat waiting.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()

    def start(self) -> None:
        """Have calls end with an error after some seconds."""
        self._store.set_timeout(timedelta(seconds=STORE_SECONDS))

    def put(self, rank: int, beat: Beat) -> None:
        """Put down a trainer's heartbeat."""
        self.tell(_key(rank), beat.to_text())

    def beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """Return the heartbeats of some trainers."""
        with self._one_call():
            beats = self._store.multi_get([_key(rank) for rank in ranks])
        return {rank: Beat.from_text(beat.decode()) for rank, beat in zip(ranks, beats, strict=True)}

    def tell(self, key: str, text: str) -> None:
        """Put a text down."""
        with self._one_call():
            self._store.set(key, text)

    def told(self, key: str) -> str | None:
        """Return a text, or None where it is not there yet."""
        with self._one_call():
            return self._store.get(key).decode() if self._store.check([key]) else None

    def exchange(self, key: str, expected: str, text: str) -> str:
        """Put a text down where another is, or none if that is empty; return what is there then."""
        with self._one_call():
            return self._store.compare_set(key, expected, text).decode()

    @contextlib.contextmanager
    def _one_call(self) -> Iterator[None]:
        """Wait for the call of another thread, but not for ever: a store that was stopped never ends it."""
        if not self._lock.acquire(timeout=2 * STORE_SECONDS):
            raise DistStoreError(f"an earlier call had no answer for {2 * STORE_SECONDS:.0f} s")
        try:
            yield
        finally:
            self._lock.release()

    def all_are_stuck(self, size: int, seconds: float) -> None:
        """Say that this trainer waits where others never come; wait a little until all others say so too."""
        if self._store.add(_STUCK, 1) == size:
            self._store.set(_ALL_STUCK, "")
        self._store.wait([_ALL_STUCK], timedelta(seconds=seconds))


def _key(rank: int) -> str:
    return f"beat/{rank}"
