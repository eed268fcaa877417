"""How long news of a job, and its status, may wait."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from fleet_operator.api import Columns, Condition, ConditionStatus, ConditionType, FleetJobStatus, JobState
from fleet_operator.cluster import Key
from fleet_operator.engine.batching import (
    COMING_UP,
    COUNTS,
    FIRST,
    MOST_OBJECTS,
    QUIET,
    StatusBatching,
    debounce,
)
from fleet_operator.plan.model import (
    CreatePod,
    CreateService,
    DeletePod,
    DeleteService,
    EnsureObject,
    Event,
    Plan,
)
from tests.support.jobs import job, manifest

if TYPE_CHECKING:
    from fleet_operator.plan.model import Action

KEY = Key("default", "digits")
PENDING = FleetJobStatus(state=JobState.PENDING, columns=Columns(trainers="0/2"))
ONE_RUNS = FleetJobStatus(state=JobState.PENDING, columns=Columns(trainers="1/2"))
RUNNING = FleetJobStatus(state=JobState.RUNNING, columns=Columns(trainers="2/2"))
SAID = Event("Warning", "NameTaken", "another has the name")
CREATIONS = (CreateService({}), CreatePod(dict))


class Waiting:
    """One job, the status that was last written, and what the policy says at one moment."""

    def __init__(self) -> None:
        self.batching = StatusBatching()
        self.job = job()
        self.written = FleetJobStatus()

    def wait(
        self,
        seconds: float,
        status: FleetJobStatus,
        *actions: Action,
        events: tuple[Event, ...] = (),
        urgent: bool = False,
    ) -> timedelta | None:
        plan = Plan(status=status, actions=actions, events=events, urgent=urgent)
        return self.batching.wait(KEY, self.job.with_status(self.written), plan, seconds)


@pytest.fixture
def waiting() -> Waiting:
    return Waiting()


def test_a_job_may_have_its_pods_before_its_first_status(waiting: Waiting):
    assert waiting.wait(0, PENDING, *CREATIONS, urgent=True) == FIRST
    assert waiting.wait(0.25, PENDING, urgent=True) == FIRST - timedelta(seconds=0.25)
    assert waiting.wait(FIRST.total_seconds(), PENDING, urgent=True) is None


def test_where_it_runs_by_then_one_status_tells_of_both(waiting: Waiting):
    waiting.wait(0, PENDING, *CREATIONS, urgent=True)
    assert waiting.wait(0.1, RUNNING, urgent=True) is None


def test_of_the_first_replicas_that_run_is_told_within_half_a_second_at_most(waiting: Waiting):
    waiting.wait(0, PENDING, *CREATIONS, urgent=True)
    assert waiting.wait(0.1, ONE_RUNS, urgent=True) == COUNTS
    assert waiting.wait(0.1 + COUNTS.total_seconds(), ONE_RUNS, urgent=True) is None


@pytest.mark.parametrize(
    ("status", "actions", "events"),
    [
        pytest.param(PENDING, (DeletePod("digits-trainer-0", "u0"),), (), id="pods-that-go"),
        pytest.param(PENDING, (DeleteService("digits"),), (), id="a-service-that-goes"),
        pytest.param(PENDING, (EnsureObject({}), *CREATIONS), (), id="what-may-outlive-the-job"),
        pytest.param(PENDING, (CreatePod(dict),) * (MOST_OBJECTS + 1), (), id="many-pods"),
        pytest.param(PENDING, CREATIONS, (SAID,), id="something-to-tell"),
        pytest.param(FleetJobStatus(state=JobState.SUSPENDED), (), (), id="a-job-that-is-held"),
        pytest.param(FleetJobStatus(state=JobState.FAILED), (), (), id="a-job-that-can-never-run"),
    ],
)
def test_any_other_first_status_goes_first(
    waiting: Waiting, status: FleetJobStatus, actions: tuple[Action, ...], events: tuple[Event, ...]
):
    assert waiting.wait(0, status, *actions, events=events, urgent=True) is None


def test_where_the_number_of_trainers_may_change_the_status_remembers_it_before_there_are_any(
    waiting: Waiting,
):
    waiting.job = job(manifest(trainer={"replicas": 2, "minReplicas": 1, "maxReplicas": 3}))
    assert waiting.wait(0, PENDING, *CREATIONS, urgent=True) is None


def test_a_status_that_waited_in_vain_waits_no_longer(waiting: Waiting):
    waiting.wait(0, PENDING, *CREATIONS, urgent=True)
    waiting.batching.hurry(KEY)
    assert waiting.wait(0.1, PENDING, *CREATIONS, urgent=True) is None


def test_a_status_that_could_not_be_written_does_not_wait_again(waiting: Waiting):
    waiting.wait(0, PENDING, *CREATIONS, urgent=True)
    for seconds in (1, 1.1):
        assert waiting.wait(seconds, PENDING, urgent=True) is None


def test_a_status_that_there_is_goes_before_what_is_created(waiting: Waiting):
    waiting.written = FleetJobStatus(state=JobState.RESTARTING)
    assert waiting.wait(0, PENDING, *CREATIONS, urgent=True) is None


def test_mere_counts_wait_since_the_first_of_them(waiting: Waiting):
    waiting.written = PENDING
    assert waiting.wait(0, ONE_RUNS) == COUNTS
    two = ONE_RUNS.model_copy(update={"columns": Columns(trainers="2/2")})
    assert waiting.wait(0.25, two) == COUNTS - timedelta(seconds=0.25)
    assert waiting.wait(COUNTS.total_seconds(), two) is None


def test_what_tells_of_no_more_replicas_waits_longer_and_does_not_shorten_what_follows(waiting: Waiting):
    waiting.written = PENDING
    there = PENDING.model_copy(update={"trainer_replicas": 2})
    assert waiting.wait(0, there) == QUIET
    assert waiting.wait(1, there) == QUIET - timedelta(seconds=1)
    one_runs = there.model_copy(update={"columns": Columns(trainers="1/2")})
    assert waiting.wait(1.25, one_runs) == COUNTS
    assert waiting.wait(1.5, there) == QUIET - timedelta(seconds=1.5)  # it has ended again
    assert waiting.wait(1.75, one_runs) == timedelta(seconds=0.25)  # the two seconds are over first
    assert waiting.wait(2, one_runs) is None


def test_counts_that_change_back_have_never_waited(waiting: Waiting):
    waiting.written = PENDING
    assert waiting.wait(0, ONE_RUNS) == COUNTS
    assert waiting.wait(0.25, PENDING) is None
    assert waiting.wait(0.5, ONE_RUNS) == COUNTS


def test_a_job_that_is_forgotten_begins_anew(waiting: Waiting):
    waiting.wait(0, PENDING, *CREATIONS, urgent=True)
    waiting.batching.forget(KEY)
    assert waiting.wait(FIRST.total_seconds(), PENDING, *CREATIONS, urgent=True) == FIRST


@pytest.mark.parametrize(
    ("actions", "events", "urgent"),
    [
        pytest.param((), (), True, id="an-urgent-status"),
        pytest.param(CREATIONS, (), False, id="actions"),
        pytest.param((), (SAID,), False, id="an-event"),
    ],
)
def test_what_does_not_wait(
    waiting: Waiting, actions: tuple[Action, ...], events: tuple[Event, ...], urgent: bool
):
    waiting.written = PENDING
    assert waiting.wait(0, ONE_RUNS, *actions, events=events, urgent=urgent) is None


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
    assert debounce(status(state, created=True)) == COMING_UP


def test_a_pod_that_is_still_to_be_created_waits_for_no_rest():
    assert debounce(status(JobState.PENDING, created=False)) is None
    assert debounce(FleetJobStatus()) is None


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.SUSPENDED, JobState.SUCCEEDED, JobState.FAILED])
def test_a_job_that_runs_or_has_ended_is_never_left_alone(state: JobState):
    assert debounce(status(state, created=True)) is None
