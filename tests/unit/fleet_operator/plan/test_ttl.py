"""Time to live after the end: when a finished job is deleted."""

import pytest

from fleet_operator.plan.ttl import expiry
from tests.support.plans import T0, Story, at, ended, pserver, trainer


@pytest.mark.parametrize(
    ("completion", "seconds", "expected"),
    [
        pytest.param(T0, 60, at(60), id="counts-from-the-end"),
        pytest.param(T0, 0, T0, id="zero-is-at-once"),
        pytest.param(T0, None, None, id="none-keeps-the-job"),
        pytest.param(None, 60, None, id="not-before-the-end"),
    ],
)
def test_expiry(completion, seconds, expected):
    assert expiry(completion, seconds) == expected


def test_the_job_is_deleted_when_its_time_is_over():
    story = Story(runPolicy={"ttlSecondsAfterFinished": 100})
    done = (ended(pserver(0)), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    assert story.sees(*done)[-1] == "look again after 100 s"
    assert story.sees(*done, after=99.5)[-1] == "look again after 0.5 s"
    assert story.sees(*done, after=100)[-1] == "delete the job"


def test_a_time_set_after_the_end_counts_from_the_end():
    story = Story()
    done = (ended(pserver(0)), ended(pserver(1)), ended(trainer(0)), ended(trainer(1)))
    story.sees(*done)
    story.edit(ttl_seconds_after_finished=10)
    assert story.sees(*done, after=50)[-1] == "delete the job"
