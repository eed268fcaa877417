"""Policies that only a cluster can try: scheduling, deletion, suspension, nodes that go silent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.cluster.client import ApiError
from tests.support.jobs import manifest
from tests.support.kube import condition, is_running

if TYPE_CHECKING:
    from tests.support.kube import Manifest, Namespace

SERVERS = ("digits-pserver-0", "digits-pserver-1")
TRAINERS = ("digits-trainer-0", "digits-trainer-1")


def told_of(job: Manifest, kind: str) -> Manifest:
    """Return one of a job's conditions."""
    (told,) = [each for each in job["status"]["conditions"] if each["type"] == kind]
    found: Manifest = told
    return found


async def run(namespace: Namespace, **spec: Any) -> dict[str, Manifest]:
    """Create the job `digits` and wait until all of it runs; return its pods."""
    await namespace.create_job(manifest(**spec))
    pods = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    await namespace.until_state("digits", "Running")
    return pods


async def patch(namespace: Namespace, **spec: Any) -> Manifest:
    """Change the job's spec."""
    return await namespace.client.merge_patch(namespace.path("fleetjobs", "digits"), {"spec": spec})


async def test_a_job_that_finds_no_node_in_time_fails_with_the_schedulers_sentence(namespace: Namespace):
    await namespace.create_job(
        manifest(nodePool={"nodeSelector": {"gpu": "h100"}}, runPolicy={"pendingDeadlineSeconds": 2})
    )
    job = await namespace.until_job(
        "digits", "why it waits", lambda job: "Unschedulable" in str(job.get("status", {}).get("conditions"))
    )
    assert "didn't match Pod's node affinity/selector" in told_of(job, "Running")["message"]
    job = await namespace.until_state("digits", "Failed")
    failed = told_of(job, "Failed")
    assert failed["reason"] == "PendingDeadlineExceeded"
    assert "didn't match Pod's node affinity/selector" in failed["message"]
    assert job["status"]["lastFailure"]["reason"] == "Unschedulable"


async def test_a_job_that_is_managed_by_another_controller_is_left_alone(namespace: Namespace):
    policy = {"managedBy": "kueue.x-k8s.io/multikueue"}
    await namespace.create_job(manifest("other", runPolicy=policy))
    await run(namespace)  # by then the operator has seen the first one as well
    other = await namespace.get("fleetjobs", "other")
    assert "status" not in other
    assert "other" not in {each["metadata"]["name"] for each in await namespace.all("services")}
    for change in (None, "fleetjob.dev/fleet-operator"):
        with pytest.raises(ApiError, match=r"no change of spec\.runPolicy\.managedBy"):
            await namespace.client.merge_patch(
                namespace.path("fleetjobs", "other"), {"spec": {"runPolicy": {"managedBy": change}}}
            )


async def test_a_suspended_job_has_no_pods_and_runs_again_when_it_is_resumed(namespace: Namespace):
    await run(namespace)
    await patch(namespace, runPolicy={"suspend": True})
    await namespace.until_state("digits", "Suspended")
    await namespace.until_pods("digits", "no pod", lambda pods: not pods)
    await patch(namespace, runPolicy={"suspend": False})
    await namespace.until_running("digits", *SERVERS, *TRAINERS)
    job = await namespace.until_state("digits", "Running")
    assert condition(job, "Suspended") == "False"
    assert (job["status"].get("failures", 0), job["status"].get("restarts", 0)) == (0, 0)
    reasons = [reason for _, reason, _ in await namespace.events("digits")]
    assert reasons[:3] == ["Started", "Suspended", "Resumed"]


async def test_a_finished_job_is_deleted_with_all_it_owns_when_its_time_is_over(namespace: Namespace):
    await run(namespace, runPolicy={"ttlSecondsAfterFinished": 1})
    await namespace.end(*TRAINERS)
    await namespace.until("fleetjobs", "no job", lambda found: not found)
    await namespace.until_pods("digits", "no pod", lambda pods: not pods)


async def test_a_pod_on_a_silent_node_is_told_and_replaced_without_being_counted(namespace: Namespace):
    taint = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    await run(namespace, nodePool={"tolerations": [{**taint, "tolerationSeconds": 2}]})
    await namespace.annotate("digits-trainer-1", not_ready="NodeNotReady")
    job = await namespace.until_job(
        "digits", "the silent node", lambda job: told_of(job, "Running")["reason"] == "NodeNotReady"
    )
    assert "digits-trainer-1 is on node kwok-" in told_of(job, "Running")["message"]
    assert job["status"]["state"] == "Running"
    await namespace.until_pods(
        "digits",
        "the second attempt",
        lambda pods: any(
            name == "digits-trainer-1"
            and pod["metadata"]["labels"]["fleetjob.dev/attempt"] == "0.1"
            and is_running(pod)
            for name, pod in pods.items()
        ),
    )
    job = await namespace.until_state("digits", "Running")
    assert job["status"].get("failures", 0) == 0
    assert job["status"]["lastFailure"]["reason"] == "NodeLost"


async def test_an_eviction_is_no_failure(namespace: Namespace):
    await run(namespace, runPolicy={"backoffLimit": 0})
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "digits-trainer-1"}}
    await namespace.client.create(
        namespace.path("pods", "digits-trainer-1", subresource="eviction"), eviction
    )
    await namespace.until_pods(
        "digits",
        "the second attempt",
        lambda pods: any(
            pod["metadata"]["labels"]["fleetjob.dev/attempt"] == "0.1" and is_running(pod)
            for pod in pods.values()
        ),
    )
    job = await namespace.until_state("digits", "Running")
    assert (job["status"].get("failures", 0), job["status"]["restarts"]) == (0, 1)
