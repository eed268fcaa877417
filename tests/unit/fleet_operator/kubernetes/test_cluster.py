from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest

from fleet_operator.api import FleetJobStatus, JobState
from fleet_operator.build import build_service
from fleet_operator.cluster import ClusterError, ConflictError
from fleet_operator.kubernetes.client import ApiError
from fleet_operator.kubernetes.cluster import UNSEEN_SECONDS
from fleet_operator.plan.model import CreateService, DeleteJob, DeletePod, DeleteService, Event
from tests.support.jobs import manifest
from tests.support.seen_cluster import JOB, KEY, POD, PODS, SERVICE, SERVICES, api_with_a_job, started

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.support.fake_api import FakeApi

pytestmark = pytest.mark.timeout(20)

RUNNING = FleetJobStatus(state=JobState.RUNNING)


def invalid(sentence: str, name: str = "digits-trainer-0") -> ApiError:
    """Return the API server's word on a pod that can never be."""
    return ApiError(422, "Invalid", sentence, details={"kind": "Pod", "name": name})


@pytest.fixture
def api() -> FakeApi:
    return api_with_a_job()


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


async def test_a_pod_that_was_to_bring_the_key_and_is_there_already_is_a_conflict(api: FakeApi):
    """An operator that was killed has created it, maybe unanswered: its key counts, not ours."""
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod(key="aa" * 32))
        with pytest.raises(ConflictError, match="pod digits-trainer-0 already exists, and has the key"):
            await world.cluster.apply(world.job, replace(world.pod(key="bb" * 32), brings_key=True))
        assert [pod.key for pod in world.observe().pods] == ["aa" * 32]


async def test_what_a_new_life_would_get_is_new_each_time(api: FakeApi):
    async with started(api) as world:
        one, other = world.observe().new_key, world.observe().new_key
        assert one is not None
        assert len(bytes.fromhex(one)) == 32
        assert one != other


async def test_a_pod_that_can_never_be_is_remembered_until_the_spec_changes(api: FakeApi):
    async with started(api) as world:
        api.refusals["POST", PODS] = invalid("spec.containers[0].image: Required value")
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
            ApiError(400, "", 'admission webhook "images.example.com" denied the request: no', details={}),
            id="webhook",
        ),
        pytest.param(
            invalid("pods is forbidden: ValidatingAdmissionPolicy 'p' denied request"),
            id="policy",
        ),
        pytest.param(ApiError(400, "", "<html>400 Bad Request</html>"), id="a-proxys-400"),
        pytest.param(ApiError(400, "BadRequest", "Pod in version 1"), id="a-proxys-400-as-JSON"),
        pytest.param(ApiError(422, "Invalid", "try again"), id="a-proxys-422"),
        pytest.param(
            ApiError(400, "BadRequest", "the request is cut off: unexpected end of JSON input", details={}),
            id="a-damaged-request",
        ),
        pytest.param(invalid("spec: Required value", "digits-trainer-1"), id="of-another-pod"),
        pytest.param(
            ApiError(
                500,
                "InternalError",
                'Internal error occurred: failed calling webhook "images.example.com": connection refused',
            ),
            id="a-webhook-that-does-not-answer",
        ),
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
        sentence = (
            'Pod in version "v1" cannot be handled as a Pod: strict decoding error: unknown field "spec.x"'
        )
        api.refusals["POST", PODS] = ApiError(400, "BadRequest", sentence, details={})
        with pytest.raises(ConflictError):
            await world.cluster.apply(world.job, world.pod())
        assert world.observe().rejected == f"Pod digits-trainer-0: {sentence}"


async def test_unknown_fields_are_refused_in_what_is_made_from_a_template(api: FakeApi):
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod())
        await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        asked = {path: validation for path, validation in api.validations if path in (PODS, SERVICES)}
        assert asked == {PODS: "Strict", SERVICES: None}


async def test_a_refusal_is_known_until_something_is_created(api: FakeApi):
    async with started(api) as world:
        api.refusals["POST", SERVICES] = ApiError(403, "Forbidden", "exceeded quota")
        with pytest.raises(ApiError):
            await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        assert world.observe().refused == "exceeded quota"
        await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        assert world.observe().refused is None


@pytest.mark.parametrize(
    ("sentence", "details", "over"),
    [
        pytest.param(
            "exceeded quota: few, requested: pods=1", {"name": "digits-trainer-0"}, True, id="quota"
        ),
        pytest.param("must specify limits.cpu", {"name": "digits-trainer-0"}, False, id="another-refusal"),
        pytest.param("exceeded quota: few, requested: pods=1", None, False, id="a-proxys"),
    ],
)
async def test_a_quota_that_has_no_room_for_a_pod_is_known_as_one(
    api: FakeApi, sentence: str, details: dict[str, str] | None, over: bool
):
    async with started(api) as world:
        said = f'pods "digits-trainer-0" is forbidden: {sentence}'
        api.refusals["POST", PODS] = ApiError(403, "Forbidden", said, details=details)
        with pytest.raises(ApiError):
            await world.cluster.apply(world.job, world.pod())
        assert (world.observe().refused, world.observe().over_quota) == (said, over)
        await world.cluster.apply(world.job, world.pod())
        assert world.observe().over_quota is False


async def test_what_succeeds_beside_a_refusal_does_not_hide_it(api: FakeApi):
    async with started(api) as world:
        answered = asyncio.Event()
        create = api.create

        async def create_late(path: str, manifest: Mapping[str, Any], **options: Any) -> dict[str, Any]:
            if path == SERVICES:
                await answered.wait()
            return await create(path, manifest, **options)

        with patch.object(api, "create", create_late):
            beside = asyncio.create_task(
                world.cluster.apply(world.job, CreateService(build_service(world.job)))
            )
            await asyncio.sleep(0)
            api.refusals["POST", PODS] = ApiError(403, "Forbidden", "exceeded quota")
            with pytest.raises(ApiError):
                await world.cluster.apply(world.job, world.pod())
            answered.set()
            await beside
        assert world.observe().refused == "exceeded quota"
        await world.cluster.apply(world.job, world.pod())
        assert world.observe().refused is None


async def test_of_pods_that_can_never_be_the_first_is_told(api: FakeApi):
    async with started(api) as world:
        for sentence in ("first", "second"):
            api.refusals["POST", PODS] = invalid(sentence)
            with pytest.raises(ConflictError):
                await world.cluster.apply(world.job, world.pod())
        assert world.observe().rejected == "Pod digits-trainer-0: first"


@pytest.mark.parametrize("first", [0, 1], ids=["in-order", "the-other-way-round"])
async def test_of_pods_that_are_refused_at_the_same_time_the_same_speaks_each_time(api: FakeApi, first: int):
    async with started(api) as world:
        answered = [asyncio.Event(), asyncio.Event()]

        async def refuse(_: str, manifest: Mapping[str, Any], **__: object) -> dict[str, Any]:
            name = manifest["metadata"]["name"]
            await answered[int(name[-1])].wait()
            raise ApiError(403, "Forbidden", f"{name}: exceeded quota")

        with patch.object(api, "create", refuse):
            for turn in (first, 1 - first, first):
                pods = [world.pod(name=f"digits-trainer-{index}") for index in (0, 1)]
                passing = [asyncio.create_task(world.cluster.apply(world.job, pod)) for pod in pods]
                await asyncio.sleep(0)
                for index in (turn, 1 - turn):
                    answered[index].set()
                    await asyncio.wait([passing[index]])
                    answered[index].clear()
                assert all(isinstance(each.exception(), ApiError) for each in passing)
                assert world.observe().refused == "digits-trainer-0: exceeded quota"


async def test_another_refusal_of_a_later_pass_takes_the_place_of_the_first(api: FakeApi):
    async with started(api) as world:
        for index in (0, 1):
            api.refusals["POST", PODS] = ApiError(403, "Forbidden", f"no room for {index}")
            with pytest.raises(ApiError):
                await world.cluster.apply(world.job, world.pod(name=f"digits-trainer-{index}"))
            assert world.observe().refused == f"no room for {index}"


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ApiError(403, "Forbidden", "the namespace is being terminated"), id="for-now"),
        pytest.param(invalid("spec: Required value"), id="for-good"),
    ],
)
async def test_a_refusal_that_comes_after_its_job_was_deleted_is_not_kept(api: FakeApi, error: ApiError):
    async with started(api) as world:
        job, pod = world.job, world.pod()

        async def refuse(*_: object, **__: object) -> dict[str, Any]:
            world.taken("DELETED")
            raise error

        with patch.object(api, "create", refuse), pytest.raises(ClusterError):
            await world.cluster.apply(job, pod)
        observed = world.cluster.observe(job)
        assert observed is not None
        assert (observed.refused, observed.rejected) == (None, None)


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


async def test_a_deleted_pod_is_known_as_the_watch_saw_it_last_until_its_job_has_ended(api: FakeApi):
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod())
        api.objects[POD]["status"] = {"phase": "Succeeded"}  # of which no event has told
        api.vanish(POD)
        await world.until(lambda: world.observe().pods == ())
        (departed,) = world.observe().departed
        assert (departed.name, departed.phase) == ("digits-trainer-0", "Succeeded")
        assert world.observe().departed == (departed,)
        await world.cluster.write_status(world.job, FleetJobStatus(state=JobState.SUCCEEDED))
        assert world.observe().departed == ()


@pytest.mark.parametrize(("phase", "departed"), [("Running", 0), ("Succeeded", 1)])
async def test_of_a_pod_that_only_a_list_lacks_what_was_known_counts_if_it_was_its_end(
    api: FakeApi, phase: str, departed: int
):
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod())
        api.put(POD, {**api.objects[POD], "status": {"phase": phase}})
        await world.until(lambda: world.observe().pods[0].phase == phase)
        api.vanish(POD)
        api.forget()
        await world.until(lambda: world.observe().pods == ())
        assert len(world.observe().departed) == departed


async def test_of_deleted_pods_only_the_latest_of_the_present_life_are_known(api: FakeApi):
    async with started(api) as world:
        for attempt in ("0.0", "0.1"):
            pod = world.pod()
            labels = {**pod.manifest["metadata"]["labels"], "fleetjob.dev/attempt": attempt}
            await world.cluster.apply(world.job, world.pod(labels=labels))
            api.vanish(POD)
            await world.until(lambda: world.observe().pods == ())
        assert [str(each.attempt) for each in world.observe().departed] == ["0.1"]
        await world.cluster.write_status(world.job, FleetJobStatus(job_restarts=1))
        assert world.observe().departed == ()


async def test_nothing_is_remembered_of_pods_that_go_after_their_job(api: FakeApi):
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod())
        world.taken("DELETED")
        world.told.clear()
        api.vanish(POD)
        await world.until(lambda: world.told)
        assert (world.view.owned.pods.of_job(KEY), world.view.owned.pods.departed(KEY)) == ((), ())


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


async def test_deleting_what_is_gone_is_no_error_and_what_is_replaced_is_looked_at_again(api: FakeApi):
    async with started(api) as world:
        await world.cluster.apply(world.job, DeletePod("digits-trainer-0", "gone"))
        await world.cluster.apply(world.job, DeleteService("digits"))
        await world.cluster.apply(world.job, world.pod())
        with pytest.raises(ConflictError):
            await world.cluster.apply(world.job, DeletePod("digits-trainer-0", "another life"))
        assert POD in api.objects
        with pytest.raises(ConflictError):
            await world.cluster.apply(world.job, DeleteJob("another life"))
        assert JOB in api.objects
        await world.cluster.apply(world.job, DeleteJob(world.job.metadata.uid or ""))
        assert JOB not in api.objects


async def test_a_job_that_was_given_more_time_unseen_is_not_deleted(api: FakeApi):
    async with started(api) as world:
        decided_on = world.job
        changed = manifest(runPolicy={"ttlSecondsAfterFinished": 3600})
        api.put(JOB, {**changed, "metadata": {"generation": 2}})
        with pytest.raises(ConflictError):
            await world.cluster.apply(decided_on, DeleteJob(decided_on.metadata.uid or ""))
        assert JOB in api.objects
        assert world.job.spec.run_policy.ttl_seconds_after_finished == 3600, "however late the watch is"
        await world.cluster.apply(world.job, DeleteJob(world.job.metadata.uid or ""))
        assert JOB not in api.objects


async def test_a_pod_that_ended_unseen_is_only_deleted_by_who_does_not_care(api: FakeApi):
    async with started(api) as world:
        await world.cluster.apply(world.job, world.pod())
        (pod,) = world.observe().pods
        ended = api.put(POD, {**api.objects[POD], "status": {"phase": "Succeeded"}})
        as_seen = DeletePod(pod.name, pod.uid, version=pod.version)
        with pytest.raises(ConflictError):
            await world.cluster.apply(world.job, as_seen)
        (pod,) = world.observe().pods
        assert (pod.phase, pod.version) == ("Succeeded", ended["metadata"]["resourceVersion"])
        await world.cluster.apply(world.job, replace(as_seen, version=None))
        assert POD not in api.objects


async def test_a_service_that_changed_unseen_is_not_deleted(api: FakeApi):
    async with started(api) as world:
        await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        taken = copy.deepcopy(api.objects[SERVICE])
        taken["metadata"]["ownerReferences"][0]["uid"] = "somebody else"
        api.put(SERVICE, taken)
        with pytest.raises(ConflictError):
            await world.cluster.apply(world.job, DeleteService("digits"))
        await world.cluster.apply(world.job, DeleteService("digits"))
        assert SERVICE in api.objects


async def test_only_the_jobs_own_service_is_deleted(api: FakeApi):
    api.put(SERVICE, {"metadata": {"labels": {}}})
    async with started(api) as world:
        await world.cluster.apply(world.job, DeleteService("digits"))
        assert SERVICE in api.objects
        api.vanish(SERVICE)
        await world.cluster.apply(world.job, CreateService(build_service(world.job)))
        await world.cluster.apply(world.job, DeleteService("digits"))
        assert SERVICE not in api.objects


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


async def test_nobody_looks_again_because_of_an_own_status(api: FakeApi):
    async with started(api) as world:
        world.told.clear()
        written = await world.cluster.write_status(world.job, RUNNING)
        world.taken("MODIFIED")  # the watch tells of it too
        assert (world.told, world.cluster.job(KEY)) == ([], written)
        api.put(JOB, {**api.objects[JOB], "status": {"state": "Pending"}})
        world.taken("MODIFIED")
        assert KEY in world.told


async def test_a_refused_status_is_an_error(api: FakeApi):
    async with started(api) as world:
        api.refusals["PUT", f"{JOB}/status"] = ApiError(500, "", "etcd is away")
        with pytest.raises(ApiError, match="etcd is away"):
            await world.cluster.write_status(world.job, RUNNING)


async def test_events_are_posted_on_the_job(api: FakeApi):
    async with started(api) as world:
        await world.cluster.record(world.job, Event("Normal", "Started", "all replicas run"))
        (event,) = world.events()
        assert event["involvedObject"]["uid"] == world.job.metadata.uid
