from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.api import FleetJobStatus, JobState, Role
from fleet_operator.build import ClusterHosts, build_extras, build_pod, build_service
from fleet_operator.cluster import view as view_module
from fleet_operator.cluster.client import ApiError
from fleet_operator.cluster.events import EventRecorder
from fleet_operator.cluster.interface import ConflictError, Key
from fleet_operator.cluster.kubernetes import UNSEEN_SECONDS, KubernetesCluster
from fleet_operator.cluster.view import ClusterView, NotSyncedError
from fleet_operator.plan.model import (
    Attempt,
    CreatePod,
    CreateService,
    DeleteJob,
    DeleteObject,
    DeletePod,
    DeleteService,
    EnsureObject,
    Event,
    ObjectRef,
)
from tests.support.clusters import FakeClock
from tests.support.fake_api import FakeApi
from tests.support.jobs import manifest

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from fleet_operator.api import FleetJob
    from fleet_operator.plan.model import Observed

pytestmark = pytest.mark.timeout(20)

KEY = Key("default", "digits")
JOBS = "/apis/fleetjob.dev/v1alpha1/namespaces/default/fleetjobs"
JOB = f"{JOBS}/digits"
PODS = "/api/v1/namespaces/default/pods"
POD = f"{PODS}/digits-trainer-0"
SERVICES = "/api/v1/namespaces/default/services"
SERVICE = f"{SERVICES}/digits"
RUNNING = FleetJobStatus(state=JobState.RUNNING)


class World:
    """A cluster that has seen all of an API of memory."""

    def __init__(self, api: FakeApi, features: tuple[str, ...] = ()) -> None:
        self.api = api
        self.clock = FakeClock()
        self.told: list[Key] = []
        self.deleted: list[Key] = []
        self.changed = asyncio.Event()
        events = EventRecorder(api)
        self.view = ClusterView(api, events, features=features, on_deleted=self.deleted.append)
        self.cluster = KubernetesCluster(api, self.view, events, monotonic=self.clock.monotonic)
        self.view.subscribe(self.notice)

    def notice(self, key: Key) -> None:
        self.told.append(key)
        self.changed.set()

    async def until(self, probe: Callable[[], object]) -> None:
        async with asyncio.timeout(10):
            while not probe():
                self.changed.clear()
                await self.changed.wait()

    @property
    def job(self) -> FleetJob:
        job = self.cluster.job(KEY)
        assert job is not None
        return job

    def observe(self) -> Observed:
        observed = self.cluster.observe(self.job)
        assert observed is not None
        return observed

    def pod(self, **metadata: Any) -> CreatePod:
        built = build_pod(self.job, Role.TRAINER, 0, Attempt(), ClusterHosts(self.job))
        return CreatePod({**built, "metadata": {**built["metadata"], **metadata}})

    async def served(self) -> None:
        """Wait until all that jobs may have beside their pods has been seen."""
        await self.until(lambda: len([*self.view.extras()]) == 2)

    def taken(self, kind: str = "ADDED") -> None:
        """Hand the job over as kopf does."""
        self.view.take_job(kind, self.api.objects[JOB])


@asynccontextmanager
async def started(api: FakeApi) -> AsyncIterator[World]:
    world = World(api)
    await world.view.start()
    try:
        yield world
    finally:
        await world.view.close()


@pytest.fixture
def api() -> FakeApi:
    fake = FakeApi()
    fake.put(JOB, {**manifest(), "metadata": {"generation": 1}})
    return fake


async def test_all_that_is_there_is_seen_at_the_start(api: FakeApi):
    first = World(api)
    first.taken()
    api.put(POD, first.pod().manifest)
    api.put(SERVICE, build_service(first.job))
    async with started(api) as world:
        assert world.view.synced
        observed = world.observe()
        assert observed.service
        (pod,) = observed.pods
        assert (pod.name, pod.role, pod.index, pod.owned) == ("digits-trainer-0", Role.TRAINER, 0, True)
        assert [job.name for job in world.view.jobs()] == ["digits"]
        assert KEY in world.told


async def test_a_start_that_does_not_come_to_its_end_says_what_is_missing(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(view_module, "SYNC_SECONDS", 0.05)
    api.refusals["GET", "/apis/fleetjob.dev/v1alpha1/fleetjobs"] = ApiError(404, "NotFound", "page not found")
    with pytest.raises(NotSyncedError, match=r"fleetjobs \(is the CRD installed\?\)"):
        async with started(api):
            pass


async def test_own_creations_are_seen_at_once_and_tell_the_engine(api: FakeApi):
    async with started(api) as world:
        world.told.clear()
        await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        await world.cluster.apply(world.job, world.pod())
        observed = world.observe()
        assert (observed.service, len(observed.pods), observed.foreign) == (True, 1, ())
        assert KEY in world.told


async def test_a_creation_that_was_done_already_is_no_error(api: FakeApi):
    async with started(api) as world:
        for _ in range(2):
            await world.cluster.apply(world.job, CreateService(build_service(world.job)))
            await world.cluster.apply(world.job, world.pod())
        assert (world.observe().service, len(world.observe().pods), world.observe().foreign) == (True, 1, ())


async def test_a_pod_of_another_owner_is_foreign_until_it_is_gone(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(view_module, "FOREIGN_SECONDS", 0.01)
    api.put(POD, {"kind": "Pod", "spec": {"containers": [{"name": "c"}]}})  # no label: no watch shows it
    async with started(api) as world:
        assert world.observe().foreign == ()
        await world.cluster.apply(world.job, world.pod())
        assert (world.observe().foreign, world.observe().pods) == (("Pod/digits-trainer-0",), ())
        api.vanish(POD)
        await world.until(lambda: world.observe().foreign == ())


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


async def test_a_pod_that_can_never_be_is_remembered_until_the_spec_changes(api: FakeApi):
    async with started(api) as world:
        api.refusals["POST", PODS] = ApiError(422, "Invalid", "spec.containers[0].image: Required value")
        told = "Pod digits-trainer-0: spec.containers[0].image: Required value"
        with pytest.raises(ConflictError) as refused:
            await world.cluster.apply(world.job, world.pod())
        assert str(refused.value) == told
        assert world.observe().rejected == told
        job = api.objects[JOB]
        api.put(JOB, {**job, "metadata": {**job["metadata"], "generation": 2}})
        world.taken("MODIFIED")
        assert world.observe().rejected is None


@pytest.mark.parametrize("status", [0, 403, 409, 429, 500])
async def test_a_creation_that_may_go_better_later_is_an_error(api: FakeApi, status: int):
    async with started(api) as world:
        api.refusals["POST", PODS] = ApiError(status, "", "try again")
        with pytest.raises(ApiError, match="try again"):
            await world.cluster.apply(world.job, world.pod())
        assert world.observe().rejected is None
        assert (world.observe().refused is None) == (status != 403)  # else it is not about the pod


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(
            ApiError(400, "", 'admission webhook "images.example.com" denied the request: no'), id="webhook"
        ),
        pytest.param(
            ApiError(422, "Invalid", "pods is forbidden: ValidatingAdmissionPolicy 'p' denied request"),
            id="policy",
        ),
        pytest.param(ApiError(422, "", "try again"), id="a-proxy"),
    ],
)
async def test_what_the_cluster_denies_for_now_does_not_end_the_job(api: FakeApi, error: ApiError):
    async with started(api) as world:
        api.refusals["POST", PODS] = error
        with pytest.raises(ApiError):
            await world.cluster.apply(world.job, world.pod())
        assert world.observe().rejected is None
        assert world.observe().refused == str(error)


async def test_what_cannot_be_read_as_an_object_can_never_be(api: FakeApi):
    async with started(api) as world:
        api.refusals["POST", PODS] = ApiError(400, "BadRequest", "cannot be handled as a Pod")
        with pytest.raises(ConflictError):
            await world.cluster.apply(world.job, world.pod())
        assert world.observe().rejected == "Pod digits-trainer-0: cannot be handled as a Pod"


async def test_a_refusal_is_known_until_something_is_created(api: FakeApi):
    async with started(api) as world:
        api.refusals["POST", SERVICES] = ApiError(403, "Forbidden", "exceeded quota")
        with pytest.raises(ApiError):
            await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        assert world.observe().refused == "exceeded quota"
        await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        assert world.observe().refused is None


async def test_a_refusal_is_not_that_of_a_new_job_of_the_same_name(api: FakeApi):
    async with started(api) as world:
        api.refusals["POST", PODS] = ApiError(403, "Forbidden", "exceeded quota")
        with pytest.raises(ApiError):
            await world.cluster.apply(world.job, world.pod())
        api.vanish(JOB)
        api.put(JOB, {**manifest(), "metadata": {"generation": 1}})
        world.taken()
        assert world.observe().refused is None


async def test_a_pod_on_its_way_out_is_seen_at_once(api: FakeApi):
    api.terminating = True
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod())
        (pod,) = world.observe().pods
        await world.cluster.apply(world.job, DeletePod(pod.name, pod.uid))
        (leaving,) = world.observe().pods
        assert leaving.deleted_at is not None


async def test_until_a_deletion_is_seen_nothing_is_known_but_not_for_ever(api: FakeApi):
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod())
        (pod,) = world.observe().pods
        api.cut()
        await world.cluster.apply(world.job, DeletePod(pod.name, pod.uid, grace_period_seconds=0))
        assert world.cluster.observe(world.job) is None
        world.clock.seconds += UNSEEN_SECONDS
        assert world.cluster.observe(world.job) is not None
        await world.until(lambda: world.observe().pods == ())


async def test_a_deletion_that_took_long_is_waited_for_from_its_end(
    api: FakeApi, monkeypatch: pytest.MonkeyPatch
):
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod())
        (pod,) = world.observe().pods
        at_once = api.delete

        async def slowly(path: str, options: dict[str, Any]) -> dict[str, Any]:
            world.clock.seconds += 2 * UNSEEN_SECONDS
            return await at_once(path, options)

        monkeypatch.setattr(api, "delete", slowly)
        api.cut()
        await world.cluster.apply(world.job, DeletePod(pod.name, pod.uid))
        assert world.cluster.observe(world.job) is None


async def test_a_deletion_that_is_refused_leaves_no_doubt(api: FakeApi):
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod())
        (pod,) = world.observe().pods
        api.refusals["DELETE", POD] = ApiError(500, "InternalError", "etcd is away")
        with pytest.raises(ApiError, match="etcd is away"):
            await world.cluster.apply(world.job, DeletePod(pod.name, pod.uid))
        assert world.observe().pods == (pod,)


async def test_deleting_what_is_gone_or_replaced_is_no_error(api: FakeApi):
    async with started(api) as world:
        await world.cluster.apply(world.job, DeletePod("digits-trainer-0", "gone"))
        await world.cluster.apply(world.job, DeleteService("digits"))
        await world.cluster.apply(world.job, world.pod())
        await world.cluster.apply(world.job, DeletePod("digits-trainer-0", "another life"))
        assert POD in api.objects
        await world.cluster.apply(world.job, DeleteJob("another life"))
        assert JOB in api.objects
        await world.cluster.apply(world.job, DeleteJob(world.job.metadata.uid or ""))
        assert JOB not in api.objects


async def test_only_the_jobs_own_service_is_deleted(api: FakeApi):
    api.put(SERVICE, {"metadata": {"labels": {}}})
    async with started(api) as world:
        await world.cluster.apply(world.job, DeleteService("digits"))
        assert SERVICE in api.objects
        api.vanish(SERVICE)
        await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        await world.cluster.apply(world.job, DeleteService("digits"))
        assert SERVICE not in api.objects


CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"


def beside(api: FakeApi) -> tuple[World, EnsureObject, EnsureObject]:
    """Return a world with two features, and what makes a retained claim and a PodGroup for its job."""
    api.put(
        JOB,
        {
            **manifest(
                scheduling={"gang": "Volcano"},
                checkpoint={"volumeClaimTemplate": {"spec": {}}, "scope": "Job"},
            ),
            "metadata": {"generation": 1},
        },
    )
    world = World(api, features=("checkpointClaims", "volcano"))
    world.taken()
    claim, group = (EnsureObject(each.manifest) for each in build_extras(world.job, 0))
    return world, claim, group


async def test_what_a_job_has_beside_its_pods_is_made_seen_and_deleted(api: FakeApi):
    world, claim, group = beside(api)
    await world.view.start()
    try:
        await world.served()
        assert world.observe().objects == frozenset()
        for action in (claim, group, group):
            await world.cluster.apply(world.job, action)
        refs = {ObjectRef.of(each.manifest) for each in (claim, group)}
        assert world.observe().objects == refs
        for ref in refs:
            await world.cluster.apply(world.job, DeleteObject(ref))
        assert f"{GROUPS}/digits-0" not in api.objects
        assert f"{CLAIMS}/digits-checkpoint" in api.objects, "it is nobody's own"
        other = {("networking.k8s.io/v1", "NetworkPolicy"), ("policy/v1", "PodDisruptionBudget")}
        assert world.observe().unserved == {*other, ("scheduling.x-k8s.io/v1alpha1", "PodGroup")}
    finally:
        await world.view.close()


async def test_a_kind_of_object_that_the_cluster_does_not_know_holds_nobody_else_up(api: FakeApi):
    world, _, _ = beside(api)
    path = GROUPS.replace("/namespaces/default", "")
    api.refusals["GET", path] = ApiError(404, "NotFound", "the server could not find the requested resource")
    await world.view.start()
    try:
        assert ("scheduling.volcano.sh/v1beta1", "PodGroup") in world.observe().unserved
        await world.served()  # its definition has come
        assert ("scheduling.volcano.sh/v1beta1", "PodGroup") not in world.observe().unserved
    finally:
        await world.view.close()


async def test_a_claim_that_can_never_be_is_told_as_one(api: FakeApi):
    world, claim, _ = beside(api)
    await world.view.start()
    try:
        api.refusals["POST", CLAIMS] = ApiError(422, "Invalid", "spec.resources: Required value")
        with pytest.raises(ConflictError):
            await world.cluster.apply(world.job, claim)
        told = "PersistentVolumeClaim digits-checkpoint: spec.resources: Required value"
        assert world.observe().rejected == told
    finally:
        await world.view.close()


async def test_a_kind_of_object_that_is_not_listed_yet_is_waited_for(api: FakeApi):
    world, _, _ = beside(api)
    path = GROUPS.replace("/namespaces/default", "")
    api.refusals["GET", path] = ApiError(503, "ServiceUnavailable", "not yet")
    await world.view.start()
    try:
        assert ("scheduling.volcano.sh/v1beta1", "PodGroup") not in world.observe().unserved
    finally:
        await world.view.close()


async def test_a_kind_of_object_without_an_answer_is_named(api: FakeApi, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(view_module, "SYNC_SECONDS", 0.05)
    world, _, _ = beside(api)
    path = GROUPS.replace("/namespaces/default", "")
    api.refusals["GET", path] = ApiError(0, "NoAnswer", "no answer")
    try:
        with pytest.raises(NotSyncedError, match=path):
            await world.view.start()
        assert not world.view.synced
    finally:
        await world.view.close()


async def test_only_a_claim_is_a_jobs_own_without_an_owner(api: FakeApi):
    world, claim, group = beside(api)
    for collection, action in ((CLAIMS, claim), (GROUPS, group)):
        manifest = action.manifest
        unowned = {key: value for key, value in manifest["metadata"].items() if key != "ownerReferences"}
        api.put(f"{collection}/{manifest['metadata']['name']}", {**manifest, "metadata": unowned})
    await world.view.start()
    try:
        await world.served()
        assert world.observe().objects == {ObjectRef.of(claim.manifest)}
        assert world.observe().foreign == ("PodGroup/digits-0",)
    finally:
        await world.view.close()


async def test_an_object_of_another_owner_with_our_labels_is_foreign(api: FakeApi):
    world, _, group = beside(api)
    theirs = {"uid": "theirs", "kind": "Job", "name": "x", "controller": True}
    metadata = {**group.manifest["metadata"], "ownerReferences": [theirs]}
    api.put(f"{GROUPS}/digits-0", {**group.manifest, "metadata": metadata})
    await world.view.start()
    try:
        await world.served()
        assert world.observe().foreign == ("PodGroup/digits-0",)
    finally:
        await world.view.close()


async def test_a_status_is_written_under_the_version_it_was_decided_on(api: FakeApi):
    async with started(api) as world:
        before = world.job
        written = await world.cluster.write_status(before, RUNNING)
        assert written is world.job, "it is read once"
        assert written.status == RUNNING
        assert api.objects[JOB]["status"]["state"] == "Running"
        with pytest.raises(ConflictError):
            await world.cluster.write_status(before, FleetJobStatus())


async def test_a_conflict_brings_the_newest_version(api: FakeApi):
    async with started(api) as world:
        before = world.job
        api.put(JOB, {**api.objects[JOB], "status": {"restarts": 3}})  # kopf has not told of it yet
        with pytest.raises(ConflictError):
            await world.cluster.write_status(before, RUNNING)
        assert world.job.status.restarts == 3


async def test_a_ghost_is_found_out_by_the_first_write(api: FakeApi):
    async with started(api) as world:
        ghost = world.job
        api.vanish(JOB)  # kopf missed it
        with pytest.raises(ConflictError):
            await world.cluster.write_status(ghost, RUNNING)
        assert (world.cluster.job(KEY), world.deleted) == (None, [KEY])


async def test_a_refused_status_is_an_error(api: FakeApi):
    async with started(api) as world:
        api.refusals["PUT", f"{JOB}/status"] = ApiError(500, "", "etcd is away")
        with pytest.raises(ApiError, match="etcd is away"):
            await world.cluster.write_status(world.job, RUNNING)


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
            world.view.take_job("MODIFIED", api.objects[broken])
        async with asyncio.timeout(5):
            await api.posted.wait()
        assert world.cluster.job(Key("default", "broken")) is None
        (event,) = _events(api)
        assert event["reason"] == "InvalidSpec"
        assert "spec.mode" in event["message"]


async def test_events_are_posted_on_the_job(api: FakeApi):
    async with started(api) as world:
        await world.cluster.record(world.job, Event("Normal", "Started", "all replicas run"))
        (event,) = _events(api)
        assert event["involvedObject"]["uid"] == world.job.metadata.uid


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
    assert view.job(KEY) is not None


def _events(api: FakeApi) -> list[dict[str, Any]]:
    return [each for path, each in api.objects.items() if "/events/" in path]
