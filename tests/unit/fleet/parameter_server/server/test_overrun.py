"""Who is told to train past the others, and by how much."""

import logging

import pytest

from fleet.parameter_server.server.overrun import Overrun


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
