"""Answers that a trainer awaits: of which steps they may be."""

import pytest

from fleet.errors import RemoteProtocolError
from fleet.parameter_server.modes import Sync
from fleet.parameter_server.settings import Settings
from fleet.parameter_server.trainer.awaited import AwaitedValues
from fleet.parameter_server.trainer.waits import Waits
from fleet.process.resources import WatchClock
from tests.support.modes import plans


def awaited() -> AwaitedValues:
    """Return what awaits nothing yet."""
    settings = Settings()
    return AwaitedValues(plans(Sync(), 1)[1].blocks, Waits(settings, WatchClock(settings.glance_seconds)))


@pytest.mark.parametrize("step", [4, 6])
def test_values_of_another_step_than_all_servers_were_asked_for_are_refused(step):
    values = awaited()
    values.expect(5, present=True, exactly=True)
    values.landed(0, 5, changed=True)
    with pytest.raises(RemoteProtocolError, match=f"of step {step}, which nobody awaits at step 5"):
        values.landed(1, step, changed=True)


@pytest.mark.parametrize(("present", "steps"), [(True, (0, 9)), (False, (5, 6))])
def test_any_other_answer_may_be_newer_and_a_present_value_older(present, steps):
    values = awaited()
    values.expect(5, present=present)
    for block, step in enumerate(steps):
        values.landed(block, step, changed=True)
    assert values.all_landed


def test_an_answer_from_before_the_step_is_refused():
    values = awaited()
    values.expect(5)
    with pytest.raises(RemoteProtocolError, match="of step 4, which nobody awaits"):
        values.landed(0, 4, changed=True)
