from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import JobState, Role
from fleet_operator.build import build_service
from fleet_operator.cluster import Key
from fleet_operator.kubernetes import informer_cache, reflector
from fleet_operator.kubernetes import jobs as jobs_module
from fleet_operator.kubernetes.client import FEATURES, ApiError
from fleet_operator.kubernetes.cluster import KubernetesCluster
from fleet_operator.kubernetes.events import EventRecorder
from fleet_operator.kubernetes.informer_cache import ClusterView, NotSyncedError
from fleet_operator.plan.model import CreateService
from tests.support.jobs import manifest
from tests.support.seen_cluster import JOB, JOBS, KEY, POD, SERVICE, SeenCluster, api_with_a_job, started

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.fake_api import FakeApi

pytestmark = pytest.mark.timeout(20)

OWNED = ("/api/v1/pods", "/api/v1/services")


@pytest.fixture
def api() -> FakeApi:
    return api_with_a_job()


async def test_all_that_is_there_is_seen_at_the_start(api: FakeApi):
    first = SeenCluster(api)
    first.taken()
    api.put(POD, first.pod().manifest)
    api.put(SERVICE, build_service(first.job))
    async with started(api) as world:
        assert world.view.synced
        observed = world.observe()
        assert observed.service
        (pod,) = observed.pods
        assert (pod.name, pod.role, pod.index, pod.owned) == ("digits-trainer-0", Role.TRAINER, 0, True)
        assert [job.name for job in world.view.jobs] == ["digits"]
        assert KEY in world.told


async def test_a_start_that_does_not_come_to_its_end_says_what_is_missing(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(informer_cache, "SYNC_SECONDS", 0.05)
    api.refusals["GET", "/apis/fleetjob.dev/v1alpha1/fleetjobs"] = ApiError(404, "NotFound", "page not found")
    with pytest.raises(NotSyncedError, match=r"fleetjobs \(is the CRD installed\?\)"):
        async with started(api):
            pass


async def test_a_pod_of_another_owner_is_foreign_until_it_is_gone(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(informer_cache, "FOREIGN_SECONDS", 0.01)
    api.put(POD, {"kind": "Pod", "spec": {"containers": [{"name": "c"}]}})  # no label: no watch shows it
    async with started(api) as world:
        assert world.observe().foreign == ()
        await world.cluster.apply(world.job, world.pod())
        assert (world.observe().foreign, world.observe().pods) == (("Pod/digits-trainer-0",), ())
        api.vanish(POD)
        await world.until(lambda: world.observe().foreign == ())


async def test_a_job_that_is_deleted_while_a_name_is_looked_up_is_not_looked_after(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    api.put(POD, {"kind": "Pod", "spec": {"containers": [{"name": "c"}]}})
    async with started(api) as world:
        job, pod, get = world.job, world.pod(), api.get

        async def get_late(path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
            found = await get(path, params)
            if path == POD:
                world.taken("DELETED")
            return found

        monkeypatch.setattr(api, "get", get_late)
        await world.cluster.apply(job, pod)
        assert world.deleted == [KEY]
        assert world.view.foreign.of(KEY) == ()


async def test_what_a_deleted_job_of_the_same_name_left_is_known_as_such(api: FakeApi):
    async with started(api) as world:
        old = {"uid": "old", "kind": "FleetJob", "name": "digits", "controller": True}
        service = build_service(world.job)
        api.put(POD, world.pod(ownerReferences=[old]).manifest)
        api.put(SERVICE, {**service, "metadata": {**service["metadata"], "ownerReferences": [old]}})
        await world.until(lambda: len(world.observe().left_over) == 2)
        observed = world.observe()
        assert [pod.owned for pod in observed.pods] == [False]
        assert (observed.service, observed.foreign) == (False, ())


async def test_an_object_with_our_labels_and_another_owner_is_not_ours(api: FakeApi):
    async with started(api) as world:
        other = {"uid": "other", "kind": "ReplicaSet", "name": "digits", "controller": True}
        api.put(POD, world.pod(ownerReferences=[other]).manifest)
        api.put(SERVICE, {**build_service(world.job), "metadata": {"labels": {}}})
        await world.until(lambda: world.observe().pods)
        await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        observed = world.observe()
        assert [pod.owned for pod in observed.pods] == [False]
        assert (observed.service, set(observed.foreign)) == (
            False,
            {"Pod/digits-trainer-0", "Service/digits"},
        )


async def test_when_a_watch_lists_again_the_jobs_are_listed_again_and_ghosts_go(api: FakeApi):
    async with started(api) as world:
        api.vanish(JOB)
        api.forget()
        await world.until(lambda: world.deleted == [KEY])
        assert world.cluster.job(KEY) is None


async def test_kopfs_events_change_what_is_known(api: FakeApi):
    async with started(api) as world:
        world.told.clear()
        world.taken("MODIFIED")  # an echo of what is known already
        assert world.told == []
        api.put(JOB, {**api.objects[JOB], "status": {"state": "Running"}})
        world.taken("MODIFIED")
        assert world.job.status.state is JobState.RUNNING
        world.taken("DELETED")
        assert (world.cluster.job(KEY), world.deleted, world.told) == (None, [KEY], [KEY, KEY])


async def test_a_job_that_cannot_be_understood_is_told_once_and_left_alone(api: FakeApi):
    broken = f"{JOBS}/broken"
    api.put(broken, {**manifest("broken"), "spec": {"mode": "Gossip"}})
    async with started(api) as world:
        for _ in range(2):
            world.view.jobs.take("MODIFIED", api.objects[broken])
        async with asyncio.timeout(5):
            await api.posted.wait()
        assert world.cluster.job(Key("default", "broken")) is None
        (event,) = world.events()
        assert event["reason"] == "InvalidSpec"
        assert "spec.mode" in event["message"]


async def test_a_job_that_is_no_longer_understood_stays_as_it_last_was_also_when_jobs_are_listed(
    api: FakeApi,
):
    async with started(api) as world:
        metadata = api.objects[JOB]["metadata"] | {"generation": 2}
        api.put(JOB, {**api.objects[JOB], "metadata": metadata, "spec": {"mode": "Gossip"}})
        world.taken("MODIFIED")
        world.view.jobs.list_again()
        api.put(f"{JOBS}/listed", manifest("listed"))
        await world.until(lambda: world.cluster.job(Key("default", "listed")) is not None)
        assert (world.deleted, world.job.name) == ([], "digits")
        assert world.job.metadata.resource_version == api.objects[JOB]["metadata"]["resourceVersion"]


async def test_the_api_server_chooses_by_labels_what_jobs_own(api: FakeApi):
    world = SeenCluster(api, features=tuple(FEATURES))
    beside = [f"{each.base}/{each.plural}" for each in FEATURES.values()]
    asked = {(verb, path) for verb in ("GET", "WATCH") for path in (*OWNED, *beside)}
    await world.view.start()
    try:
        async with asyncio.timeout(10):
            while not asked <= api.selectors.keys():  # noqa: ASYNC110 there is only the asking
                await asyncio.sleep(0)
    finally:
        await world.view.close()
    assert {api.selectors[each] for each in asked} == {
        "app.kubernetes.io/managed-by=fleet-operator,fleetjob.dev/job-name"
    }


def refuse_in(api: FakeApi, monkeypatch: pytest.MonkeyPatch, namespace: str) -> asyncio.Event:
    """Have all lists in a namespace refused until the event that this returns is set."""
    answer, granted = api.get, asyncio.Event()

    async def get(path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        if f"/namespaces/{namespace}/" in path and not granted.is_set():
            raise ApiError(403, "Forbidden", "no right to list there")
        return await answer(path, params)

    monkeypatch.setattr(api, "get", get)
    return granted


def listen(view: ClusterView) -> tuple[list[Key], asyncio.Event]:
    """Return the jobs that a view tells of from now on, and what is set whenever it does."""
    told, changed = list[Key](), asyncio.Event()

    def notice(key: Key) -> None:
        told.append(key)
        changed.set()

    view.subscribe(notice)
    return told, changed


async def test_a_namespace_that_is_gone_keeps_no_job_of_another_one_unseen(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reflector, "BACKOFF_SECONDS", (0.001,))
    granted = refuse_in(api, monkeypatch, "gone")
    events, features = EventRecorder(api), ("podDisruptionBudgets",)
    view = ClusterView(api, events, namespaces=("gone", "default"), features=features)
    cluster, (told, changed) = KubernetesCluster(api, view, events), listen(view)
    try:
        async with asyncio.timeout(10):
            await view.start()
        assert view.synced
        job = view.jobs.get(KEY)
        assert job is not None
        observed = cluster.observe(job)
        assert observed is not None
        assert ("policy/v1", "PodDisruptionBudget") not in observed.unserved
        # Of a job in a namespace of which no pod can be seen, nothing may be concluded.
        api.put("/apis/fleetjob.dev/v1alpha1/namespaces/gone/fleetjobs/late", manifest("late"))
        view.jobs.take("ADDED", api.objects["/apis/fleetjob.dev/v1alpha1/namespaces/gone/fleetjobs/late"])
        late = view.jobs.get(Key("gone", "late"))
        assert late is not None
        assert cluster.observe(late) is None
        told.clear()
        granted.set()
        view.jobs.list_again()
        async with asyncio.timeout(10):
            while cluster.observe(late) is None or Key("gone", "late") not in told:
                changed.clear()
                await changed.wait()
    finally:
        await view.close()


async def test_jobs_that_nobody_has_begun_to_watch_are_told_of(api: FakeApi):
    async with started(api) as world:
        failing = [kind for kind, _, seconds in world.view.failing() if seconds > 0]
        assert failing == ["fleetjobs"]
        world.view.note_job_watch(None, went_well=True)
        assert not [kind for kind, _, seconds in world.view.failing() if seconds > 0]


async def test_the_jobs_of_a_namespace_that_comes_late_are_looked_at(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reflector, "BACKOFF_SECONDS", (0.001,))
    granted, late = refuse_in(api, monkeypatch, "gone"), Key("gone", "late")
    view = ClusterView(api, EventRecorder(api), namespaces=("gone", "default"))
    told, changed = listen(view)
    try:
        async with asyncio.timeout(10):
            await view.start()
            stored = api.put("/apis/fleetjob.dev/v1alpha1/namespaces/gone/fleetjobs/late", manifest("late"))
            view.jobs.take("ADDED", stored)
            told.clear()
            granted.set()
            view.jobs.list_again()
            while not (late in told and view.scope_of("gone").shows_what_jobs_own):
                changed.clear()
                await changed.wait()
    finally:
        await view.close()


async def test_of_a_namespace_that_comes_late_nothing_is_judged_before_all_kinds_were_asked_for_again(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(reflector, "BACKOFF_SECONDS", (0.001,))
    granted, budgets = refuse_in(api, monkeypatch, "gone"), asyncio.Event()
    refusing, jobs = api.get, "/apis/fleetjob.dev/v1alpha1/namespaces/gone/fleetjobs/late"

    async def get(path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        if granted.is_set() and path.endswith("gone/poddisruptionbudgets"):
            await budgets.wait()
        return await refusing(path, params)

    monkeypatch.setattr(api, "get", get)
    events, features = EventRecorder(api), ("podDisruptionBudgets",)
    view = ClusterView(api, events, namespaces=("gone", "default"), features=features)
    cluster, (_, changed) = KubernetesCluster(api, view, events), listen(view)
    try:
        async with asyncio.timeout(10):
            await view.start()
            view.jobs.take("ADDED", api.put(jobs, manifest("late")))
            late = view.jobs.get(Key("gone", "late"))
            assert late is not None
            granted.set()
            view.jobs.list_again()
            watches = [("WATCH", f"/api/v1/namespaces/gone/{each}") for each in ("pods", "services")]
            while not all(each in api.requests for each in watches):  # noqa: ASYNC110 there is only the asking
                await asyncio.sleep(0)
            assert cluster.observe(late) is None
            budgets.set()
            while (observed := cluster.observe(late)) is None:
                changed.clear()
                await changed.wait()
        assert ("policy/v1", "PodDisruptionBudget") not in observed.unserved
    finally:
        await view.close()


async def test_while_one_namespace_is_gone_the_others_are_listed_again_at_times(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jobs_module, "AGAIN_SECONDS", 0.005)
    monkeypatch.setattr(jobs_module, "RELIST_SECONDS", 0.05)
    refuse_in(api, monkeypatch, "gone")
    view = ClusterView(api, EventRecorder(api), namespaces=("gone", "default"))
    try:
        async with asyncio.timeout(10):
            await view.start()
            while api.requests.count(("GET", JOBS)) < 3:  # noqa: ASYNC110 there is only the asking
                await asyncio.sleep(0.01)
    finally:
        await view.close()


async def test_where_no_namespace_can_be_seen_it_says_what_is_missing(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(informer_cache, "SYNC_SECONDS", 0.05)
    refuse_in(api, monkeypatch, "default")
    view = ClusterView(api, EventRecorder(api), namespaces=("default",))
    try:
        with pytest.raises(NotSyncedError) as raised:
            await view.start()
        for path in ("/api/v1/namespaces/default/pods", "/api/v1/namespaces/default/services"):
            assert path in str(raised.value)
        assert "fleetjobs of default" in str(raised.value)
    finally:
        await view.close()


async def test_who_cannot_be_followed_is_told_by_kind_and_namespace(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    refuse_in(api, monkeypatch, "gone")
    view, told = ClusterView(api, EventRecorder(api), namespaces=("gone", "default")), asyncio.Event()
    view.subscribe(lambda _: told.set())
    starting = asyncio.create_task(view.start())
    try:
        async with asyncio.timeout(10):
            await told.wait()  # the job in the second namespace was listed
        view.note_job_watch("default", went_well=True)
        failing = {(kind, namespace) for kind, namespace, seconds in view.failing() if seconds > 0}
        assert failing == {(kind, "gone") for kind in ("pods", "services", "fleetjobs")}
        assert {where for _, where, _ in view.failing()} == {"gone", "default"}
        view.note_job_watch("default", went_well=False)
        assert [each for each in view.failing() if each[:2] == ("fleetjobs", "default") and each[2] > 0]
        view.note_job_watch("default", went_well=True)
        assert ("fleetjobs", "default", 0) in list(view.failing())
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        await view.close()


async def test_a_view_limited_to_namespaces_asks_for_nothing_else(api: FakeApi):
    view = ClusterView(api, EventRecorder(api), namespaces=("default", "team"))
    await view.start()
    await view.close()
    assert {path for _, path in api.requests} == {
        *(
            f"/api/v1/namespaces/{name}/{kind}"
            for name in ("default", "team")
            for kind in ("pods", "services")
        ),
        *(f"/apis/fleetjob.dev/v1alpha1/namespaces/{name}/fleetjobs" for name in ("default", "team")),
    }
    assert view.jobs.get(KEY) is not None
