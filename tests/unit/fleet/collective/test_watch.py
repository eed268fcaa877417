"""Whom a trainer waits for, as its watch sees it; a function stands in for what a GPU still has to do."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

from fleet.collective.rendezvous import Place
from fleet.collective.standing import Standing, Way
from fleet.collective.watch import Watch
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, FleetError, PeerLostError


class OtherTrainer:
    """Stands in for the store, with the heartbeats of the other one of two trainers in it."""

    def __init__(self, standing: Standing, *, alive: bool) -> None:
        self.written = ""
        self.looked = threading.Semaphore(0)
        self._standing = standing
        self._alive = alive
        self._beat = 0

    def set_timeout(self, timeout: Any) -> None:
        pass

    def wait(self, keys: Sequence[str], timeout: Any) -> None:
        pass

    def set(self, key: str, value: str) -> None:
        if key.startswith("beat/"):
            self.written = value

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        self._beat += self._alive
        self.looked.release()
        return [f"{self._beat} {self._standing.to_text()}".encode() for _ in keys]

    @property
    def seen(self) -> Standing:
        """What the other trainer reads of this one."""
        return Standing.from_text(self.written.partition(" ")[2])


@contextmanager
def watching(
    store: OtherTrainer,
    lost: Callable[[FleetError], None],
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Watch]:
    deadlines = Deadlines(heartbeat_seconds=0.01, deadline_seconds=0.2)
    watch = Watch(cast("Any", store), Place(0, 2, "localhost", 1), deadlines, lost, clock)
    watch.start()
    try:
        yield watch
    finally:
        watch.close()


def error_of(store: OtherTrainer) -> FleetError:
    """Return what is found while a GPU waits for gradients, and nothing else does."""
    ended, errors = threading.Event(), []

    def lost(error: FleetError) -> None:
        errors.append(error)
        ended.set()

    with watching(store, lost) as watch:
        with watch.waiting("the average of step 0's gradients", Way.EXCHANGE, until=lambda: False):
            pass
        assert ended.wait(10)
    return errors[0]


def test_a_trainer_for_which_only_the_gpu_waits_is_missed():
    store = OtherTrainer(Standing(), alive=False)
    error = error_of(store)
    assert isinstance(error, PeerLostError)
    assert "trainer 1 gave no sign of life" in str(error)
    assert "while the average of step 0's gradients waited" in str(error)
    assert store.seen == Standing(exchanges=1, way=Way.EXCHANGE, what="the average of step 0's gradients")


def test_a_trainer_that_never_comes_where_the_gpu_waits_is_named():
    error = error_of(OtherTrainer(Standing(1, 0, Way.CALL, "stop_worker()"), alive=True))
    assert isinstance(error, ConfigurationError)
    assert "trainer 1 waits for stop_worker() after 0 exchanges of gradients" in str(error)


def test_a_wait_that_the_gpu_has_ended_is_over():
    asked = threading.Event()
    errors: list[FleetError] = []

    def done() -> bool:
        asked.set()
        return True

    store = OtherTrainer(Standing(), alive=False)
    with watching(store, errors.append) as watch:
        with watch.waiting("the average of step 0's gradients", Way.EXCHANGE, until=done):
            pass
        assert asked.wait(10)
    assert store.seen == Standing(exchanges=1)
    assert not errors


def test_a_trainer_that_was_frozen_itself_misses_nobody_for_what_it_did_not_hear():
    moments, errors = [0.0], list[FleetError]()
    store = OtherTrainer(Standing(), alive=False)

    def lost(error: FleetError) -> None:
        errors.append(error)
        store.looked.release()

    with watching(store, lost, lambda: moments[0]) as watch, watch.waiting("step 0"):
        assert store.looked.acquire(timeout=10)
        assert store.looked.acquire(timeout=10)  # the first look has been judged by now
        moments[0] += 1000.0
        for _ in range(3):
            assert store.looked.acquire(timeout=10)
        assert not errors
        while not errors:  # who stays silent while it runs is missed as ever
            moments[0] += 0.05
            assert store.looked.acquire(timeout=10)
    assert isinstance(errors[0], PeerLostError)
