"""What a large job costs: work in proportion to its replicas, and no manifest before it is needed.

Work is the number of calls of Python functions, and of steps of generators, which does not vary from run to
run as a time would.
"""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import FleetJob, FleetJobStatus, Role
from fleet_operator.build import ClusterHosts
from fleet_operator.plan import plan
from fleet_operator.plan.model import CreatePod, Observed, ObservedPod, Plan, PodPhase
from tests.support import jobs
from tests.support.plans import NO_POLICIES, T0, pod

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

PODS_OF_A_JOB = 1_700
LINEAR = 2.5
"""Twice as many replicas may take so many times the work: a little more than twice, and not four times."""

HOST_NETWORK = {"hostNetwork": True, "portRange": {"first": 20000, "last": 39999}}


def large(size: int, **spec: Any) -> FleetJob:
    """Return a job of so many trainers, and seven servers for every ten of them."""
    servers = {"replicas": 7 * size // 10}
    manifest = jobs.manifest(
        pserver=servers, trainer={"replicas": size}, startupPolicy={"order": "AnyOrder"}, **spec
    )
    return jobs.job(manifest)


def collective(size: int, **spec: Any) -> FleetJob:
    return jobs.job(jobs.collective_manifest(trainer={"replicas": size}, **spec))


def decide(job: FleetJob, *pods: ObservedPod, seconds: float = 0) -> Plan:
    seen = Observed(pods, service=True, unserved=NO_POLICIES, new_key="0" * 64)
    return plan(job, seen, T0 + timedelta(seconds=seconds), ClusterHosts(job))


def created(job: FleetJob) -> list[CreatePod]:
    return [action for action in decide(job).actions if isinstance(action, CreatePod)]


def pods_of(job: FleetJob) -> list[ObservedPod]:
    replicas = ((role, index) for role in job.roles for index in range(job.replicas(role)))
    return [pod(role, index, ready=True, started_at=T0, created_at=T0) for role, index in replicas]


def work(action: Callable[[], object]) -> int:
    """Return how many calls of functions and steps of generators something takes."""
    calls = Counter[str]()

    def count(_frame: FrameType, event: str, _argument: object) -> None:
        calls[event] += 1

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls["call"] + calls["c_call"]


def failed(job: FleetJob, exit_code: int, **fields: Any) -> list[ObservedPod]:
    ends: dict[str, Any] = {
        "phase": PodPhase.FAILED,
        "exit_code": exit_code,
        "finished_at": T0,
        "message": "a.py: lost",
    }
    return [replace(each, **{**ends, **fields}) for each in pods_of(job)]


def first_plan(job: FleetJob) -> None:
    for action in created(job):
        _ = action.manifest


def half_there(job: FleetJob) -> None:
    pods = pods_of(job)
    decide(job, *pods[: len(pods) // 2])


def all_run(job: FleetJob) -> None:
    pods = pods_of(job)
    decide(job.with_status(decide(job, *pods).status), *pods)


def all_lose_a_peer_while_one_starts(job: FleetJob) -> None:
    """The job has never run as a whole, so each of them may have waited for a peer that was not there yet."""
    *ended, last = failed(job, 91)
    starting = replace(last, phase=PodPhase.PENDING, exit_code=None, finished_at=None)
    status = decide(job, *pods_of(job)[:-1], starting).status
    decide(job.with_status(status), *ended, starting, seconds=1)


def trainers_outlive_their_servers(job: FleetJob) -> None:
    servers = [each for each in pods_of(job) if each.role is not Role.TRAINER]
    decide(job, *servers, *(each for each in failed(job, 90) if each.role is Role.TRAINER))


def all_are_evicted(job: FleetJob) -> None:
    status = decide(job, *pods_of(job)).status
    evicted = failed(job, 137, disruption="EvictionByEvictionAPI")
    restarted = decide(job.with_status(status), *evicted).status
    decide(job.with_status(restarted), seconds=100)


def all_but_one_succeed(job: FleetJob) -> None:
    *done, last = failed(job, 0, phase=PodPhase.SUCCEEDED, message=None)
    decide(job, *done, replace(last, phase=PodPhase.RUNNING, exit_code=None))


@pytest.mark.parametrize(
    "scene",
    [
        first_plan,
        half_there,
        all_run,
        all_lose_a_peer_while_one_starts,
        trainers_outlive_their_servers,
        all_are_evicted,
        all_but_one_succeed,
    ],
)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(large, id="with-servers"),
        pytest.param(collective, id="collective"),
        pytest.param(partial(large, network=HOST_NETWORK), id="on-the-nodes-network"),
    ],
)
def test_work_grows_as_the_job_does(make, scene):
    scene(make(10))  # imports and caches
    small, twice = (work(partial(scene, make(size))) for size in (100, 200))
    assert twice < LINEAR * small


@pytest.mark.parametrize("make", [large, collective])
def test_each_host_is_asked_for_but_a_few_times(make):
    job, asked = make(1000), Counter[tuple[Role, int]]()

    def hosts(role: Role, index: int) -> str:
        asked[role, index] += 1
        return ClusterHosts(job)(role, index)

    decided = plan(job, Observed(unserved=NO_POLICIES, new_key="0" * 64), T0, hosts)
    pods = [action.manifest for action in decided.actions if isinstance(action, CreatePod)]
    assert len(pods) == job.num_replicas
    # In the list, and for the replica itself; every environment of a collective job has the first trainer's.
    del asked[Role.TRAINER, 0]
    assert max(asked.values()) <= 3


@pytest.mark.parametrize("network", [{}, HOST_NETWORK])
@pytest.mark.parametrize("make", [large, collective])
def test_a_pod_of_a_large_job_takes_kilobytes(make, network):
    sizes = [len(json.dumps(action.manifest)) for action in created(make(1000, network=network))]
    assert len(sizes) >= 1000
    assert max(sizes) < 4096


def test_a_plan_holds_no_manifests():
    job = large(1000)
    created(job)
    tracemalloc.start()
    try:
        actions = created(job)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(actions) == PODS_OF_A_JOB
    assert held < 2e6  # 3.5 MB of manifests, and some 50 kB each if every one had written out all servers


def test_a_thousand_failures_do_not_become_a_thousand_events():
    job = collective(1000)
    running = job.with_status(decide(job, *pods_of(job)).status)
    pods = [replace(each, exit_code=1) if each.index == 700 else each for each in failed(job, 91)]
    events = [event for event in decide(running, *pods).events if event.reason == "ReplicaFailed"]
    assert len(events) == 11
    assert sum("digits-trainer-700 failed with exit code 1" in event.message for event in events) == 1
    assert events[-1].message == "990 more replicas ended: trainer 9-699,701-999"
    assert FleetJobStatus.model_validate(decide(running, *pods).status.to_manifest()).job_restarts == 1
