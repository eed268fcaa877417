"""Pacing of trainers, and trainers that train past the others."""

import logging

import pytest

from fleet.parameter_server.server.scheduling import Overrun, Pacing, receive_bytes


class Clock:
    now = 100.0

    def __call__(self) -> float:
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
    assert not pacing.begin(trainer, step, lambda: None), "the frame may be received"
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
    assert not pacing.begin(1, 5, lambda: None)
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
    assert not pacing.begin(1, 5, lambda: None)
    pacing.ended(1)
    pacing.took(1, 1000)
    send(pacing, 1)
    assert pacing.is_ahead(0)


def test_without_a_bound_kernel_buffers_have_the_systems_size():
    assert receive_bytes(None) is None
    assert receive_bytes(1 << 18) is not None


def test_a_frame_is_held_up_until_the_other_has_caught_up(clock):
    pacing, resumed = Pacing(1500, clock, patience_seconds=60), list[int]()
    send(pacing, 1)
    for _ in range(3):
        send(pacing, 0)
    assert pacing.begin(0, 5, lambda: resumed.append(0))
    assert not resumed
    send(pacing, 1)
    assert resumed == [0]
    send(pacing, 0)


def test_a_frame_is_not_held_up_for_ever(clock):
    pacing = Pacing(1500, clock, patience_seconds=0.03)
    send(pacing, 1)
    assert not pacing.begin(1, 5, lambda: None)
    for _ in range(3):
        send(pacing, 0)
    waited = 0.0
    while delay := pacing.begin(0, 5, lambda: None):
        clock.now += delay
        waited += delay
    assert waited == pytest.approx(0.03)
    assert pacing.is_ahead(0)


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
    assert f"trainer {late} joined late, and continues after the others completed at step 200" in once
    assert steps.overrun.steps(late) == 72
    steps.complete(late, 273)
    assert warnings(caplog)[1:] == [f"trainer {late} has made 73 steps after the others completed"]


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
