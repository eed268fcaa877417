from __future__ import annotations

from typing import Any

import pytest

from fleet_operator.build import build_extras
from fleet_operator.cluster import ConflictError
from fleet_operator.kubernetes import informer_cache
from fleet_operator.kubernetes.client import ApiError
from fleet_operator.kubernetes.cluster import metrics_readers
from fleet_operator.kubernetes.informer_cache import NotSyncedError
from fleet_operator.plan.model import DeleteObject, EnsureObject, ObjectRef
from tests.support.fake_api import FakeApi
from tests.support.jobs import manifest
from tests.support.seen_cluster import JOB, SeenCluster

pytestmark = pytest.mark.timeout(20)

CLAIMS = "/api/v1/namespaces/default/persistentvolumeclaims"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/default/networkpolicies"
GROUPS = "/apis/scheduling.volcano.sh/v1beta1/namespaces/default/podgroups"


@pytest.fixture
def api() -> FakeApi:
    return FakeApi()


def beside(api: FakeApi) -> tuple[SeenCluster, EnsureObject, EnsureObject]:
    """Return a world with two features, and what makes a retained claim and a PodGroup for its job."""
    api.put(
        JOB,
        {
            **manifest(
                network={"policy": {"type": "None"}},
                podGroupPolicy={"volcano": {}},
                checkpoint={"volumeClaimTemplate": {"spec": {}}, "scope": "Job"},
            ),
            "metadata": {"generation": 1},
        },
    )
    world = SeenCluster(api, features=("checkpointClaims", "volcano"))
    world.taken()
    claim, group = (EnsureObject(each.manifest) for each in build_extras(world.job, 0))
    return world, claim, group


async def test_what_a_job_has_beside_its_pods_is_made_seen_and_deleted(api: FakeApi):
    world, claim, group = beside(api)
    await world.view.start()
    try:
        await world.served()
        assert world.observe().objects == {}
        for action in (claim, group, group):
            await world.cluster.apply(world.job, action)
        refs = {ObjectRef.of(each.manifest) for each in (claim, group)}
        assert world.observe().objects.keys() == refs
        for ref in refs:
            await world.cluster.apply(world.job, DeleteObject(ref))
        assert f"{GROUPS}/digits-0" not in api.objects
        assert f"{CLAIMS}/{claim.manifest['metadata']['name']}" in api.objects, "it has no owner"
        other = {("networking.k8s.io/v1", "NetworkPolicy"), ("policy/v1", "PodDisruptionBudget")}
        assert world.observe().unserved == {*other, ("scheduling.x-k8s.io/v1alpha1", "PodGroup")}
    finally:
        await world.view.close()


async def test_an_object_that_changed_unseen_is_not_deleted(api: FakeApi):
    world, _, group = beside(api)
    path, delete = f"{GROUPS}/digits-0", DeleteObject(ObjectRef.of(group.manifest))
    await world.view.start()
    try:
        await world.served()
        await world.cluster.apply(world.job, group)
        api.put(path, {**api.objects[path], "spec": {"minMember": 7}})  # the watch has not come to it yet
        with pytest.raises(ConflictError, match="resourceVersion in the precondition"):
            await world.cluster.apply(world.job, delete)
        assert path in api.objects
        await world.cluster.apply(world.job, delete)  # it has been looked at meanwhile
        assert path not in api.objects
    finally:
        await world.view.close()


async def test_what_an_object_was_made_from_is_seen_until_it_is_on_its_way_out(api: FakeApi):
    world, claim, group = beside(api)
    await world.view.start()
    try:
        await world.served()
        for action in (claim, group):
            await world.cluster.apply(world.job, action)
        ref = ObjectRef.of(group.manifest)
        said = group.manifest["metadata"]["annotations"]["fleetjob.dev/made-from"]
        told = {each: found.made_from for each, found in world.observe().objects.items()}
        assert told == {ref: said, ObjectRef.of(claim.manifest): None}, "nobody is to make a claim anew"
        path = f"{GROUPS}/digits-0"
        leaving = {**api.objects[path]["metadata"], "deletionTimestamp": "2026-11-21T10:00:00Z"}
        api.put(path, {**api.objects[path], "metadata": leaving})
        await world.until(lambda: world.observe().objects[ref].made_from is None)
    finally:
        await world.view.close()


def test_the_operators_namespace_reads_metrics_and_whom_the_settings_name():
    others: tuple[dict[str, Any], ...] = ({"podSelector": {}},)
    own = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "fleet-system"}}}
    assert metrics_readers("fleet-system", others) == (own, *others)


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
    name = claim.manifest["metadata"]["name"]
    try:
        api.refusals["POST", CLAIMS] = ApiError(
            422, "Invalid", "spec.resources: Required value", details={"name": name}
        )
        with pytest.raises(ConflictError):
            await world.cluster.apply(world.job, claim)
        told = f"PersistentVolumeClaim {name}: spec.resources: Required value"
        assert world.observe().rejected == told
    finally:
        await world.view.close()


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(ApiError(422, "Invalid", "spec.ingress[1].from[1]: Invalid value"), id="422"),
        pytest.param(ApiError(400, "BadRequest", "cannot unmarshal number into a string"), id="400"),
    ],
)
async def test_a_policy_that_the_settings_spoil_is_refused_for_now_and_ends_no_job(
    api: FakeApi, error: ApiError
):
    api.put(JOB, {**manifest(network={"policy": {"type": "Isolated"}}), "metadata": {"generation": 1}})
    world = SeenCluster(api, features=("networkPolicies",))
    world.taken()
    (policy,) = (EnsureObject(each.manifest) for each in build_extras(world.job, 0))
    api.refusals["POST", POLICIES] = error
    await world.view.start()
    try:
        with pytest.raises(ApiError):
            await world.cluster.apply(world.job, policy)
        assert world.observe().rejected is None
        assert world.observe().refused == str(error)
        await world.cluster.apply(world.job, policy)  # the settings have been mended
        assert world.observe().refused is None
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
    monkeypatch.setattr(informer_cache, "SYNC_SECONDS", 0.05)
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
        assert world.observe().objects.keys() == {ObjectRef.of(claim.manifest)}
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
