"""Active deadline: how long a job may take."""

import pytest

from fleet_operator.plan.deadline import deadline
from tests.support.plans import T0, Story, at, ended, pserver, trainer


@pytest.mark.parametrize(
    ("start", "seconds", "expected"),
    [
        pytest.param(T0, 60, at(60), id="counts-from-the-start"),
        pytest.param(T0, None, None, id="none-is-all-the-time"),
        pytest.param(None, 60, None, id="not-before-the-start"),
    ],
)
def test_deadline(start, seconds, expected):
    assert deadline(start, seconds) == expected


def test_a_job_that_takes_too_long_fails_and_its_pods_go():
    story = Story(runPolicy={"activeDeadlineSeconds": 100})
    pods = (pserver(0), pserver(1), trainer(0), ended(trainer(1)))
    assert story.sees(*pods)[-1] == "look again after 100 s"
    sentence = "the job has not finished within runPolicy.activeDeadlineSeconds, 100 s"
    assert story.sees(*pods, after=100) == [
        "Failed pservers 2/2 trainers 2/2 restarts 0 failures 0",
        "PodsCreated True PodsCreated: the pods of all replicas are there",
        f"Running False DeadlineExceeded: {sentence}",
        f"Failed True DeadlineExceeded: {sentence}; raise it, and create the job again",
        "delete digits-pserver-0 0.0",
        "delete digits-pserver-1 0.0",
        "delete digits-trainer-0 0.0",
        f"tell Warning Failed: {sentence}; raise it, and create the job again",
    ]


def test_a_job_that_completes_at_the_last_moment_has_succeeded():
    story = Story(runPolicy={"activeDeadlineSeconds": 100})
    story.sees(pserver(0), pserver(1), trainer(0), trainer(1))
    story.sees(pserver(0), pserver(1), ended(trainer(0)), ended(trainer(1)), after=100)
    assert story.job.status.state == "Succeeded"


def test_time_in_suspension_does_not_count():
    story = Story(runPolicy={"activeDeadlineSeconds": 100})
    story.sees()
    story.edit(suspend=True)
    assert not any("look again" in line for line in story.sees(after=50))
    story.edit(suspend=False)
    assert story.sees(after=1000)[-1] == "look again after 100 s"
