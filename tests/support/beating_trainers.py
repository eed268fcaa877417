"""Simulated trainers that write heartbeats to one store, in simulated time."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from fleet.collective.heartbeats import Report, TrainerState, WaitKind
from fleet.collective.watchdog import Heartbeats
from fleet.collective.world import World
from fleet.environment.deadlines import Deadlines
from fleet.process.resources import WatchClock
from tests.support.counted_store import CountedStore

__all__ = ["HEARTBEAT", "WAITING", "BeatingTrainers", "NotingStore"]

WAITING = TrainerState(1, 5, WaitKind.EXCHANGE, "the average of step 4's gradients")
HEARTBEAT = 1.0


class NotingStore(CountedStore):
    """A store that records, for each request, the trainers whose heartbeats it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[str]] = []

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if keys and keys[0].startswith("beat/"):
            self.reads.append(list(keys))
        return super().multi_get(keys)


class BeatingTrainers:
    """Simulated trainers, each of which sends a heartbeat per second, in rank order."""

    def __init__(self, size: int, store: Any = None) -> None:
        self.store: Any = store or NotingStore()
        self.now = 0.0
        deadlines = Deadlines(heartbeat_seconds=HEARTBEAT)
        own: Callable[[], Any] = getattr(self.store, "clone", lambda: self.store)
        clock = WatchClock(20.0, lambda: self.now)
        self.heartbeats = [
            Heartbeats(own(), World(rank, size, "127.0.0.1", 1), deadlines, clock) for rank in range(size)
        ]
        for each in self.heartbeats:
            each.start()

    def beat(
        self, waiting: Collection[int], computing: Collection[int] = (), times: int = 1
    ) -> dict[int, Report]:
        """Let the given trainers send several heartbeats; return the last report of each waiting trainer."""
        for _ in range(times):
            self.now += HEARTBEAT
            found = {}
            for rank in sorted({*waiting, *computing}):
                self.heartbeats[rank].beat(WAITING if rank in waiting else TrainerState(1, 4))
                if rank in waiting:
                    found[rank] = self.heartbeats[rank].observe()
                else:
                    self.heartbeats[rank].retire()
        return found
