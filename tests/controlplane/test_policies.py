"""Policies that need a cluster: scheduling, deletion, suspension, silent nodes."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.digits_job import SERVERS, TRAINERS, run
from tests.support.jobs import collective_manifest, manifest
from tests.support.kube import ApiException, condition, runs_again, told_of, uids
from tests.support.pods import env_of, main_of

if TYPE_CHECKING:
    from tests.support.kube import Manifest, Namespace


async def patch(namespace: Namespace, **spec: Any) -> Manifest:
    """Change the job's spec."""
    return await namespace.client.merge_patch(namespace.path("fleetjobs", "digits"), {"spec": spec})


async def test_a_job_that_finds_no_node_in_time_fails_with_the_schedulers_sentence(namespace: Namespace):
    await namespace.create_job(
        manifest(scheduling={"nodeSelector": {"gpu": "h100"}}, runPolicy={"pendingDeadlineSeconds": 2})
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
    await namespace.create_job(manifest("other", managedBy="kueue.x-k8s.io/multikueue"))
    await run(namespace)  # by then the operator has seen the first one as well
    other = await namespace.get("fleetjobs", "other")
    assert "status" not in other
    assert "other" not in {each["metadata"]["name"] for each in await namespace.all("services")}
    for change in (None, "fleetjob.dev/fleet-operator"):
        with pytest.raises(ApiException, match=r"no change of spec\.managedBy"):
            await namespace.client.merge_patch(
                namespace.path("fleetjobs", "other"), {"spec": {"managedBy": change}}
            )


async def test_a_suspended_job_has_no_pods_and_runs_again_when_it_is_resumed(namespace: Namespace):
    await run(namespace)
    await patch(namespace, suspend=True)
    await namespace.until_state("digits", "Suspended")
    await namespace.until_pods("digits", "no pod", lambda pods: not pods)
    await patch(namespace, suspend=False)
    await namespace.until_running("digits", *SERVERS, *TRAINERS)
    job = await namespace.until_state("digits", "Running")
    assert condition(job, "Suspended") == "False"
    assert (job["status"].get("failures", 0), job["status"].get("restarts", 0)) == (0, 0)
    # An event that is told twice is one event, and its place is that of its last time.
    reasons = {reason for _, reason, _ in await namespace.events("digits")}
    assert reasons == {"Started", "Suspended", "Resumed"}


async def test_a_pod_on_a_silent_node_is_told_and_replaced_without_being_counted(namespace: Namespace):
    taint = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    await run(namespace, scheduling={"tolerations": [{**taint, "tolerationSeconds": 2}]})
    await namespace.annotate("digits-trainer-1", not_ready="NodeNotReady")
    job = await namespace.until_job(
        "digits", "the silent node", lambda job: told_of(job, "Running")["reason"] == "NodeNotReady"
    )
    assert "digits-trainer-1 is on node kwok-" in told_of(job, "Running")["message"]
    assert job["status"]["state"] == "Running"
    await namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-1", "0.1"))
    job = await namespace.until_state("digits", "Running")
    assert job["status"].get("failures", 0) == 0
    assert job["status"]["lastFailure"]["reason"] == "NodeLost"


async def test_a_pod_of_a_lost_node_is_replaced_long_before_its_grace_period_ends(namespace: Namespace):
    taint = {"key": "node.kubernetes.io/unreachable", "operator": "Exists", "effect": "NoExecute"}
    document = manifest(scheduling={"tolerations": [{**taint, "tolerationSeconds": 2}]})
    document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 3600
    await namespace.create_job(document)
    pods = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    await namespace.annotate("digits-trainer-1", stuck="yes")  # no kubelet will confirm its end
    since = (datetime.now(UTC) - timedelta(seconds=50)).strftime("%Y-%m-%dT%H:%M:%SZ")
    silent = {"type": "Ready", "status": "False", "reason": "NodeNotReady", "lastTransitionTime": since}
    path = namespace.path("pods", "digits-trainer-1", subresource="status")
    await namespace.client.merge_patch(path, {"status": {"conditions": [silent]}})
    uid = pods["digits-trainer-1"]["metadata"]["uid"]
    going = await namespace.until_pods(
        "digits", "its deletion", lambda found: "deletionTimestamp" in found["digits-trainer-1"]["metadata"]
    )
    assert going["digits-trainer-1"]["metadata"]["uid"] == uid
    assert going["digits-trainer-1"]["metadata"]["deletionGracePeriodSeconds"] == 3600
    await namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-1", "0.1"))
    job = await namespace.until_state("digits", "Running")
    assert job["status"].get("failures", 0) == 0


async def test_an_eviction_is_no_failure(namespace: Namespace):
    await run(namespace, runPolicy={"backoffLimit": 0})
    eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "digits-trainer-1"}}
    await namespace.client.create(
        namespace.path("pods", "digits-trainer-1", subresource="eviction"), eviction
    )
    await namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-1", "0.1"))
    job = await namespace.until_state("digits", "Running")
    assert (job["status"].get("failures", 0), job["status"]["restarts"]) == (0, 1)


async def test_an_eviction_for_the_pods_own_limit_is_a_failure_and_a_stop_by_kueue_is_none(
    namespace: Namespace,
):
    await run(namespace, failurePolicy={"action": "RestartReplica"})
    full = "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi."
    stopped = {"type": "TerminationTarget", "status": "True", "reason": "StoppedByKueue"}
    ends: tuple[tuple[str, Manifest, int], ...] = (
        ("0.1", {"reason": "Evicted", "message": full}, 1),
        ("0.2", {"conditions": [stopped]}, 1),
    )
    for attempt, end, failures in ends:
        path = namespace.path("pods", "digits-trainer-1", subresource="status")
        await namespace.client.merge_patch(path, {"status": {"phase": "Failed", **end}})
        await namespace.until_pods("digits", f"attempt {attempt}", runs_again("digits-trainer-1", attempt))
        job = await namespace.until_state("digits", "Running")
        assert job["status"].get("failures", 0) == failures
    assert job["status"]["lastFailure"]["message"] == "digits-trainer-1 was disrupted (StoppedByKueue)"


BOUNDS = {"minReplicas": 1, "maxReplicas": 3}


async def scale(namespace: Namespace, trainers: int) -> Manifest:
    """Change the number of trainers through the scale subresource, as an autoscaler does."""
    path = namespace.path("fleetjobs", "digits", subresource="scale")
    return await namespace.client.merge_patch(path, {"spec": {"replicas": trainers}})


async def test_a_collective_job_starts_anew_with_another_number_of_trainers(namespace: Namespace):
    await namespace.create_job(collective_manifest(trainer={"replicas": 2, **BOUNDS}))
    await namespace.until_running("digits", *TRAINERS)
    scaled = await scale(namespace, 3)
    assert "fleetjob.dev/role=trainer" in scaled["status"]["selector"]
    three = (*TRAINERS, "digits-trainer-2")
    pods = await namespace.until_pods(
        "digits",
        "three pods of the second life",
        lambda pods: set(pods) == set(three) and all(runs_again(each, "1.0")(pods) for each in three),
    )
    for pod in pods.values():
        env = env_of(main_of(pod))
        assert (env["WORLD_SIZE"], env["FLEET_RESTARTS"]) == ("3", "1")


async def test_trainers_join_an_elastic_job_and_leave_it_while_the_others_run(namespace: Namespace):
    pods = await run(namespace, syncMode="Async", trainer={"replicas": 2, **BOUNDS})
    scaled = await scale(namespace, 3)
    assert scaled["status"]["replicas"] == 2
    grown = await namespace.until_running("digits", *SERVERS, *TRAINERS, "digits-trainer-2")
    for name, pod in grown.items():
        env = {each["name"]: each.get("value") for each in pod["spec"]["containers"][0]["env"]}
        told = "2" if name in pods else "3"
        assert (env["PADDLE_TRAINERS"], env["FLEET_MAX_TRAINERS"], env["FLEET_RESTARTS"]) == (told, "3", "0")
    await namespace.until_job(
        "digits", "three trainers", lambda job: job["status"].get("columns", {}).get("trainers") == "3/3"
    )
    await scale(namespace, 1)
    left = await namespace.until_running("digits", *SERVERS, TRAINERS[0])
    assert uids(left) <= uids(pods)
    await namespace.end(TRAINERS[0])
    status = (await namespace.until_state("digits", "Succeeded"))["status"]
    assert (status.get("failures", 0), status.get("restarts", 0), status.get("jobRestarts", 0)) == (0, 0, 0)
    said = [message for _, reason, message in await namespace.events("digits") if reason == "Scaled"]
    assert said == [
        "trainer.replicas has changed from 2 to 3: trainer 2 joins while the others continue",
        "trainer.replicas has changed from 3 to 1: trainers 1-2 leave while the others continue",
    ]


KUEUE = {"syncMode": "Async", "podGroupPolicy": {"kueue": {"queueName": "default"}}}


@pytest.mark.parametrize(
    ("spec", "wanted", "message"),
    [
        pytest.param({"trainer": {"replicas": 2}}, 3, "names no trainer.minReplicas", id="without-bounds"),
        pytest.param({"trainer": {"replicas": 2, **BOUNDS}}, 4, "to trainer.maxReplicas", id="out-of-bounds"),
        pytest.param(
            {"trainer": {"replicas": 2, **BOUNDS}, "syncMode": "Async"},
            4,
            "to trainer.maxReplicas",
            id="out-of-the-bounds-of-an-elastic-job",
        ),
        pytest.param(
            {"trainer": {"replicas": 2, **BOUNDS}, "syncMode": "Sync"},
            3,
            "with syncMode Sync runs, because each step waits for every trainer: set spec.suspend first",
            id="while-servers-run-in-Sync",
        ),
        pytest.param(
            {"trainer": {"replicas": 2, **BOUNDS}, "syncMode": "Geo"},
            3,
            "with syncMode Geo runs, because what trainers send is divided by their number",
            id="while-servers-run-in-Geo",
        ),
        pytest.param(
            {"trainer": {"replicas": 2, **BOUNDS}, **KUEUE},
            3,
            "that Kueue admits, because it admits a group of a fixed size",
            id="while-Kueue-holds-a-group",
        ),
    ],
)
async def test_trainers_that_cannot_change_say_why(
    namespace: Namespace, spec: Manifest, wanted: int, message: str
):
    await namespace.create_job(manifest(**spec))
    with pytest.raises(ApiException) as refused:
        await scale(namespace, wanted)
    assert message in str(refused.value)


@pytest.mark.parametrize("mode", ["Sync", "Async"])
async def test_a_job_with_servers_may_be_resized_while_it_is_suspended(namespace: Namespace, mode: str):
    trainer = {"replicas": 2, **BOUNDS}
    await namespace.create_job(manifest(syncMode=mode, trainer=trainer, suspend=True))
    await scale(namespace, 3)
    await patch(namespace, suspend=False)
    pods = await namespace.until_running("digits", *SERVERS, *TRAINERS, "digits-trainer-2")
    for pod in pods.values():
        assert env_of(main_of(pod))["PADDLE_TRAINERS"] == "3"


async def test_a_job_with_a_sidecar_that_goes_on_finishes_with_its_main_container(namespace: Namespace):
    containers = [
        {"name": "istio-proxy", "image": "example.com/proxy:1"},
        {"name": "fleet", "image": "example.com/trainer:1"},
    ]
    native = {"name": "agent", "image": "example.com/agent:1", "restartPolicy": "Always"}
    template = {"spec": {"containers": containers, "initContainers": [native]}}
    pods = await run(namespace, template=template, runPolicy={"cleanPodPolicy": "All"})
    for name in TRAINERS:
        ended = {"terminated": {"exitCode": 0, "reason": "Completed"}}
        states = {"istio-proxy": {"running": {}}, "fleet": ended}
        statuses = [
            {**each, "state": states[each["name"]]} for each in pods[name]["status"]["containerStatuses"]
        ]
        await namespace.client.merge_patch(
            namespace.path("pods", name, subresource="status"), {"status": {"containerStatuses": statuses}}
        )
    job = await namespace.until_state("digits", "Succeeded")
    assert job["status"]["columns"]["trainers"] == "2/2"


async def test_replicas_on_one_node_and_its_network_do_not_clash(namespace: Namespace):
    field = {"key": "metadata.name", "operator": "In", "values": ["kwok-0"]}
    terms = {"nodeSelectorTerms": [{"matchFields": [field]}]}
    document = manifest(network={"hostNetwork": True, "portRange": {"first": 21000, "last": 21099}})
    document["spec"]["template"]["spec"]["affinity"] = {
        "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    }
    await namespace.create_job(document)
    pods = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    ports = [
        port["hostPort"]
        for pod in pods.values()
        for container in pod["spec"]["containers"]
        for port in container["ports"]
    ]
    assert {pod["spec"]["nodeName"] for pod in pods.values()} == {"kwok-0"}
    assert len(ports) == len(set(ports)) == 6


async def test_pods_have_what_the_job_says_of_gpus_priority_and_accounts(namespace: Namespace):
    priority: Manifest = {
        "apiVersion": "scheduling.k8s.io/v1",
        "kind": "PriorityClass",
        "metadata": {"name": f"training-{namespace.name}"},
        "value": 1000,
    }
    await namespace.client.create("/apis/scheduling.k8s.io/v1/priorityclasses", priority)
    await namespace.client.create(
        namespace.path("serviceaccounts"),
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "trainer"}},
    )
    document = manifest(
        scheduling={"priorityClassName": priority["metadata"]["name"]},
        trainer={
            "replicas": 2,
            "devices": {"count": 2, "resourceName": "example.com/gpu"},
            "sharedMemory": "1Gi",
        },
    )
    document["spec"]["template"]["spec"] |= {
        "serviceAccountName": "trainer",
        "imagePullSecrets": [{"name": "registry"}],
    }
    await namespace.create_job(document)
    await namespace.until_pods("digits", "the servers", lambda pods: len(pods) == 2)
    pods = await namespace.until_pods("digits", "all pods", lambda pods: len(pods) == 4)
    for pod in pods.values():
        spec = pod["spec"]
        assert spec["priority"] == 1000
        assert spec["serviceAccountName"] == "trainer"
        assert spec["automountServiceAccountToken"] is False
        assert spec["imagePullSecrets"] == [{"name": "registry"}]
    trainer = pods["digits-trainer-0"]["spec"]
    assert trainer["containers"][0]["resources"]["limits"] == {"example.com/gpu": "2"}
    assert {"medium": "Memory", "sizeLimit": "1Gi"} in [each.get("emptyDir") for each in trainer["volumes"]]
    job = await namespace.until_job(
        "digits", "why it waits", lambda job: "Unschedulable" in str(job.get("status", {}).get("conditions"))
    )
    assert "Insufficient example.com/gpu" in told_of(job, "Running")["message"]
