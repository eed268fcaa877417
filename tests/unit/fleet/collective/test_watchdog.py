"""Whom a trainer waits for, as its watch sees it; a function stands in for what a GPU still has to do."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import pytest

from fleet.collective import watchdog as watch_module
from fleet.collective.heartbeats import Digest, Missed, Somewhere
from fleet.collective.rendezvous import Place
from fleet.collective.standing import Standing, Way
from fleet.collective.watchdog import Watch
from fleet.environment.deadlines import Deadlines
from fleet.errors import ConfigurationError, FleetError, PeerLostError
from tests.support.counted_store import CountedStore
from tests.support.processes import wait_for


class OtherTrainer:
    """Stands in for the store, with the heartbeats of the other one of two trainers in it."""

    def __init__(self, standing: Standing, *, alive: bool) -> None:
        self.written = ""
        self.looked = threading.Semaphore(0)
        self._standing = standing
        self._alive = alive
        self._beat = 0
        self._values: dict[str, str] = {}

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

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return self._values[key].encode()

    def add(self, key: str, number: int) -> int:
        return number

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


@pytest.mark.parametrize("size", [512, 1024])
def test_what_trainers_that_wait_ask_the_store_grows_with_their_number_and_not_with_its_square(size):
    store: Any = CountedStore()
    deadlines, errors = Deadlines(heartbeat_seconds=1.0), list[FleetError]()
    watches = [
        Watch(store, Place(rank, size, "localhost", 1), deadlines, errors.append) for rank in range(size)
    ]
    with ExitStack() as all_wait:
        for watch in watches:
            watch.start()
            all_wait.callback(watch.close)
            all_wait.enter_context(watch.waiting("the average of step 3456's gradients", Way.EXCHANGE))
        began = store.keys, store.bytes, store.sets
        while store.sets - began[2] < 3 * size:
            time.sleep(0.1)
        keys, num_bytes, beats = store.keys - began[0], store.bytes - began[1], store.sets - began[2]
    assert keys <= 6 * beats
    assert num_bytes <= 800 * beats
    assert not errors


@contextmanager
def watches(size: int, alive: int) -> Iterator[tuple[list[Watch], list[list[FleetError]]]]:
    """Have the first of some trainers live, and the others have beaten once."""
    store: Any = CountedStore()
    deadlines = Deadlines(heartbeat_seconds=0.05, deadline_seconds=1.0)
    errors: list[list[FleetError]] = [[] for _ in range(size)]
    all_ = [
        Watch(store, Place(rank, size, "localhost", 1), deadlines, errors[rank].append)
        for rank in range(size)
    ]
    with ExitStack() as closing:
        for watch in all_:
            watch.start()
            closing.callback(watch.close)
        for watch in all_[alive:]:
            watch.close()
        yield all_, errors


def test_those_that_read_what_another_has_found_miss_one_as_soon_as_that_one_does():
    with watches(4, alive=3) as (all_, errors), ExitStack() as waiting:
        for watch in all_[:3]:
            waiting.enter_context(watch.waiting("a barrier", Way.CALL))
        began = time.monotonic()
        wait_for(lambda: all(errors[:3]), "an error of each", seconds=10)
        assert time.monotonic() - began >= 1.0
    for (error,) in errors[:3]:
        assert isinstance(error, PeerLostError)
        assert str(error).startswith("trainer 3 gave no sign of life for 1 s while a barrier waited")


def test_those_that_read_what_another_has_found_learn_that_they_wait_in_vain():
    with watches(4, alive=4) as (all_, errors), ExitStack() as waiting:
        waiting.enter_context(all_[1].waiting("the average of step 0's gradients", Way.EXCHANGE))
        waiting.enter_context(all_[2].waiting("stop_worker()", Way.CALL))
        wait_for(lambda: errors[1] and errors[2], "both errors", seconds=10)
        assert str(errors[1][0]).startswith("trainer 2 waits for stop_worker() after 0 exchanges")
        assert str(errors[2][0]).startswith("trainer 1 waits for the average of step 0's gradients after 0")
        assert not errors[0]
        assert not errors[3]


def test_each_that_waits_says_for_whom_and_only_the_first_by_name(monkeypatch, caplog):
    monkeypatch.setattr(watch_module, "SAID_AFTER_SECONDS", 0.4)
    with watches(24, alive=13) as (all_, _), ExitStack() as waiting:
        for watch in all_[:2]:
            waiting.enter_context(watch.waiting("a barrier", Way.CALL))
        silent = "no sign of life from trainer 13, trainer 14, .*, trainer 20 and 3 more"
        busy = "not there yet: trainer 2, trainer 3, .*, trainer 9 and 3 more"
        said = re.compile(f"a barrier waits since 0 s; {silent}, {busy}")
        wait_for(lambda: len(said.findall(caplog.text)) >= 2, "a word of each", seconds=10)


def test_a_wait_that_began_after_a_heartbeat_is_told_before_it_is_found_to_be_in_vain():
    class Late(OtherTrainer):
        def multi_get(self, keys: Sequence[str]) -> list[bytes]:
            if not self.seen.what:
                waits.enter_context(watch.waiting("the average of step 0's gradients", Way.EXCHANGE))
            return super().multi_get(keys)

    store = Late(Standing(1, 0, Way.CALL, "stop_worker()"), alive=True)
    ended = threading.Event()
    with ExitStack() as waits:
        with watching(store, lambda _: ended.set()) as watch:
            waits.enter_context(watch.waiting("", Way.OTHER))
            assert ended.wait(10)
        assert store.seen.way is Way.EXCHANGE
        assert (
            "the average of step 0's gradients" in store.compare_set("what heartbeats say", "-", "").decode()
        )


def judging(found: Digest) -> None:
    """Have trainer 0, which waits, judge by what another has found."""
    store = OtherTrainer(Standing(), alive=False)
    watch = Watch(cast("Any", store), Place(0, 2, "localhost", 1), Deadlines(), lambda _: None)
    with watch.waiting("a barrier", Way.CALL):
        watch._judge(found)


def test_a_trainer_is_not_given_up_whose_heartbeat_has_come_since():
    judging(Digest(1, missed=[Missed(1, -1, 500.0)]))
    with pytest.raises(PeerLostError, match="trainer 1 gave no sign of life for 500 s"):
        judging(Digest(1, missed=[Missed(1, 0, 500.0)]))


def test_a_trainer_waits_neither_for_itself_nor_with_those_whom_it_has_still_to_hear_of(monkeypatch, caplog):
    monkeypatch.setattr(watch_module, "SAID_AFTER_SECONDS", -1.0)
    judging(Digest(1, missed=[Missed(0, 0, 500.0)], places=[Somewhere(Standing(), 2, [0, 1])]))
    judging(Digest(1))
    assert [record.getMessage() for record in caplog.records] == [
        "a barrier waits since 0 s; every trainer is alive, not there yet: trainer 1"
    ]
