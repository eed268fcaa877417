from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest

from fleet_operator.api import Columns, FleetJobStatus, JobState
from fleet_operator.cluster import ConflictError, Key
from fleet_operator.engine import Observer, Reconciler, Result
from fleet_operator.engine.batching import COUNTS, FIRST
from fleet_operator.engine.passes import Outcome
from fleet_operator.engine.reconcile import AT_ONCE, MOST_ON_LOOP, UNSEEN_WRITE
from fleet_operator.kubernetes.client import ApiError
from fleet_operator.plan.model import (
    CreatePod,
    CreateService,
    DeletePod,
    DeleteService,
    EnsureObject,
    Event,
    Plan,
)
from tests.support.clusters import FakeClock, FakeCluster
from tests.support.jobs import job, manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleet_operator.api import FleetJob
    from fleet_operator.plan.model import Action

pytestmark = pytest.mark.timeout(20)

RUNNING = FleetJobStatus(state=JobState.RUNNING)
COUNTED = FleetJobStatus(state=JobState.RUNNING, columns=Columns(trainers="1/2"))
PENDING = FleetJobStatus(state=JobState.PENDING)
DELETIONS = (DeletePod("digits-trainer-0", "u0"), DeletePod("digits-trainer-1", "u1"))
STARTED = Event("Normal", "Started", "all replicas run")


@dataclass
class SlowCluster(FakeCluster):
    """A cluster in which an action takes until the test answers it."""

    asked: list[Action] = field(default_factory=list)
    _answers: dict[int, asyncio.Future[None]] = field(default_factory=dict)

    async def apply(self, job: FleetJob, action: Action) -> None:
        """Write it down once it is answered."""
        self.asked.append(action)
        answer = self._answers[id(action)] = asyncio.get_running_loop().create_future()
        try:
            await answer
        finally:
            del self._answers[id(action)]
        self.done.append(action)

    @property
    def under_way(self) -> int:
        """Return how many actions have not ended."""
        return len(self._answers)

    async def answer(self, *actions: Action, error: Exception | None = None) -> None:
        """Let actions end, and let others begin that waited for them."""
        for action in actions:
            if error is None:
                self._answers[id(action)].set_result(None)
            else:
                self._answers[id(action)].set_exception(error)
        await until_idle()


async def until_idle() -> None:
    """Let every task come to where it waits for the test."""
    for _ in range(10):
        await asyncio.sleep(0)


class Fixture:
    """One job in a cluster of memory, and a plan that the test sets."""

    def __init__(self, make: Callable[[], FakeCluster] = FakeCluster) -> None:
        self.cluster = make()
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


@pytest.mark.parametrize(("trainers", "waited"), [(MOST_ON_LOOP - 2, False), (MOST_ON_LOOP, True)])
async def test_planning_a_large_job_does_not_block_the_event_loop(
    fixture: Fixture, trainers: int, waited: bool
):
    went_on = threading.Event()

    def decide(*_: object) -> Plan:
        return Plan(FleetJobStatus(state=JobState.RUNNING if went_on.wait(0.2) else JobState.FAILED))

    fixture.cluster.add(job(manifest(trainer={"replicas": trainers})))
    reconciler = Reconciler(fixture.cluster, clock=fixture.clock, decide=decide)
    asyncio.get_running_loop().call_soon(went_on.set)
    await reconciler.reconcile(fixture.key)
    assert (fixture.cluster.jobs[fixture.key].status.state is JobState.RUNNING) is waited


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


async def test_what_a_status_tells_whose_write_was_not_answered_is_told_once_it_is_seen(fixture: Fixture):
    fixture.plan = Plan(status=RUNNING, events=(STARTED,))
    fixture.cluster.unanswered = ApiError(0, "NoAnswer", "no answer")
    with pytest.raises(ApiError):
        await fixture.reconcile()
    assert fixture.cluster.done == []
    fixture.cluster.conflict, fixture.cluster.unanswered = True, None
    assert (await fixture.reconcile()).result is Result.CONFLICT  # the watch has not brought it yet
    fixture.cluster.conflict = False
    fixture.cluster.add(job().with_status(RUNNING))
    fixture.plan = Plan(status=RUNNING)
    for _ in range(2):
        await fixture.reconcile()
    assert fixture.cluster.done == [STARTED]


async def test_whichever_try_arrived_is_told(fixture: Fixture):
    first = FleetJobStatus(state=JobState.RUNNING, start_time=fixture.clock.now())
    again = Event("Normal", "Started", "a second later")
    fixture.cluster.unanswered = ApiError(0, "NoAnswer", "no answer")
    for plan in (Plan(status=first, events=(STARTED,)), Plan(status=RUNNING, events=(again,))):
        fixture.plan = plan
        with pytest.raises(ApiError):
            await fixture.reconcile()
    fixture.cluster.unanswered = None
    fixture.cluster.add(job().with_status(first))
    fixture.plan = Plan(status=first)
    await fixture.reconcile()
    assert fixture.cluster.done == [STARTED]


@pytest.mark.parametrize(
    "another",
    [
        pytest.param(job(), id="it-never-arrived"),
        pytest.param(job().with_status(COUNTED), id="another-status-came-after-it"),
        pytest.param(job(uid="another").with_status(RUNNING), id="another-job-of-the-name"),
    ],
)
async def test_what_no_status_tells_is_not_told_late(fixture: Fixture, another: FleetJob):
    fixture.plan = Plan(status=RUNNING, events=(STARTED,))
    fixture.cluster.unanswered = ApiError(0, "NoAnswer", "no answer")
    with pytest.raises(ApiError):
        await fixture.reconcile()
    fixture.cluster.unanswered = None
    fixture.cluster.add(another)
    fixture.plan = Plan(status=FleetJobStatus(state=JobState.SUCCEEDED))
    await fixture.reconcile()
    fixture.cluster.add(job().with_status(RUNNING))
    await fixture.reconcile()
    assert STARTED not in fixture.cluster.done


async def test_a_job_that_is_gone_is_left_alone(fixture: Fixture):
    fixture.key = Key("default", "other")
    assert await fixture.reconcile() == Outcome(Result.GONE)
    assert fixture.cluster.done == []


async def test_while_an_own_write_is_unseen_nothing_is_decided(fixture: Fixture):
    fixture.cluster.observed = None
    assert await fixture.reconcile() == Outcome(Result.WAITING, UNSEEN_WRITE)
    assert fixture.cluster.done == []


async def test_counts_are_written_when_they_have_waited(fixture: Fixture):
    await fixture.reconcile()
    fixture.plan = Plan(status=COUNTED, urgent=False, requeue_after=timedelta(seconds=30))
    assert await fixture.reconcile() == Outcome(Result.DONE, COUNTS)
    assert fixture.cluster.done == [RUNNING]
    fixture.clock.seconds = COUNTS.total_seconds()
    assert await fixture.reconcile() == Outcome(Result.DONE, timedelta(seconds=30))
    assert fixture.cluster.done == [RUNNING, COUNTED]


async def test_a_job_gets_its_first_status_with_its_pods_or_soon_after(fixture: Fixture):
    created = pods(2)
    fixture.plan = Plan(status=PENDING, actions=created)
    assert await fixture.reconcile() == Outcome(Result.DONE, FIRST)
    assert fixture.cluster.done == [*created]
    assert fixture.observer.seen == [*created]
    fixture.clock.seconds = FIRST.total_seconds()
    fixture.plan = Plan(status=PENDING)
    assert await fixture.reconcile() == Outcome(Result.DONE)
    assert fixture.cluster.done == [*created, PENDING]


async def test_a_refusal_is_not_kept_from_the_first_status(fixture: Fixture):
    fixture.cluster.refuse = ApiError(403, "Forbidden", "exceeded quota")
    fixture.plan = Plan(status=PENDING, actions=pods(2))
    assert (await fixture.reconcile()).result is Result.FAILED
    await fixture.reconcile()
    assert PENDING in fixture.cluster.done


async def test_a_first_status_that_is_refused_is_tried_again_as_a_failure(fixture: Fixture):
    fixture.plan = Plan(status=PENDING, actions=pods(2))
    await fixture.reconcile()
    fixture.clock.seconds = FIRST.total_seconds()
    fixture.cluster.unanswered = ApiError(403, "Forbidden", "no right to it")
    for _ in range(2):
        with pytest.raises(ApiError):
            await fixture.reconcile()


async def test_another_job_of_the_same_name_waits_as_long(fixture: Fixture):
    fixture.plan = Plan(status=PENDING, actions=pods(2))
    await fixture.reconcile()
    (there,) = fixture.cluster.jobs.values()
    fixture.cluster.jobs.clear()
    assert await fixture.reconcile() == Outcome(Result.GONE)
    fixture.cluster.add(there)
    fixture.clock.seconds = FIRST.total_seconds()
    assert await fixture.reconcile() == Outcome(Result.DONE, FIRST)


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
    due, wait = timedelta(seconds=1), timedelta(seconds=7)
    assert await fixture.reconcile() == Outcome(Result.FAILED, due, at_least=wait)


def pods(number: int) -> tuple[CreatePod, ...]:
    return tuple(
        CreatePod(partial(dict, metadata={"name": f"digits-trainer-{index}"})) for index in range(number)
    )


class Slow:
    """A pass over a job whose actions end when the test says so."""

    def __init__(self, *actions: Action) -> None:
        self.fixture = Fixture(SlowCluster)
        self.fixture.plan = Plan(status=RUNNING, actions=actions, events=(STARTED,))
        assert isinstance(self.fixture.cluster, SlowCluster)
        self.cluster = self.fixture.cluster
        self.task = asyncio.create_task(self.fixture.reconcile())

    @property
    def counted(self) -> list[object]:
        """Return the actions that the observer was told of."""
        return self.fixture.observer.seen[1:]


async def test_pods_are_created_at_the_same_time_after_what_they_need():
    service, claim, created = CreateService({}), EnsureObject({}), pods(4)
    slow = Slow(*DELETIONS, service, claim, *created)
    await until_idle()
    assert slow.cluster.asked == [*DELETIONS]
    await slow.cluster.answer(DELETIONS[1])
    assert slow.cluster.asked == [*DELETIONS]
    await slow.cluster.answer(DELETIONS[0])
    assert slow.cluster.asked == [*DELETIONS, service]
    await slow.cluster.answer(service)
    assert slow.cluster.asked == [*DELETIONS, service, claim]
    await slow.cluster.answer(claim)
    assert slow.cluster.asked == [*DELETIONS, service, claim, *created]
    assert STARTED not in slow.cluster.done
    await slow.cluster.answer(*reversed(created))
    assert (await slow.task).result is Result.DONE
    assert slow.cluster.done == [RUNNING, *reversed(DELETIONS), service, claim, *reversed(created), STARTED]
    assert slow.counted == slow.cluster.done[1:-1]


async def test_the_pod_that_brings_a_lifes_key_is_created_alone():
    first, *others = pods(4)
    first = replace(first, brings_key=True)
    slow = Slow(first, *others)
    await until_idle()
    assert slow.cluster.asked == [first]
    await slow.cluster.answer(first)
    assert slow.cluster.asked == [first, *others]
    await slow.cluster.answer(*others)
    assert (await slow.task).result is Result.DONE


async def test_where_another_has_brought_the_key_no_pod_follows():
    first, *others = pods(4)
    first = replace(first, brings_key=True)
    slow = Slow(first, *others)
    await until_idle()
    await slow.cluster.answer(first, error=ConflictError("pod digits-trainer-0 is there"))
    assert (await slow.task).result is Result.CONFLICT
    assert slow.cluster.asked == [first]


async def test_only_so_many_pods_are_created_at_the_same_time():
    created = pods(AT_ONCE + 2)
    slow = Slow(*created)
    await until_idle()
    assert slow.cluster.under_way == AT_ONCE
    await slow.cluster.answer(created[3])
    assert slow.cluster.under_way == AT_ONCE
    assert slow.cluster.asked == [*created[: AT_ONCE + 1]]
    slow.task.cancel()
    await asyncio.gather(slow.task, return_exceptions=True)


async def test_after_a_refusal_no_pod_is_begun_and_those_under_way_are_counted():
    created = pods(AT_ONCE + 2)
    slow = Slow(*created, DeleteService("digits"))
    await until_idle()
    await slow.cluster.answer(created[5], error=ApiError(403, "Forbidden", "exceeded quota"))
    assert not slow.task.done()
    await slow.cluster.answer(created[0], error=ApiError(403, "Forbidden", "exceeded quota of pods"))
    ended = [*created[1:5], *created[6:AT_ONCE]]
    await slow.cluster.answer(*ended)
    assert (await slow.task).result is Result.FAILED
    assert slow.cluster.asked == [*created[:AT_ONCE]]
    assert slow.counted == ended
    told = Event("Warning", "ActionRefused", "CreatePod: exceeded quota of pods")  # the first in their order
    assert slow.cluster.done == [RUNNING, *ended, told, STARTED]


async def test_nothing_of_a_refused_plan_is_kept(fixture: Fixture):
    """A quota may refuse a large job for days, and each of its plans has a manifest for every replica."""
    fixture.plan = Plan(status=RUNNING, actions=pods(2))
    refusal = ApiError(403, "Forbidden", "exceeded quota")
    refused, fixture.cluster.refuse = weakref.ref(refusal), refusal
    del refusal
    gc.disable()
    try:
        assert (await fixture.reconcile()).result is Result.FAILED
        fixture.cluster.refuse = None
        assert refused() is None
    finally:
        gc.enable()


async def test_the_longest_wait_that_was_asked_for_counts_and_a_conflict_does_not_hide_it():
    created = pods(4)
    slow = Slow(*created)
    await until_idle()
    await slow.cluster.answer(created[0], error=ConflictError("another uid"))
    for pod, seconds in zip(created[1:], (2, 7, 3), strict=True):
        error = ApiError(429, "TooManyRequests", "try again", retry_after_seconds=seconds)
        await slow.cluster.answer(pod, error=error)
    assert await slow.task == Outcome(Result.FAILED, at_least=timedelta(seconds=7))


async def test_a_pass_that_is_cut_off_leaves_nothing_under_way():
    slow = Slow(*pods(3))
    await until_idle()
    slow.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow.task
    assert slow.cluster.under_way == 0
