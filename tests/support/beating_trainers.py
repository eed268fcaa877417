"""Simulated trainers of one job, whose heartbeats lie in one store, at a time of their own."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from fleet.collective.beats import Beats
from fleet.collective.board import Board
from fleet.collective.heartbeats import Digest
from fleet.collective.rendezvous import Place
from fleet.collective.standing import Standing, Way
from fleet.environment.deadlines import Deadlines
from fleet.process.clock import WatchClock
from tests.support.counted_store import CountedStore

__all__ = ["HEARTBEAT", "WAITING", "BeatingTrainers", "NotingStore"]

WAITING = Standing(1, 5, Way.EXCHANGE, "the average of step 4's gradients")
HEARTBEAT = 1.0


class NotingStore(CountedStore):
    """Notes whose heartbeats were read at once."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[str]] = []

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        if keys and keys[0].startswith("beat/"):
            self.reads.append(list(keys))
        return super().multi_get(keys)


class BeatingTrainers:
    """They beat in the order of their ranks, once a second."""

    def __init__(self, size: int, store: Any = None) -> None:
        self.store: Any = store or NotingStore()
        self.now = 0.0
        deadlines = Deadlines(heartbeat_seconds=HEARTBEAT)
        own: Callable[[], Any] = getattr(self.store, "clone", lambda: self.store)
        clock = WatchClock(20.0, lambda: self.now)
        places = [Place(rank, size, "127.0.0.1", 1) for rank in range(size)]
        self.boards = [Board(own()) for _ in places]
        self.beats = [
            Beats(board, place, deadlines, clock) for board, place in zip(self.boards, places, strict=True)
        ]
        for each in self.beats:
            each.start()

    def beat(
        self, waiting: Collection[int], computing: Collection[int] = (), times: int = 1
    ) -> dict[int, Digest]:
        """Have trainers beat some times; return what those that wait know in the end."""
        for _ in range(times):
            self.now += HEARTBEAT
            found = {}
            for rank in sorted({*waiting, *computing}):
                self.beats[rank].beat(WAITING if rank in waiting else Standing(1, 4))
                if rank in waiting:
                    found[rank] = self.beats[rank].look()
                else:
                    self.beats[rank].leave()
        return found
