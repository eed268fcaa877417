"""How long news of a job may wait after a pass."""

from __future__ import annotations

import pytest

from fleet_operator.api import Condition, ConditionStatus, ConditionType, FleetJobStatus, JobState
from fleet_operator.engine.rest import COMING_UP, rest


def status(state: JobState, *, created: bool) -> FleetJobStatus:
    told = Condition(
        type=ConditionType.PODS_CREATED,
        status=ConditionStatus.TRUE if created else ConditionStatus.FALSE,
        reason="PodsCreated" if created else "CreatingPods",
        last_transition_time="2026-11-22T03:00:00Z",
    )
    return FleetJobStatus(state=state, conditions=(told,))


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.RESTARTING])
def test_pods_that_are_there_may_come_up_in_their_own_time(state: JobState):
    assert rest(status(state, created=True)) == COMING_UP


def test_a_pod_that_is_still_to_be_created_waits_for_no_rest():
    assert rest(status(JobState.PENDING, created=False)) is None
    assert rest(FleetJobStatus()) is None


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED, JobState.SUCCEEDED, JobState.FAILED])
def test_a_job_that_runs_or_has_ended_is_never_left_alone(state: JobState):
    assert rest(status(state, created=True)) is None
