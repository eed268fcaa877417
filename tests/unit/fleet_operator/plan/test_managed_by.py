"""runPolicy.managedBy: a job that another controller takes care of is left alone."""

import pytest

from fleet_operator.api.names import CONTROLLER
from tests.support.plans import Story, ended, pserver, trainer

FOREIGN = {"managedBy": "kueue.x-k8s.io/multikueue"}


@pytest.mark.parametrize(
    "pods",
    [
        pytest.param((), id="nothing-there"),
        pytest.param((pserver(0), ended(trainer(0), 1)), id="a-failure"),
        pytest.param((ended(trainer(0)), ended(trainer(1))), id="a-success"),
    ],
)
def test_nothing_is_done_and_no_status_written(pods):
    story = Story(runPolicy={**FOREIGN, "suspend": True, "activeDeadlineSeconds": 1})
    before = story.job.status
    assert story.sees(*pods, service=False, after=60)[1:] == []
    assert story.job.status == before


def test_the_operators_own_name_is_as_good_as_none():
    story = Story(runPolicy={"managedBy": CONTROLLER})
    assert "create Service digits" in story.sees(service=False)
