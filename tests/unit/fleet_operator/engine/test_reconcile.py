from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import pytest

from fleet_operator.api import FleetJobStatus, JobState
from fleet_operator.cluster.client import ApiError
from fleet_operator.cluster.interface import ConflictError, Key
from fleet_operator.engine import Observer, Reconciler, Result
from fleet_operator.engine.reconcile import UNSEEN_WRITE, Outcome
from fleet_operator.plan.model import DeletePod, DeleteService, Event, Plan
from tests.support.clusters import FakeClock, FakeCluster
from tests.support.jobs import job

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

RUNNING = FleetJobStatus(state=JobState.RUNNING)
COUNTED = FleetJobStatus(state=JobState.RUNNING, trainers="1/2")
DELETIONS = (DeletePod("digits-trainer-0", "u0"), DeletePod("digits-trainer-1", "u1"))
STARTED = Event("Normal", "Started", "all replicas run")


class Fixture:
    """One job in a cluster of memory, and a plan that the test sets."""

    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.key = self.cluster.add(job())
        self.clock = FakeClock()
        self.plan = Plan(status=RUNNING)
        self.observer = Seen()
        self.reconciler = Reconciler(
            self.cluster, clock=self.clock, decide=lambda *_: self.plan, observer=self.observer
        )

    async def reconcile(self) -> Outcome:
        return await self.reconciler.reconcile(self.key)


class Seen(Observer):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def status_written(self, before: FleetJob, after: FleetJob) -> None:
        self.seen.append((before.status.state, after.status.state))

    def applied(self, job: FleetJob, action: object) -> None:
        self.seen.append(action)


@pytest.fixture
def fixture() -> Fixture:
    return Fixture()


async def test_the_status_is_written_before_the_actions_and_the_events_last(fixture: Fixture):
    fixture.plan = Plan(
        status=RUNNING, actions=DELETIONS, events=(STARTED,), requeue_after=timedelta(minutes=1)
    )
    assert await fixture.reconcile() == Outcome(Result.DONE, timedelta(minutes=1))
    assert fixture.cluster.done == [RUNNING, *DELETIONS, STARTED]
    assert fixture.observer.seen == [(None, JobState.RUNNING), *DELETIONS]


async def test_a_status_that_is_there_already_is_not_written_again(fixture: Fixture):
    await fixture.reconcile()
    fixture.plan = Plan(status=RUNNING, actions=DELETIONS)
    await fixture.reconcile()
    assert fixture.cluster.done == [RUNNING, *DELETIONS]


async def test_a_conflict_discards_the_plan(fixture: Fixture):
    fixture.cluster.conflict = True
    fixture.plan = Plan(status=RUNNING, actions=DELETIONS, events=(STARTED,))
    assert (await fixture.reconcile()).result is Result.CONFLICT
    assert fixture.cluster.done == []


async def test_a_job_that_is_gone_is_left_alone(fixture: Fixture):
    fixture.key = Key("default", "other")
    assert await fixture.reconcile() == Outcome(Result.GONE)
    assert fixture.cluster.done == []


async def test_while_an_own_write_is_unseen_nothing_is_decided(fixture: Fixture):
    fixture.cluster.observed = None
    assert await fixture.reconcile() == Outcome(Result.WAITING, UNSEEN_WRITE)
    assert fixture.cluster.done == []


async def test_mere_counts_wait_up_to_a_second_since_the_first_of_them(fixture: Fixture):
    fixture.plan = Plan(status=COUNTED, urgent=False)
    assert await fixture.reconcile() == Outcome(Result.DONE, timedelta(seconds=1))
    fixture.clock.seconds = 0.75
    fixture.plan = Plan(status=RUNNING, urgent=False, requeue_after=timedelta(seconds=30))
    assert await fixture.reconcile() == Outcome(Result.DONE, timedelta(seconds=0.25))
    assert fixture.cluster.done == []
    fixture.clock.seconds = 1.0
    assert await fixture.reconcile() == Outcome(Result.DONE, timedelta(seconds=30))
    assert fixture.cluster.done == [RUNNING]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(status=COUNTED, urgent=True), id="an-urgent-status"),
        pytest.param(Plan(status=COUNTED, urgent=False, actions=DELETIONS), id="actions"),
        pytest.param(Plan(status=COUNTED, urgent=False, events=(STARTED,)), id="an-event"),
    ],
)
async def test_what_does_not_wait(fixture: Fixture, plan: Plan):
    fixture.plan = plan
    await fixture.reconcile()
    assert fixture.cluster.done == [COUNTED, *plan.actions, *plan.events]


async def test_counts_that_change_back_are_never_written(fixture: Fixture):
    await fixture.reconcile()
    fixture.plan = Plan(status=COUNTED, urgent=False)
    await fixture.reconcile()
    fixture.clock.seconds = 0.5
    fixture.plan = Plan(status=RUNNING, urgent=False)
    await fixture.reconcile()
    fixture.clock.seconds = 1.0
    fixture.plan = Plan(status=COUNTED, urgent=False)
    assert await fixture.reconcile() == Outcome(Result.DONE, timedelta(seconds=1))
    assert fixture.cluster.done == [RUNNING]


async def test_a_refused_action_stops_those_behind_it_and_is_told_once(fixture: Fixture):
    fixture.plan = Plan(status=RUNNING, actions=DELETIONS, events=(STARTED,))
    fixture.cluster.refuse = RuntimeError("exceeded quota")
    assert (await fixture.reconcile()).result is Result.FAILED
    fixture.plan = Plan(status=RUNNING, actions=DELETIONS)
    assert (await fixture.reconcile()).result is Result.FAILED
    told = Event("Warning", "ActionRefused", "DeletePod: exceeded quota")
    assert fixture.cluster.done == [RUNNING, told, STARTED]
    fixture.cluster.refuse = None
    assert (await fixture.reconcile()).result is Result.DONE
    fixture.cluster.refuse = RuntimeError("exceeded quota")
    await fixture.reconcile()
    assert fixture.cluster.done[3:] == [*DELETIONS, told]


async def test_a_cluster_that_is_busy_or_away_is_asked_again_and_nobody_is_told(fixture: Fixture):
    fixture.plan = Plan(status=RUNNING, actions=DELETIONS)
    fixture.cluster.refuse = ApiError(429, "TooManyRequests", "try again")
    assert (await fixture.reconcile()).result is Result.FAILED
    assert fixture.cluster.done == [RUNNING]
    fixture.cluster.refuse = None
    await fixture.reconcile()
    assert fixture.cluster.done == [RUNNING, *DELETIONS]


async def test_a_refusal_is_told_again_to_a_new_job_of_the_same_name(fixture: Fixture):
    fixture.plan = Plan(status=RUNNING, actions=DELETIONS)
    fixture.cluster.refuse = ApiError(403, "Forbidden", "exceeded quota")
    told = Event("Warning", "ActionRefused", "DeletePod: exceeded quota")
    await fixture.reconcile()
    fixture.cluster.add(job(uid="another"))
    await fixture.reconcile()
    assert [each for each in fixture.cluster.done if isinstance(each, Event)] == [told, told]


async def test_a_conflict_in_an_action_means_look_again_and_is_not_told(fixture: Fixture):
    fixture.plan = Plan(status=RUNNING, actions=(DeleteService("digits"),))
    fixture.cluster.refuse = ConflictError("another uid")
    assert (await fixture.reconcile()).result is Result.CONFLICT
    assert fixture.cluster.done == [RUNNING]


async def test_a_cluster_that_asks_to_be_left_alone_is_left_alone(fixture: Fixture):
    fixture.plan = Plan(status=RUNNING, actions=DELETIONS, requeue_after=timedelta(seconds=1))
    fixture.cluster.refuse = ApiError(429, "TooManyRequests", "try again", retry_after_seconds=7)
    assert await fixture.reconcile() == Outcome(Result.FAILED, timedelta(seconds=7))
