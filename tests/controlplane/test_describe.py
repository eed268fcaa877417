"""The output of ``kubectl describe`` for jobs that are stuck, fail or finish."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.support.digits_job import SERVERS, TRAINERS, annotated
from tests.support.jobs import manifest
from tests.support.kube import attempt

if TYPE_CHECKING:
    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Namespace


async def described(
    namespace: Namespace,
    control_plane: ControlPlane,
    state: str,
    reason: str,
    sentence: str,
    *,
    told: tuple[str, ...] = (),
) -> str:
    """Wait for a state, a reason and events; return the output of describe, which must show all of them."""
    await namespace.until_job(
        "digits",
        f"{state} because of {reason}",
        lambda job: (
            job.get("status", {}).get("state") == state
            and any(
                each["reason"] == reason and re.search(sentence, each["message"])
                for each in job["status"]["conditions"]
            )
        ),
    )
    await namespace.until_told("digits", *told)
    text = control_plane.admin.kubectl("describe", "fleetjob", "digits", "-n", namespace.name)
    assert re.search(rf"^  State: +{state}$", text, re.MULTILINE)
    assert re.search(rf"^    Message: +.*{sentence}", text, re.MULTILINE)
    assert re.search(rf"^    Reason: +{reason}$", text, re.MULTILINE)
    events = text.partition("\nEvents:")[2]
    assert all(each in events for each in told), events
    return text


async def test_a_pod_that_fits_no_node(namespace: Namespace, control_plane: ControlPlane):
    huge = manifest()
    huge["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": "1000"}}
    await namespace.create_job(huge)
    sentence = (
        "digits-pserver-0 is waiting, Unschedulable: 0/4 nodes are available: 4 Insufficient cpu.*; free or"
    )
    text = await described(namespace, control_plane, "Pending", "Unschedulable", sentence)
    assert "digits-pserver-0 (and 1 more) is not ready yet" in text  # and why there are no trainers


async def test_an_image_that_cannot_be_pulled(namespace: Namespace, control_plane: ControlPlane):
    await namespace.create_job(annotated(waiting="ImagePullBackOff", message="no such image traner:1"))
    sentence = (
        "digits-pserver-0 is waiting, ImagePullBackOff: no such image traner:1; correct the image's name"
    )
    await described(namespace, control_plane, "Pending", "ImagePullBackOff", sentence)


async def test_a_secret_that_is_not_there(namespace: Namespace, control_plane: ControlPlane):
    await namespace.create_job(
        annotated(waiting="CreateContainerConfigError", message='secret "s3" not found')
    )
    sentence = 'CreateContainerConfigError: secret "s3" not found; create the Secret'
    await described(namespace, control_plane, "Pending", "CreateContainerConfigError", sentence)


async def test_a_quota_that_is_used_up(namespace: Namespace, control_plane: ControlPlane):
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "few"},
        "spec": {"hard": {"pods": "1"}},
    }
    await namespace.client.create(namespace.path("resourcequotas"), quota)
    await namespace.until(
        "resourcequotas", "the quota in force", lambda found: "hard" in found["few"].get("status", {})
    )
    await namespace.create_job(manifest())
    sentence = "exceeded quota: few.*; the creation is retried: free resources"
    told = ("ActionRefused",)
    await described(namespace, control_plane, "Pending", "CreationRefused", sentence, told=told)


async def test_trainers_that_wait_for_their_servers(namespace: Namespace, control_plane: ControlPlane):
    await namespace.create_job(annotated(hold="yes"))
    sentence = "trainers are created once all parameter servers are ready: digits-pserver-0"
    await described(namespace, control_plane, "Pending", "WaitingForParameterServers", sentence)


async def test_a_job_that_restarts_and_then_fails(namespace: Namespace, control_plane: ControlPlane):
    # Each pod waits to be let go, so that the second try does not run before it is described.
    document = manifest(startupPolicy={"order": "AnyOrder"}, runPolicy={"backoffLimit": 1})
    await namespace.create_job(annotated(document, hold="yes"))
    pods = {*SERVERS, *TRAINERS}
    await namespace.until_pods("digits", "all pods", lambda there: set(there) == pods)
    for pod in pods:
        await namespace.annotate(pod, hold=None)
    await namespace.until_state("digits", "Running")
    await namespace.end("digits-trainer-1", exit_code=1, message="ValueError: loss is nan")
    sentence = "digits-trainer-1 failed with exit code 1: ValueError: loss is nan; the replica is restarted"
    await described(namespace, control_plane, "Restarting", "ReplicaRestarting", sentence)
    await namespace.until_pods(
        "digits",
        "the second attempt",
        lambda there: any(attempt(pod) == "0.1" for pod in there.values()),
    )
    await namespace.annotate("digits-trainer-1", hold=None)
    await namespace.until_state("digits", "Running")
    await namespace.end("digits-trainer-1", exit_code=137)
    sentence = "ended by SIGKILL .*backoffLimit is 1; correct what its log shows, or raise the limit"
    told = ("Started", "ReplicaFailed", "Failed")
    text = await described(namespace, control_plane, "Failed", "BackoffLimitExceeded", sentence, told=told)
    assert re.search(r"Last Failure:\n(    .*\n)*    Pod: +digits-trainer-1$", text, re.MULTILINE)
    waited = control_plane.admin.kubectl(
        "wait", "-n", namespace.name, "--for=condition=Failed", "fj/digits", "--timeout=10s"
    )
    assert "condition met" in waited


async def test_a_job_that_is_held_and_resumed_and_succeeds(namespace: Namespace, control_plane: ControlPlane):
    await namespace.create_job(manifest(suspend=True))
    sentence = "spec.suspend is true: no pod of this job runs until it is false"
    await described(namespace, control_plane, "Suspended", "Suspended", sentence)
    patch = {"spec": {"suspend": False}}
    await namespace.client.merge_patch(namespace.path("fleetjobs", "digits"), patch)
    await described(namespace, control_plane, "Running", "ReplicasRunning", "all 4 replicas run")
    await namespace.end(*TRAINERS)
    sentence = "all 2 trainers have completed"
    told = ("Suspended", "Resumed", "Started", "Succeeded")
    await described(namespace, control_plane, "Succeeded", "TrainersCompleted", sentence, told=told)
    waited = control_plane.admin.kubectl(
        "wait", "-n", namespace.name, "--for=condition=Complete", "fj/digits", "--timeout=10s"
    )
    assert "condition met" in waited


async def test_conditions_are_what_kubernetes_understands_by_them(namespace: Namespace):
    await namespace.create_job(manifest())
    before = await namespace.until_state("digits", "Running")
    await namespace.end(*TRAINERS)
    after = await namespace.until_state("digits", "Succeeded")
    for job in (before, after):
        for each in job["status"]["conditions"]:
            assert each["status"] in ("True", "False", "Unknown")
            assert re.fullmatch("[A-Z][A-Za-z]+", each["reason"])
            assert each["message"]
            assert re.fullmatch(r"[0-9-]+T[0-9:]+Z", each["lastTransitionTime"])
            assert each["observedGeneration"] == job["metadata"]["generation"]
    first, last = ({each["type"]: each for each in job["status"]["conditions"]} for job in (before, after))
    assert first["PodsCreated"] == last["PodsCreated"]  # what has not changed keeps its time
    assert (first["Running"]["status"], last["Running"]["status"]) == ("True", "False")
