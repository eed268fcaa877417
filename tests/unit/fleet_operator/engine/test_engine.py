from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING

import pytest

from fleet_operator.api import Condition, ConditionStatus, ConditionType, FleetJobStatus, JobState
from fleet_operator.cluster import ConflictError
from fleet_operator.engine import Engine, Observer, Result
from fleet_operator.engine import engine as engine_module
from fleet_operator.engine.batching import COMING_UP
from fleet_operator.engine.queue import WorkQueue
from fleet_operator.kubernetes.client import ApiError
from fleet_operator.plan.model import DeleteService, Plan
from tests.support.clusters import FakeCluster
from tests.support.jobs import job, manifest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fleet_operator.api import FleetJob
    from fleet_operator.cluster import Key
    from fleet_operator.plan.model import Action

pytestmark = pytest.mark.timeout(20)


class Gate(FakeCluster):
    """A cluster whose actions wait until the test lets them go on."""

    def __init__(self) -> None:
        super().__init__()
        self.entered: list[str] = []
        self.open = asyncio.Event()
        self.changed = asyncio.Event()

    async def until_entered(self, *names: str) -> None:
        async with asyncio.timeout(5):
            while self.entered != list(names):
                self.changed.clear()
                await self.changed.wait()

    async def apply(self, job: FleetJob, action: Action) -> None:
        self.entered.append(job.name)
        self.changed.set()
        await self.open.wait()
        await super().apply(job, action)


class Passes(Observer):
    """Lets a test wait for passes."""

    def __init__(self) -> None:
        self.results: list[tuple[str, Result]] = []
        self.changed = asyncio.Event()

    def passed(self, key: Key, result: Result, seconds: float) -> None:
        self.results.append((key.name, result))
        self.changed.set()

    async def until(self, probe: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not probe():
                self.changed.clear()
                await self.changed.wait()


def act(job: FleetJob, *_: object) -> Plan:
    return Plan(status=job.status, actions=(DeleteService(job.name),))


def settle(job: FleetJob, *_: object) -> Plan:
    return Plan(status=job.status)


def come_up(job: FleetJob, *_: object) -> Plan:
    created = Condition(
        type=ConditionType.PODS_CREATED,
        status=ConditionStatus.TRUE,
        reason="PodsCreated",
        last_transition_time="2026-11-22T03:00:00Z",
    )
    return Plan(status=FleetJobStatus(state=JobState.PENDING, conditions=(created,)))


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(engine.run())
    try:
        yield task
    finally:
        engine.stop()
        async with asyncio.timeout(10):
            await task


async def let_others_run() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def jobs(cluster: FakeCluster, count: int) -> list[Key]:
    return [cluster.add(job(manifest(f"job-{index}"))) for index in range(count)]


async def test_no_more_jobs_are_worked_on_at_once_than_there_are_workers():
    cluster, passes = Gate(), Passes()
    keys = jobs(cluster, 5)
    engine = Engine(cluster, workers=2, decide=act, observer=passes)
    async with running(engine):
        cluster.open.set()
        for key in keys:
            engine.enqueue(key)
        await passes.until(lambda: len(passes.results) == 5)
        cluster.open.clear()
        cluster.entered.clear()
        for key in keys:
            engine.enqueue(key)
        await cluster.until_entered("job-0", "job-1")
        await let_others_run()
        assert len(cluster.entered) == 2
        cluster.open.set()
        await passes.until(lambda: len(passes.results) == 10)
    assert sorted(cluster.entered) == [f"job-{index}" for index in range(5)]


async def test_new_jobs_leave_most_of_the_workers_to_those_that_are_known():
    cluster, passes = Gate(), Passes()
    known, *new = jobs(cluster, 5)
    engine = Engine(cluster, workers=8, decide=act, observer=passes)
    async with running(engine):
        cluster.open.set()
        engine.enqueue(known)
        await passes.until(lambda: len(passes.results) == 1)
        cluster.open.clear()
        cluster.entered.clear()
        for key in new:
            engine.enqueue(key)
        await cluster.until_entered("job-1", "job-2")
        await let_others_run()
        assert len(cluster.entered) == 2
        engine.enqueue(known)
        await cluster.until_entered("job-1", "job-2", "job-0")
        cluster.open.set()
        await passes.until(lambda: len(passes.results) == 6)
    assert sorted(cluster.entered) == [f"job-{index}" for index in range(5)]


async def test_a_job_that_has_a_status_is_no_new_one():
    cluster = Gate()
    keys = [
        cluster.add(job(manifest(f"job-{index}")).with_status(FleetJobStatus(state=JobState.RUNNING)))
        for index in range(4)
    ]
    engine = Engine(cluster, workers=4, decide=act)
    async with running(engine):
        for key in keys:
            engine.enqueue(key)
        await cluster.until_entered(*(f"job-{index}" for index in range(4)))
        cluster.open.set()


async def test_one_worker_thread_does_not_scale():
    cluster, passes = Gate(), Passes()
    keys = jobs(cluster, 8)
    engine = Engine(cluster, workers=32, decide=act, observer=passes)
    async with running(engine):
        for _ in range(100):
            for key in keys:
                engine.enqueue(key)
        await cluster.until_entered(*(f"job-{index}" for index in range(8)))  # none waits for another
        cluster.open.set()
        await passes.until(lambda: len(passes.results) >= 8)
        await let_others_run()
    assert len(passes.results) == 8, "a hundred events of a job are one pass"


async def test_one_job_is_never_worked_on_twice_at_once():
    cluster, passes = Gate(), Passes()
    (key,) = jobs(cluster, 1)
    engine = Engine(cluster, workers=4, decide=act, observer=passes)
    async with running(engine):
        engine.enqueue(key)
        await cluster.until_entered("job-0")
        for _ in range(3):
            engine.enqueue(key)
        await let_others_run()
        assert cluster.entered == ["job-0"]
        cluster.open.set()
        await passes.until(lambda: len(passes.results) == 2)  # and then once for all three
        await let_others_run()
    assert len(passes.results) == 2


async def test_a_pass_that_fails_is_tried_again_and_ends_nothing():
    cluster, passes = FakeCluster(), Passes()
    broken, well = jobs(cluster, 2)

    def decide(job: FleetJob, *_: object) -> Plan:
        if job.name == broken.name and len(passes.results) < 3:
            raise ZeroDivisionError
        return Plan(status=job.status)

    engine = Engine(cluster, workers=8, decide=decide, observer=passes)
    async with running(engine):
        engine.enqueue(broken)
        engine.enqueue(well)
        await passes.until(lambda: ("job-0", Result.DONE) in passes.results)
    assert passes.results.count(("job-0", Result.FAILED)) >= 1
    assert ("job-1", Result.DONE) in passes.results


async def test_a_status_that_the_cluster_does_not_take_is_tried_again_without_a_traceback(
    caplog: pytest.LogCaptureFixture,
):
    class Busy(FakeCluster):
        async def write_status(self, job: FleetJob, status: FleetJobStatus) -> FleetJob:
            if not passes.results:
                raise ApiError(500, "InternalError", "etcd is away")
            return await super().write_status(job, status)

    cluster, passes = Busy(), Passes()
    (key,) = jobs(cluster, 1)
    engine = Engine(cluster, workers=8, decide=lambda *_: Plan(FleetJobStatus(restarts=1)), observer=passes)
    async with running(engine):
        engine.enqueue(key)
        await passes.until(lambda: ("job-0", Result.DONE) in passes.results)
    assert passes.results[0] == ("job-0", Result.FAILED)
    (record,) = [each for each in caplog.records if "etcd is away" in each.getMessage()]
    assert record.exc_info is None


async def test_a_plan_says_when_to_look_again():
    cluster, passes = FakeCluster(), Passes()
    (key,) = jobs(cluster, 1)

    def decide(job: FleetJob, *_: object) -> Plan:
        again = timedelta(milliseconds=10) if len(passes.results) < 2 else None
        return Plan(status=job.status, requeue_after=again)

    engine = Engine(cluster, workers=8, decide=decide, observer=passes)
    async with running(engine):
        engine.enqueue(key)
        await passes.until(lambda: len(passes.results) == 3)


@pytest.mark.parametrize(
    "refusal", [ApiError(403, "Forbidden", "no right to it"), ConflictError("another version")], ids=str
)
async def test_what_is_due_does_not_wait_until_a_refused_action_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, refusal: Exception
):
    patient = partial(WorkQueue, backoff_seconds=3600.0, backoff_limit_seconds=3600.0)
    monkeypatch.setattr(engine_module, "WorkQueue", patient)
    cluster, passes = FakeCluster(refuse=refusal), Passes()
    (key,) = jobs(cluster, 1)
    engine = Engine(
        cluster,
        workers=8,
        decide=lambda *told: replace(act(*told), requeue_after=timedelta(milliseconds=10)),
        observer=passes,
    )
    async with running(engine):
        engine.enqueue(key)
        await passes.until(lambda: len(passes.results) == 3)
    assert ("job-0", Result.DONE) not in passes.results


async def test_what_is_heard_of_pods_that_come_up_is_looked_at_together():
    cluster, passes = FakeCluster(), Passes()
    (key,) = jobs(cluster, 1)
    engine = Engine(cluster, workers=8, decide=come_up, observer=passes)
    async with running(engine):
        began = time.monotonic()
        engine.enqueue(key)
        await passes.until(lambda: len(passes.results) == 1)
        for _ in range(5):
            engine.enqueue(key)
            await let_others_run()
        await passes.until(lambda: len(passes.results) > 1)
        assert time.monotonic() - began >= COMING_UP.total_seconds()
    assert len(passes.results) == 2


async def test_a_key_can_be_enqueued_for_later():
    cluster, passes = FakeCluster(), Passes()
    first, second = jobs(cluster, 2)
    engine = Engine(cluster, workers=8, decide=settle, observer=passes)
    async with running(engine):
        engine.enqueue(first, after=timedelta(milliseconds=50))
        engine.enqueue(second)
        await passes.until(lambda: len(passes.results) == 2)
    assert [name for name, _ in passes.results] == ["job-1", "job-0"]


async def test_known_jobs_are_looked_at_again_at_times_and_gone_ones_are_not():
    cluster, passes = FakeCluster(), Passes()
    kept, gone = jobs(cluster, 2)
    engine = Engine(cluster, workers=8, decide=settle, observer=passes, resync=timedelta(milliseconds=20))
    async with running(engine):
        engine.enqueue(kept)
        engine.enqueue(gone)
        await passes.until(lambda: len(passes.results) >= 2)
        del cluster.jobs[gone]
        await passes.until(lambda: passes.results.count(("job-0", Result.DONE)) >= 4)
    assert passes.results.count(("job-1", Result.GONE)) == 1


async def test_stopping_waits_for_the_passes_under_way_and_takes_no_more():
    cluster = Gate()
    keys = jobs(cluster, 2)
    engine = Engine(cluster, workers=1, decide=act)
    async with running(engine) as task:
        for key in keys:
            engine.enqueue(key)
        await cluster.until_entered("job-0")
        engine.stop()
        await let_others_run()
        assert not task.done()
        cluster.open.set()
    assert cluster.done == [DeleteService("job-0")]


async def test_a_pass_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(engine_module, "STOP_SECONDS", 0.05)
    cluster = Gate()
    (key,) = jobs(cluster, 1)
    engine = Engine(cluster, workers=8, decide=act)
    async with running(engine):
        engine.enqueue(key)
        await cluster.until_entered("job-0")
    assert cluster.done == []


def test_an_engine_without_workers_is_refused():
    with pytest.raises(ValueError, match="at least one worker, not 0"):
        Engine(FakeCluster(), workers=0)
