"""The objects of a job besides pods and Service: claims, a NetworkPolicy, a budget, PodGroups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.digits_job import SERVERS, TRAINERS, run
from tests.support.jobs import collective_manifest, manifest
from tests.support.kube import ApiException, attempt, is_running, told_of
from tests.support.operator_process import METRICS_READER, NAMESPACE

if TYPE_CHECKING:
    from tests.support.kube import Manifest, Namespace

CLAIM = {"spec": {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}}
POD_GROUPS = {
    "Volcano": "/apis/scheduling.volcano.sh/v1beta1",
    "Coscheduling": "/apis/scheduling.x-k8s.io/v1alpha1",
}


async def names(namespace: Namespace, plural: str) -> set[str]:
    """Return the names of all objects of a kind."""
    return {each["metadata"]["name"] for each in await namespace.all(plural)}


async def groups(namespace: Namespace, gang: str) -> dict[str, Manifest]:
    """Return the PodGroups of a scheduler by name."""
    path = f"{POD_GROUPS[gang]}/namespaces/{namespace.name}/podgroups"
    return {each["metadata"]["name"]: each for each in (await namespace.client.get(path))["items"]}


def conditions_of(job: Manifest) -> str:
    """Return the messages of a job's conditions, one per line."""
    return "\n".join(each["message"] for each in job.get("status", {}).get("conditions", ()))


def on_the_default_scheduler(document: Manifest) -> Manifest:
    """Use the default scheduler in the template, because no gang scheduler runs here."""
    document["spec"]["template"]["spec"]["schedulerName"] = "default-scheduler"
    return document


def mounted(pods: dict[str, Manifest]) -> dict[str, str]:
    """Return the claim that each pod mounts."""
    return {
        name: volume["persistentVolumeClaim"]["claimName"]
        for name, pod in sorted(pods.items())
        for volume in pod["spec"]["volumes"]
        if "persistentVolumeClaim" in volume
    }


@pytest.mark.parametrize(("retention", "left"), [("Retain", 2), ("Delete", 0)])
async def test_each_server_has_a_claim_that_outlives_its_job_or_does_not(
    namespace: Namespace, retention: str, left: int
):
    await namespace.create_job(manifest(checkpoint={"volumeClaimTemplate": CLAIM, "retention": retention}))
    await namespace.until("persistentvolumeclaims", "two claims", lambda found: len(found) == 2)
    pods = await namespace.until_pods("digits", "the servers", lambda pods: set(pods) == set(SERVERS))
    claims = mounted(pods)
    uid = (await namespace.get("fleetjobs", "digits"))["metadata"]["uid"]
    own = f"digits-checkpoint-{uid[:8]}"
    assert claims == {f"digits-pserver-{index}": f"{own}-pserver-{index}" for index in (0, 1)}
    await namespace.delete("fleetjobs", "digits")
    await namespace.until_pods("digits", "no pod", lambda pods: not pods)
    await namespace.until("persistentvolumeclaims", f"{left} claims", lambda found: len(found) == left)
    if left:
        await namespace.create_job(manifest(checkpoint={"volumeClaimTemplate": CLAIM}))
        await namespace.until_pods("digits", "the servers", lambda pods: set(pods) == set(SERVERS))
        found = await namespace.until(
            "persistentvolumeclaims", "two claims more", lambda all_: len(all_) == 4
        )
        assert set(claims.values()) < set(found), "a namesake has claims of its own"
        await namespace.create_job(manifest("next", checkpoint={"claimName": own, "scope": "Pserver"}))
        pods = await namespace.until_pods("next", "the servers", lambda pods: len(pods) == 2)
        assert list(mounted(pods).values()) == list(claims.values()), (
            "one that names the claims continues from them"
        )


async def test_a_claim_that_can_never_be_fails_the_job_with_the_servers_sentence(namespace: Namespace):
    await namespace.create_job(
        manifest(checkpoint={"volumeClaimTemplate": {"spec": {"accessModes": ["Own"]}}})
    )
    job = await namespace.until_state("digits", "Failed")
    assert "PersistentVolumeClaim" in str(job["status"]["conditions"])


async def test_a_job_brings_its_network_policy_and_its_servers_budget(namespace: Namespace):
    await run(
        namespace, network={"policy": {"type": "Isolated"}}, pserver={"replicas": 2, "disruptionBudget": {}}
    )
    job = await namespace.get("fleetjobs", "digits")
    for plural, name in (("networkpolicies", "digits"), ("poddisruptionbudgets", "digits-pserver")):
        (owner,) = (await namespace.get(plural, name))["metadata"]["ownerReferences"]
        assert owner["uid"] == job["metadata"]["uid"]
    await namespace.until(
        "poddisruptionbudgets",
        "the budget in force",
        lambda found: found["digits-pserver"].get("status", {}).get("currentHealthy") == 2,
    )
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": SERVERS[0]}}
    path = namespace.path("pods", SERVERS[0], subresource="eviction")
    with pytest.raises(ApiException) as refused:
        await namespace.client.create(path, eviction)
    assert refused.value.status == 429
    # A finished job lets its nodes be drained.
    await namespace.end(*TRAINERS)
    await namespace.until("poddisruptionbudgets", "no budget", lambda found: not found)
    assert await names(namespace, "networkpolicies") == {"digits"}


@pytest.mark.parametrize("network", [{"policy": {"type": "Isolated"}}, {}], ids=["asked-for", "by-default"])
async def test_the_metrics_are_for_the_operators_namespace_and_for_those_whom_its_settings_name(
    namespace: Namespace, network: dict[str, bool]
):
    await namespace.create_job(manifest(network=network))
    found = await namespace.until("networkpolicies", "the policy", lambda found: "digits" in found)
    own, reading = found["digits"]["spec"]["ingress"]
    assert own == {"from": [{"podSelector": {"matchLabels": {"fleetjob.dev/job-name": "digits"}}}]}
    operators = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": NAMESPACE}}}
    assert reading == {"from": [operators, METRICS_READER], "ports": [{"port": 6180, "protocol": "TCP"}]}


async def test_a_policy_of_somebody_else_stays_and_a_job_that_asks_for_none_runs_without(
    namespace: Namespace,
):
    theirs = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "digits"},
        "spec": {"podSelector": {}, "ingress": [{}]},
    }
    made = await namespace.client.create(namespace.path("networkpolicies"), theirs)
    await run(namespace)
    assert await namespace.get("networkpolicies", "digits") == made


async def test_what_an_operator_with_other_settings_has_made_is_made_anew_and_what_a_hand_has_changed_stays(
    namespace: Namespace,
):
    await namespace.create_job(manifest(network={"policy": {"type": "Isolated"}}))
    found = await namespace.until("networkpolicies", "the policy", lambda found: "digits" in found)
    wanted, path = found["digits"], namespace.path("networkpolicies", "digits")
    edited = await namespace.client.merge_patch(path, {"spec": {"ingress": [{}]}})
    await namespace.until_running("digits", *SERVERS, *TRAINERS)
    await namespace.until_state("digits", "Running")  # many passes later
    assert await namespace.get("networkpolicies", "digits") == edited
    await namespace.client.merge_patch(
        path, {"metadata": {"annotations": {"fleetjob.dev/made-from": "something else"}}}
    )
    found = await namespace.until(
        "networkpolicies",
        "another policy",
        lambda found: "digits" in found and found["digits"]["metadata"]["uid"] != wanted["metadata"]["uid"],
    )
    assert found["digits"]["spec"] == wanted["spec"]


async def test_a_gang_is_as_large_as_its_job_has_become(namespace: Namespace):
    quota: Manifest = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "none"},
        "spec": {"hard": {"pods": "0"}},
    }
    await namespace.client.create(namespace.path("resourcequotas"), quota)
    await namespace.until(
        "resourcequotas", "the quota in force", lambda found: "hard" in found["none"].get("status", {})
    )
    trainer = {"replicas": 2, "minReplicas": 1, "maxReplicas": 3}
    await namespace.create_job(collective_manifest(podGroupPolicy={"volcano": {}}, trainer=trainer))
    await namespace.until_job(
        "digits", "no room", lambda job: "exceeded quota" in str(job.get("status", {}).get("conditions"))
    )
    assert (await groups(namespace, "Volcano"))["digits-0"]["spec"]["minMember"] == 2
    scale = namespace.path("fleetjobs", "digits", subresource="scale")
    await namespace.client.merge_patch(scale, {"spec": {"replicas": 3}})
    await namespace.until(
        "podgroups.scheduling.volcano.sh",
        "a gang of three in place of that of two",
        lambda found: [each["spec"]["minMember"] for each in found.values()] == [3],
    )


@pytest.mark.parametrize("gang", POD_GROUPS)
async def test_a_gang_comes_before_its_pods_and_goes_with_them(namespace: Namespace, gang: str):
    gangs = manifest(podGroupPolicy={gang.lower(): {}}, failurePolicy={"action": "RestartJob"})
    await run(namespace, on_the_default_scheduler(gangs))
    found = await groups(namespace, gang)
    assert {name: group["spec"]["minMember"] for name, group in found.items()} == {"digits-0": 4}
    await namespace.end("digits-trainer-1", exit_code=1)
    await namespace.until_pods(
        "digits",
        "the second life",
        lambda pods: (
            len(pods) == 4 and all(is_running(pod) and attempt(pod) == "1.0" for pod in pods.values())
        ),
    )
    assert set(await groups(namespace, gang)) == {"digits-1"}
    await namespace.end(*TRAINERS)
    await namespace.until_state("digits", "Succeeded")
    await namespace.end(*SERVERS)
    await namespace.until_pods(
        "digits",
        "all pods ended",
        lambda pods: all(pod["status"]["phase"] == "Succeeded" for pod in pods.values()),
    )
    assert await groups(namespace, gang) == {}


async def test_a_gang_in_its_schedulers_queue_is_told_and_its_deadline_has_the_schedulers_sentence(
    namespace: Namespace,
):
    await namespace.create_job(manifest(podGroupPolicy={"volcano": {}}))
    await namespace.until_pods("digits", "all pods", lambda pods: len(pods) == 4)
    running = "the scheduler volcano has not reported on them yet"
    await namespace.until_job("digits", running, lambda job: running in conditions_of(job))
    waits = {"phase": "Pending", "conditions": [{"type": "Unschedulable", "message": "queue is full"}]}
    group = f"{POD_GROUPS['Volcano']}/namespaces/{namespace.name}/podgroups/digits-0"
    await namespace.client.merge_patch(group, {"status": waits})
    told = "its PodGroup is Pending: queue is full"
    await namespace.until_job("digits", told, lambda job: told in conditions_of(job))
    scheduled = {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": "2/4 tasks in gang unschedulable",
    }
    pod = namespace.path("pods", TRAINERS[1], subresource="status")
    await namespace.client.merge_patch(pod, {"status": {"conditions": [scheduled]}})
    told = "2/4 tasks in gang unschedulable"
    await namespace.until_job("digits", told, lambda job: told in conditions_of(job))
    deadline = {"spec": {"runPolicy": {"pendingDeadlineSeconds": 1}}}  # which is over by now
    await namespace.client.merge_patch(namespace.path("fleetjobs", "digits"), deadline)
    job = await namespace.until_state("digits", "Failed")
    failed = told_of(job, "Failed")
    assert failed["reason"] == "PendingDeadlineExceeded"
    assert "digits-trainer-1 is waiting, Unschedulable: 2/4 tasks in gang unschedulable" in failed["message"]


async def test_kueues_gates_and_its_hold_on_pods_that_have_ended_are_told(namespace: Namespace):
    document = manifest(podGroupPolicy={"kueue": {"queueName": "research"}})
    document["spec"]["template"]["spec"]["schedulingGates"] = [{"name": "kueue.x-k8s.io/admission"}]
    await namespace.create_job(document)
    job = await namespace.until_job(
        "digits", "the queue", lambda job: "queue research has not admitted" in conditions_of(job)
    )
    assert "(and 3 more) is gated by kueue.x-k8s.io/admission: Scheduling is blocked" in conditions_of(job)
    for pod in (*SERVERS, *TRAINERS):  # it admits the group
        ungated = {"metadata": {"finalizers": ["kueue.x-k8s.io/managed"]}, "spec": {"schedulingGates": None}}
        await namespace.client.merge_patch(namespace.path("pods", pod), ungated)
    await namespace.until_running("digits", *SERVERS, *TRAINERS)
    await namespace.end(TRAINERS[1], exit_code=1)
    kept = "its name is in use until kueue.x-k8s.io/managed is removed from its finalizers"
    await namespace.until_job("digits", kept, lambda job: kept in conditions_of(job))
    for pod in (*SERVERS, *TRAINERS):  # all have ended, and so its group
        await namespace.client.merge_patch(namespace.path("pods", pod), {"metadata": {"finalizers": None}})
    pods = await namespace.until_pods(
        "digits",
        "the second group",
        lambda pods: len(pods) == 4 and all(attempt(pod) == "1.0" for pod in pods.values()),
    )
    uid = (await namespace.get("fleetjobs", "digits"))["metadata"]["uid"]
    assert {pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in pods.values()} == {
        f"digits-{uid[:8]}-1"
    }


async def test_the_pods_of_a_gang_are_created_at_once_for_its_own_scheduler(namespace: Namespace):
    await namespace.create_job(manifest(podGroupPolicy={"volcano": {}}))
    pods = await namespace.until_pods("digits", "all pods", lambda pods: len(pods) == 4)
    assert {pod["spec"]["schedulerName"] for pod in pods.values()} == {"volcano"}
    assert {pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] for pod in pods.values()} == {
        "digits-0"
    }
