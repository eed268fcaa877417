"""The table of features that only a cluster has, on a cluster; local runs have a test of the same table."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.cluster_only import CLUSTER_ONLY, filled, holds
from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.jobs import collective_manifest, manifest
from tests.support.kube import attempt, is_running, runs_again, told_of, uids

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tests.support.cluster_only import ClusterOnly
    from tests.support.kube import Namespace


@pytest.mark.parametrize("case", [pytest.param(each, id=each.id) for each in CLUSTER_ONLY])
async def test_on_a_cluster(namespace: Namespace, case: ClusterOnly):
    if account := case.pod.get("serviceAccountName"):
        await namespace.client.create(
            namespace.path("serviceaccounts"),
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}},
        )
    document = filled(case, collective_manifest() if case.collective else manifest())
    made = await namespace.create_job(document)
    uid = made["metadata"]["uid"][:8]
    for role, wanted in case.pods.items():
        name = f"digits-{role}-0"
        found = await namespace.until_pods("digits", name, lambda pods: name in pods)  # noqa: B023
        assert holds(found[name], json.loads(json.dumps(wanted).replace("UID", uid))), found[name]
    for kind, wanted_names in case.objects.items():
        names = [each.replace("UID", uid) for each in wanted_names]
        await namespace.until(kind, str(names), lambda found: set(found) == set(names))  # noqa: B023
    if (story := STORIES.get(case.id)) is not None:
        await story(namespace)
    assert case.pods or case.objects or story, "this case shows nothing"


async def change(namespace: Namespace, **spec: Any) -> None:
    """Change the job's spec."""
    await namespace.client.merge_patch(namespace.path("fleetjobs", "digits"), {"spec": spec})


async def is_resumed(namespace: Namespace) -> None:
    """Check that a suspended job has no pods, and that it has all of them after it is resumed."""
    await namespace.until_state("digits", "Suspended")
    assert await namespace.all("pods") == []
    await change(namespace, suspend=False)
    await namespace.until_running("digits", *SERVERS, *TRAINERS)


async def is_left_alone(namespace: Namespace) -> None:
    """Check that the operator ignores the job, while it runs another that was created later."""
    await namespace.create_job(manifest("other"))
    await namespace.until_state("other", "Running")
    assert "status" not in await namespace.get("fleetjobs", "digits")
    assert {each["metadata"]["labels"]["fleetjob.dev/job-name"] for each in await namespace.all("pods")} == {
        "other"
    }


async def is_deleted(namespace: Namespace) -> None:
    """Check that the job and all of its objects are deleted after its end."""
    await namespace.until_running("digits", *SERVERS, *TRAINERS)
    await namespace.end(*TRAINERS)
    await namespace.until("fleetjobs", "no job", lambda found: not found)
    await namespace.until_pods("digits", "no pod", lambda pods: not pods)
    await namespace.until("services", "no service", lambda found: not found)


async def survives_a_node(namespace: Namespace) -> None:
    """Check that a trainer is replaced after its node is lost."""
    await namespace.until_running("digits", *SERVERS, *TRAINERS)
    await namespace.until_state("digits", "Running")
    await namespace.annotate(TRAINERS[1], not_ready="NodeNotReady")
    await namespace.until_pods("digits", "the second attempt", runs_again(TRAINERS[1], "0.1"))
    job = await namespace.until_state("digits", "Running")
    assert (job["status"].get("failures", 0), job["status"]["lastFailure"]["reason"]) == (0, "NodeLost")


async def scale(namespace: Namespace, trainers: int) -> None:
    """Change the number of trainers, as an autoscaler does."""
    path = namespace.path("fleetjobs", "digits", subresource="scale")
    await namespace.client.merge_patch(path, {"spec": {"replicas": trainers}})


async def is_joined(namespace: Namespace) -> None:
    """Add a trainer, and check that no other replica restarts."""
    before = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    await namespace.until_state("digits", "Running")
    await scale(namespace, 3)
    after = await namespace.until_running("digits", *SERVERS, *TRAINERS, "digits-trainer-2")
    assert uids(after) > uids(before)


async def is_scaled(namespace: Namespace) -> None:
    """Add a trainer, and check that all replicas restart."""
    await namespace.until_running("digits", *TRAINERS)
    await namespace.until_state("digits", "Running")
    await scale(namespace, 3)
    await namespace.until_pods(
        "digits",
        "three trainers of the second life",
        lambda pods: (
            len(pods) == 3 and all(is_running(pod) and attempt(pod) == "1.0" for pod in pods.values())
        ),
    )


async def has_a_port_for_each(namespace: Namespace) -> None:
    """Check that no two replicas share a port."""
    pods = await namespace.until_pods("digits", "all pods", lambda pods: len(pods) == 4)
    containers = [each for pod in pods.values() for each in pod["spec"]["containers"]]
    ports = [port["hostPort"] for each in containers for port in each["ports"]]
    assert len(ports) == len(set(ports)) == 6


async def ends_with_its_main_containers(namespace: Namespace) -> None:
    """End the trainers' main containers while their other containers continue."""
    pods = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    for name in TRAINERS:
        states = {"proxy": {"running": {}}, "fleet": {"terminated": {"exitCode": 0, "reason": "Completed"}}}
        statuses = [
            {**each, "state": states[each["name"]]} for each in pods[name]["status"]["containerStatuses"]
        ]
        path = namespace.path("pods", name, subresource="status")
        await namespace.client.merge_patch(path, {"status": {"containerStatuses": statuses}})
    job = await namespace.until_state("digits", "Succeeded")
    assert told_of(job, "Complete")["reason"] == "TrainersCompleted"


STORIES: dict[str, Callable[[Namespace], Awaitable[None]]] = {
    "a-suspended-job-has-no-pods-until-it-is-resumed": is_resumed,
    "a-job-of-another-controller-is-left-alone": is_left_alone,
    "a-finished-job-is-deleted-when-its-time-is-over": is_deleted,
    "a-pod-on-a-node-that-is-lost-is-replaced-and-nobody-has-failed": survives_a_node,
    "a-collective-job-is-scaled-and-starts-anew": is_scaled,
    "a-trainer-joins-servers-that-wait-for-nobody": is_joined,
    "replicas-on-the-network-of-their-node-have-ports-of-their-own": has_a_port_for_each,
    "a-sidecar-that-goes-on-does-not-hold-the-end-up": ends_with_its_main_containers,
}
"""What is to be seen of a case as time goes by, by its id."""
