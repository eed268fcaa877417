"""What a server's answer to a heartbeat proves, and what it says of tables."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from grpc import FutureTimeoutError

from fleet.errors import FleetError, PeerLostError, StateLostError
from fleet.parameter_server.control.heartbeat import Heartbeat, TableTotals
from fleet.parameter_server.control.proto import control_pb2
from fleet.parameter_server.settings import Settings
from fleet.process.resources import WatchClock

SETTINGS = Settings(heartbeat_seconds=0.01, deadline_seconds=60.0)
SECONDS = 10.0


class Control:
    """A server whose answers the test gives, each once; at the end it answers by itself."""

    endpoint = "ps-0:7164"

    def __init__(self) -> None:
        self.called = threading.Semaphore(0)
        self._latest: Future[control_pb2.HeartbeatReply] = Future()
        self._over = False
        self._lock = threading.Lock()

    def heartbeat(self, timeout_seconds: float) -> "Future[control_pb2.HeartbeatReply]":
        with self._lock:
            self._latest = Future()
            if self._over:
                self.answer()
        self.called.release()
        return self._latest

    def answer(self, incarnation: str = "first") -> None:
        self._latest.set_result(control_pb2.HeartbeatReply(incarnation=incarnation))

    def refuse(self) -> None:
        self._latest.set_exception(FutureTimeoutError())

    def end(self) -> None:
        with self._lock:
            self._over = True
            if not self._latest.done():
                self.answer()


@contextmanager
def beating(
    control: Any,
    on_failure: Callable[[FleetError], None] = lambda _: None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Heartbeat]:
    """Give a heartbeat to one server; it ends with the block."""
    watch_clock = WatchClock(SETTINGS.glance_seconds, clock)
    heartbeat = Heartbeat([control], ["first"], SETTINGS, on_failure, lambda: None, watch_clock)
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        control.end()
        heartbeat.stop()


def test_an_answer_proves_that_the_server_lived_when_it_was_asked_and_not_later():
    control = Control()
    with beating(control) as heartbeat:
        assert control.called.acquire(timeout=SECONDS)
        asked = time.monotonic()
        assert heartbeat.lived(0) == 0.0
        control.answer()
        assert control.called.acquire(timeout=SECONDS)  # the next beat: the answer has been taken
        assert 0.0 < heartbeat.lived(0) <= asked


def test_a_later_life_is_reported_before_it_counts_as_a_sign_of_life():
    control = Control()
    found: list[tuple[FleetError, float]] = []
    with beating(control, lambda error: found.append((error, heartbeat.lived(0)))) as heartbeat:
        assert control.called.acquire(timeout=SECONDS)
        control.answer("second")
        assert control.called.acquire(timeout=SECONDS)
        ((error, lived),) = found
        assert isinstance(error, StateLostError)
        assert lived == 0.0 < heartbeat.lived(0)


def test_a_trainer_that_was_frozen_itself_gives_no_server_up_for_what_it_did_not_hear():
    control, moments, found = Control(), [0.0], list[FleetError]()
    with beating(control, found.append, lambda: moments[0]):
        assert control.called.acquire(timeout=SECONDS)
        control.answer()
        assert control.called.acquire(timeout=SECONDS)
        moments[0] += 1000.0  # the call that was under way is too late then
        control.refuse()
        assert control.called.acquire(timeout=SECONDS)
        assert not found
        looks = 0
        while not found:  # who stays silent while it runs is given up as ever
            moments[0] += 1.0
            looks += 1
            control.refuse()
            assert control.called.acquire(timeout=SECONDS)
        assert isinstance(found[0], PeerLostError)
        assert looks >= SETTINGS.deadline_seconds - SETTINGS.glance_seconds


def test_a_server_whose_values_arrive_lives_though_it_answers_no_beat():
    control, moments, found = Control(), [0.0], list[FleetError]()
    with beating(control, found.append, lambda: moments[0]) as heartbeat:
        assert control.called.acquire(timeout=SECONDS)
        for _ in range(3 * int(SETTINGS.deadline_seconds)):
            moments[0] += 1.0
            heartbeat.heard(0)
            control.refuse()
            assert control.called.acquire(timeout=SECONDS)
        assert not found


def told(rows: int, name: str = "users", **others: int) -> control_pb2.TableStatistics:
    return control_pb2.TableStatistics(name=name, rows=rows, bytes=100 * rows, **others)


def test_each_servers_latest_word_counts():
    subject = TableTotals()
    assert subject.total() == []
    subject.take(0, [told(3)])
    subject.take(1, [told(5), told(0, "items")])
    subject.take(0, [told(4)])
    users, items = subject.total()
    assert (users["name"], users["rows"], users["bytes"]) == ("users", 9, 900)
    assert items == {"name": "items", "rows": 0, "bytes": 0, "rowsOnDisk": 0, "shardSkew": 1.0}


def test_hits_are_of_all_ids_that_were_asked_for_and_the_skew_is_of_the_fullest_shard_of_all():
    subject = TableTotals()
    subject.take(0, [told(384, rows_on_disk=7, looked_up=10, found=9, rows_of_fullest_shard=4)])
    subject.take(1, [told(128, rows_on_disk=1, looked_up=90, found=70, rows_of_fullest_shard=9)])
    (users,) = subject.total()
    assert (users["rowsOnDisk"], users["hitPercentage"], users["shardSkew"]) == (8, 79, 4.5)
