"""Trainers that send the same step keep close to each other, and nobody is held up by who does not send."""

import threading

import pytest

from fleet.parameter_server.server.pacing import Pacing, receive_bytes


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


def test_without_a_bound_nobody_is_ahead(clock):
    free = Pacing(None, clock)
    send(free, 0)
    send(free, 1)
    assert receive_bytes(None) is None
    assert not free._senders


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
