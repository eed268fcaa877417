"""What Kueue's Workloads say of groups that it holds back, or that have lost their pods."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import FleetJobStatus, JobState
from fleet_operator.api.ledger import StoredLedger, StoredRole
from fleet_operator.cluster import Key
from fleet_operator.kubernetes import kueue
from fleet_operator.kubernetes.client import ApiError
from fleet_operator.kubernetes.kueue import WORKLOADS, Admission, Admissions, why_not_admitted
from tests.support.fake_api import FakeApi
from tests.support.jobs import manifest
from tests.support.seen_cluster import JOB, SeenCluster

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

KEY = Key("default", "digits")
GROUP = "digits-11111111-0"
COLLECTION = f"{WORKLOADS}/namespaces/default/workloads"
PATH = f"{COLLECTION}/{GROUP}"
EVENTS = "/api/v1/namespaces/default/events"
LACKING = "insufficient unused quota for cpu in flavor a, 2 more needed"


def workload(*conditions: tuple[str, str, str], **status: Any) -> dict[str, Any]:
    told = [{"type": kind, "status": held, "message": message} for kind, held, message in conditions]
    return {"spec": {"active": True}, "status": {"conditions": told, **status}}


RESERVED = ("QuotaReserved", "True", "Quota reserved")


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        pytest.param({"spec": {}}, None, id="not-looked-at-yet"),
        pytest.param(workload(("QuotaReserved", "False", LACKING)), LACKING, id="no-quota"),
        pytest.param(workload(RESERVED, ("Admitted", "True", "admitted")), None, id="admitted"),
        pytest.param(
            workload(
                RESERVED, admissionChecks=[{"name": "a", "state": "Pending"}, {"name": "b", "state": "Ready"}]
            ),
            "admission checks are pending: a",
            id="checks",
        ),
        pytest.param(
            workload(
                RESERVED,
                ("Admitted", "False", "The workload has not all checks ready"),
                admissionChecks=[{"name": "a", "state": "Pending"}],
            ),
            "admission checks are pending: a",
            id="checks-by-name-before-kueues-sentence",
        ),
        pytest.param(
            workload(RESERVED, ("Admitted", "False", "a topology is pending")),
            "a topology is pending",
            id="topology",
        ),
        pytest.param(
            {"spec": {"active": False}},
            "the Workload is deactivated (spec.active is false)",
            id="deactivated-in-the-queue",
        ),
    ],
)
def test_why_a_group_is_not_admitted(found: dict[str, Any], reason: str | None):
    assert why_not_admitted(found) == reason


class WatchedApi(FakeApi):
    """Tells which paths are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.looks = asyncio.Queue[str]()

    async def get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Answer, and tell the path."""
        self.looks.put_nowait(path)
        return await super().get(path, params)


async def test_a_group_is_looked_at_until_it_is_forgotten_and_its_job_hears_of_news_only(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(kueue, "TICK_SECONDS", 0.001)
    monkeypatch.setattr(kueue, "LOOK_SECONDS", 0.001)
    api, heard = WatchedApi(), asyncio.Queue[Key]()
    admissions = Admissions(api, heard.put_nowait)
    api.refusals["GET", COLLECTION] = ApiError(403, "Forbidden", "not yours")
    looking = asyncio.create_task(admissions.look_forever())
    async with asyncio.timeout(5):
        assert admissions.of(KEY, GROUP) is None
        assert await heard.get() == KEY  # what cannot be read keeps no job waiting
        assert admissions.of(KEY, GROUP) == Admission()
        api.put(PATH, workload(("QuotaReserved", "False", LACKING)))
        assert await heard.get() == KEY
        assert admissions.of(KEY, GROUP) == Admission(LACKING)
        api.looks = asyncio.Queue()
        for _ in range(3):
            assert await api.looks.get() == COLLECTION
        assert heard.empty(), "it says the same"
        assert admissions.of(KEY, f"{GROUP}-next") is None, "of another group"
        admissions.forget(KEY)
        admissions.of(Key("other", "digits"), GROUP)
        assert await heard.get() == Key("other", "digits")
        api.looks = asyncio.Queue()
        looked = {await api.looks.get() for _ in range(5)}
    assert looked == {each.replace("default", "other") for each in (COLLECTION, EVENTS)}
    looking.cancel()


async def test_a_hundred_groups_of_a_namespace_take_one_list(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kueue, "TICK_SECONDS", 0.001)
    api, heard = WatchedApi(), asyncio.Queue[Key]()
    admissions = Admissions(api, heard.put_nowait)
    for number in range(100):
        path = f"{COLLECTION}/group-{number}"
        api.put(path, {"spec": {"active": number % 2 == 0}})
        admissions.of(Key("default", f"job-{number}"), f"group-{number}")
    looking = asyncio.create_task(admissions.look_forever())
    async with asyncio.timeout(5):
        assert await api.looks.get() == COLLECTION
        assert len({await heard.get() for _ in range(100)}) == 100
    looking.cancel()
    assert api.looks.empty()
    active = {number for number in range(100) if is_active(admissions, number)}
    assert active == set(range(0, 100, 2))


def is_active(admissions: Admissions, number: int) -> bool:
    """Return whether the Workload of a job is known to be active."""
    said = admissions.of(Key("default", f"job-{number}"), f"group-{number}")
    assert said is not None
    return said.active


def event(group: str, reason: str) -> dict[str, Any]:
    """Return an event of Kueue about the Workload of a group."""
    return {"involvedObject": {"kind": "Workload", "name": group}, "reason": reason}


@pytest.mark.parametrize(
    ("reason", "stays"),
    [
        pytest.param(None, True, id="its-workload-is-there"),
        pytest.param("EvictedDueToDeactivated", False, id="its-workload-is-gone"),
        pytest.param("EvictedDueToDeactivatedDueToRequeuingLimitExceeded", False, id="by-kueue-itself"),
    ],
)
async def test_a_job_that_has_lost_its_group_waits_until_it_is_known_why(
    monkeypatch: pytest.MonkeyPatch, reason: str | None, *, stays: bool
):
    async with lost_group(monkeypatch) as (world, api, group):
        if stays:
            api.put(f"{COLLECTION}/{group}", {"spec": {"active": False}})
        else:
            api.put(f"{EVENTS}/{group}.1", event(group, "EvictedDueToPreempted"))
            api.put(f"{EVENTS}/{group}.2", event(group, str(reason)))
        await world.view.start()
        assert world.cluster.observe(world.job) is None
        await world.until(lambda: world.cluster.observe(world.job) is not None)
        assert world.observe().deactivated
        await world.cluster.apply(world.job, world.pod())
        assert not world.observe().deactivated  # it is not of interest while there are pods


async def test_a_job_whose_workload_is_gone_without_a_deactivation_queues_again(
    monkeypatch: pytest.MonkeyPatch,
):
    async with lost_group(monkeypatch) as (world, api, group):
        api.put(f"{EVENTS}/{group}.1", event(group, "EvictedDueToPreempted"))
        api.put(f"{EVENTS}/other.1", event(f"{group[:-1]}1", "EvictedDueToDeactivated"))
        await world.view.start()
        await world.until(lambda: world.cluster.observe(world.job) is not None)
        assert not world.observe().deactivated


@asynccontextmanager
async def lost_group(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[SeenCluster, FakeApi, str]]:
    """Give a cluster in which a job's first group had pods, the API, and the name of the group."""
    monkeypatch.setattr(kueue, "TICK_SECONDS", 0.001)
    api = FakeApi()
    job = manifest(podGroupPolicy={"kueue": {"queueName": "research"}})
    stored = StoredLedger(roles={"trainer": StoredRole(created="0-1")})
    status = FleetJobStatus(state=JobState.RUNNING, ledger=stored)
    api.put(JOB, {**job, "metadata": {"generation": 1}, "status": status.to_manifest()})
    world = SeenCluster(api, features=("kueue",))
    try:
        yield world, api, f"digits-{api.objects[JOB]['metadata']['uid'][:8]}-0"
    finally:
        await world.view.close()
