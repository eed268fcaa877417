"""Pacing of trainers, the pool of stepping threads, and trainers that train past the others."""

import contextlib
import logging
import queue
import threading
from collections.abc import Iterator

import pytest

from fleet.parameter_server.server.scheduling import Overrun, Pacing, StepPool, receive_bytes

SECONDS = 10.0


class Clock:
    now = 100.0
    each = 0.0
    """By how much it goes on whenever it is read."""

    def __call__(self) -> float:
        self.now += self.each
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pacing(clock: Clock) -> Pacing:
    """Trainer 0 has sent 3,000 bytes of step 5 and trainer 1 has sent 1,000; 1,500 are allowed."""
    made = Pacing(1500, clock, patience_seconds=0)
    for trainer, frames in ((0, 3), (1, 1)):
        for _ in range(frames):
            send(made, trainer)
    return made


def send(pacing: Pacing, trainer: int, step: int = 5) -> None:
    pacing.begin(trainer, step)
    pacing.took(trainer, 1000)


def test_who_is_far_ahead_of_another_is_held_up(pacing):
    assert pacing.is_ahead(0)
    assert not pacing.is_ahead(1)


def test_who_catches_up_lets_the_other_go_on(pacing):
    send(pacing, 1)
    assert not pacing.is_ahead(0)


def test_nobody_waits_for_who_has_paused(pacing, clock):
    clock.now += 0.1
    assert not pacing.is_ahead(0)


def test_a_large_frame_under_way_is_waited_for_a_while(pacing, clock):
    pacing.begin(1, 5)
    clock.now += 0.9
    assert pacing.is_ahead(0)
    clock.now += 0.2
    assert not pacing.is_ahead(0)


@pytest.mark.parametrize("trainer_1_is", ["at-its-end", "at-another-step"])
def test_nobody_waits_for_who_sends_nothing_of_this_step(pacing, trainer_1_is):
    if trainer_1_is == "at-its-end":
        pacing.ended(1)
    else:
        send(pacing, 1, step=6)
    assert not pacing.is_ahead(0)


def test_the_end_of_an_earlier_life_amid_a_frame_breaks_nothing(pacing):
    pacing.begin(1, 5)
    pacing.ended(1)
    pacing.took(1, 1000)
    send(pacing, 1)
    assert pacing.is_ahead(0)


def test_without_a_bound_kernel_buffers_have_the_systems_size():
    assert receive_bytes(None) is None
    assert receive_bytes(1 << 18) is not None


def test_a_frame_is_held_up_until_the_other_has_caught_up(clock):
    pacing = Pacing(1500, clock, patience_seconds=60)
    began = threading.Event()

    def ahead() -> None:
        for _ in range(3):
            send(pacing, 0)
        began.set()
        send(pacing, 0)

    send(pacing, 1)
    thread = threading.Thread(target=ahead, daemon=True)
    thread.start()
    assert began.wait(10)
    thread.join(0.2)
    assert thread.is_alive()
    send(pacing, 1)
    thread.join(10)
    assert not thread.is_alive()


def test_a_frame_is_not_held_up_for_ever(clock, monkeypatch):
    pacing = Pacing(1500, clock, patience_seconds=0.03)
    monkeypatch.setattr(clock, "each", 0.01)
    send(pacing, 1)
    pacing.begin(1, 5)
    for _ in range(4):
        send(pacing, 0)
    assert pacing.is_ahead(0)


@pytest.fixture
def pool() -> Iterator[StepPool]:
    made = StepPool(2)
    made.start()
    yield made
    made.close()


def test_as_much_is_done_at_once_as_there_are_threads(pool):
    met = threading.Barrier(3)
    for _ in range(2):
        pool.submit(lambda: met.wait(SECONDS))
    met.wait(SECONDS)


def test_no_more_is_done_at_once_than_there_are_threads(pool):
    three, met = threading.Barrier(3), queue.SimpleQueue[bool]()

    def meet() -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            three.wait(0.5)
        met.put(not three.broken)

    for _ in range(3):
        pool.submit(meet)
    assert [met.get(timeout=SECONDS) for _ in range(3)] == [False, False, False]


def test_what_was_handed_over_is_done_before_the_threads_end():
    pool, done = StepPool(2), threading.Semaphore(0)
    for _ in range(4):
        pool.submit(lambda: done.release())
    pool.close()
    pool.start()
    assert all(done.acquire(timeout=SECONDS) for _ in range(4))
    for thread in pool._threads:
        thread.join(SECONDS)
        assert not thread.is_alive()


class Steps:
    """The steps that trainers make next, as a mode knows them."""

    def __init__(self) -> None:
        self.next = {0: 0, 1: 0, 2: 0}
        self.overrun = Overrun(self.next.__getitem__, 2)

    def begin(self, trainer: int, step: int) -> None:
        self.next[trainer] = step
        self.overrun.begins(trainer)

    def complete(self, trainer: int, step: int) -> None:
        self.next[trainer] = step
        self.overrun.completed(trainer, step)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]


@pytest.mark.parametrize("late", [pytest.param(1, id="started-again"), pytest.param(2, id="added")])
def test_a_late_trainer_is_told_once_and_counted(late, caplog):
    steps = Steps()
    steps.overrun.joined(late, again=late == 1)
    steps.begin(late, 199)
    assert steps.overrun.steps(late) == 0
    steps.complete(0, 200)
    assert warnings(caplog) == []
    for step in range(200, 273):
        steps.begin(late, step)
    (once,) = warnings(caplog)
    assert (
        f"trainer {late}, which joined late, trains past the others: they have completed at step 200" in once
    )
    assert steps.overrun.steps(late) == 72
    steps.complete(late, 273)
    assert warnings(caplog)[1:] == [f"trainer {late} has made 73 steps past the others"]


def test_one_that_was_there_all_the_time_may_have_a_longer_share(caplog):
    steps = Steps()
    steps.overrun.joined(1, again=False)
    steps.complete(0, 200)
    steps.begin(1, 200)
    steps.complete(1, 210)
    assert warnings(caplog) == []
    assert steps.overrun.steps(1) == 0


def test_a_late_trainer_that_ends_with_the_others_hears_nothing(caplog):
    steps = Steps()
    steps.overrun.joined(1, again=True)
    steps.complete(0, 200)
    steps.begin(1, 199)
    steps.complete(1, 200)
    assert warnings(caplog) == []
