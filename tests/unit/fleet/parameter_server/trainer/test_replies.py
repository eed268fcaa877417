"""What a trainer expects of its servers: values of which steps, and how a wait is logged."""

import logging

import pytest

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes import Sync
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer import replies as module
from fleet.parameter_server.trainer.parameters import ParameterStore
from fleet.parameter_server.trainer.replies import Replies
from fleet.parameter_server.waits import WaitLog
from tests.support.modes import plans


class MinuteClock:
    """Stands in for a condition: a wait lasts for a minute, and the value comes by the end of the second."""

    def __init__(self) -> None:
        self.now = 0.0
        self.missing = ["weight"]

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...

    def wait_for(self, *_: object) -> bool:
        return False

    def wait(self, _: float) -> None:
        self.now += 60.0
        if self.now == 120.0:
            self.missing.clear()


def expecting_nothing(step: int = 0) -> Replies:
    """Return the replies of a trainer that has made so many steps."""
    _, plan, parameters = plans(Sync(), 1)
    replies = Replies(plan, Settings(), ParameterStore(plan.blocks, parameters))
    replies.step = step
    return replies


@pytest.mark.parametrize("step", [4, 6])
def test_values_of_another_step_than_all_servers_were_asked_for_are_refused(step):
    replies = expecting_nothing(5)
    replies.expect_values(present=True, exactly=True)
    replies.value_landed(0, 5, changed=True)
    with pytest.raises(RemoteProtocolError, match=f"of step {step}, which was not requested at step 5"):
        replies.value_landed(1, step, changed=True)


@pytest.mark.parametrize(("present", "steps"), [(True, (0, 9)), (False, (5, 6))])
def test_any_other_value_may_be_newer_and_a_present_one_older(present, steps):
    replies = expecting_nothing(5)
    replies.expect_values(present=present)
    for block, step in enumerate(steps):
        replies.value_landed(block, step, changed=True)
    assert replies.values_arrived


def test_a_value_from_before_the_step_is_refused():
    replies = expecting_nothing(5)
    replies.expect_values()
    with pytest.raises(RemoteProtocolError, match="of step 4, which was not requested"):
        replies.value_landed(0, 4, changed=True)


def test_a_value_that_has_come_is_not_logged_as_missing(monkeypatch, caplog):
    clock = MinuteClock()
    monkeypatch.setattr(module, "WaitLog", lambda _: WaitLog(lambda: clock.now))
    replies = expecting_nothing()
    monkeypatch.setattr(replies, "_changed", clock)
    with caplog.at_level(logging.WARNING):
        replies.wait_until(lambda: not clock.missing, lambda: ", ".join(clock.missing) or "nothing")
    assert caplog.messages == ["waiting for weight, for 60 s"]
