"""The life of a FleetJob on a real API server, from its creation to its end and its deletion."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.digits_job import SERVERS, TRAINERS, annotated, run
from tests.support.jobs import manifest
from tests.support.kube import WAIT_SECONDS, attempt, condition, is_running, runs_again, told_of, uids
from tests.support.pods import env_of, main_of

if TYPE_CHECKING:
    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Namespace
    from tests.support.operator_process import OperatorProcess

CONTRACT = {
    path.stem: yaml.safe_load(path.read_text())
    for path in (Path(__file__).parents[2] / "contract" / "env").glob("*.yaml")
}


async def test_a_job_runs_succeeds_and_is_cleaned_up(namespace: Namespace, control_plane: ControlPlane):
    pods = await run(namespace)
    service = await namespace.get("services", "digits")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True
    job = await namespace.get("fleetjobs", "digits")
    for owned in (service, *pods.values()):
        (owner,) = owned["metadata"]["ownerReferences"]
        assert (owner["uid"], owner["controller"]) == (job["metadata"]["uid"], True)
    assert (job["status"]["columns"]["pservers"], job["status"]["columns"]["trainers"]) == ("2/2", "2/2")

    await namespace.end(*TRAINERS, message='{"loss": 0.1}')
    job = await namespace.until_state("digits", "Succeeded")
    assert condition(job, "Complete") == "True"
    assert condition(job, "Failed") != "True"
    assert job["status"]["observedGeneration"] == job["metadata"]["generation"]
    assert job["status"]["completionTime"]
    control_plane.admin.kubectl(
        "wait", "-n", namespace.name, "--for=condition=Complete", "fj/digits", "--timeout=10s"
    )

    # The servers exit by themselves; what has ended stays, to be looked at.
    await namespace.end(*SERVERS)
    await namespace.until_pods(
        "digits",
        "all pods ended",
        lambda found: all(p["status"]["phase"] == "Succeeded" for p in found.values()),
    )
    assert {*(await namespace.until_pods("digits", "the pods", bool))} == {*SERVERS, *TRAINERS}
    told = [(kind, reason) for kind, reason, _ in await namespace.until_told("digits", "Succeeded")]
    assert all(kind == "Normal" for kind, _ in told)
    assert told[-1][1] == "Succeeded"


async def test_trainers_wait_for_the_servers_to_be_ready(namespace: Namespace):
    await namespace.create_job(annotated(hold="yes"))
    await namespace.until_pods("digits", "the servers", lambda pods: set(pods) == set(SERVERS))
    job = await namespace.until_job(
        "digits", "a reason", lambda job: condition(job, "PodsCreated") == "False"
    )
    assert told_of(job, "PodsCreated")["reason"] == "WaitingForParameterServers"
    await namespace.annotate("digits-pserver-0", hold=None)
    # Once the status counts it, the operator has decided with one server ready.
    await namespace.until_job(
        "digits", "one server ready", lambda job: job["status"].get("columns", {}).get("pservers") == "1/2"
    )
    assert set(await namespace.until_pods("digits", "the pods", bool)) == set(SERVERS)
    await namespace.annotate("digits-pserver-1", hold=None)
    await namespace.until_pods("digits", "the trainers", lambda pods: set(pods) == {*SERVERS, *TRAINERS})


async def test_a_failed_trainer_is_started_again_alone(namespace: Namespace):
    before = await run(namespace)
    await namespace.end("digits-trainer-1", exit_code=1, message="loss is nan")
    job = await namespace.until_state("digits", "Restarting")
    failure = job["status"]["lastFailure"]
    assert (failure["pod"], failure["exitCode"]) == ("digits-trainer-1", 1)
    assert failure["terminationMessage"] == "loss is nan"
    await namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-1", "0.1"))
    job = await namespace.until_state("digits", "Running")
    assert job["status"]["restarts"] == 1
    after = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    for name in (*SERVERS, "digits-trainer-0"):
        assert after[name]["metadata"]["uid"] == before[name]["metadata"]["uid"]
    warnings = [each for each in await namespace.events("digits") if each[0] == "Warning"]
    assert len(warnings) == 1
    assert "digits-trainer-1" in warnings[0][2]
    assert "loss is nan" in warnings[0][2]


async def test_a_restart_of_the_job_replaces_every_pod(namespace: Namespace):
    before = await run(namespace, failurePolicy={"action": "RestartJob"})
    await namespace.end("digits-trainer-0", exit_code=137)
    await namespace.until_pods(
        "digits",
        "four pods of the second life",
        lambda pods: (
            set(pods) == {*SERVERS, *TRAINERS}
            and all(is_running(pod) and attempt(pod) == "1.0" for pod in pods.values())
        ),
    )
    after = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    assert not uids(before) & uids(after)
    assert (await namespace.until_state("digits", "Running"))["status"]["jobRestarts"] == 1


async def test_a_job_fails_when_its_failures_exceed_the_limit(namespace: Namespace):
    await run(namespace, runPolicy={"backoffLimit": 1})
    await namespace.end("digits-trainer-0", exit_code=1)
    await namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-0", "0.1"))
    await namespace.end("digits-trainer-0", exit_code=1, message="again")
    job = await namespace.until_state("digits", "Failed")
    failed = told_of(job, "Failed")
    assert (failed["status"], failed["reason"]) == ("True", "BackoffLimitExceeded")
    assert condition(job, "Complete") != "True"
    assert job["status"]["lastFailure"]["terminationMessage"] == "again"
    # cleanPodPolicy Running: what still runs goes, what has ended stays.
    await namespace.until_pods(
        "digits", "only the failed pod", lambda pods: set(pods) == {"digits-trainer-0"}
    )
    assert ("Warning", "Failed") in [each[:2] for each in await namespace.until_told("digits", "Failed")]


async def test_a_script_that_cannot_run_is_tried_once_more_and_fails_the_job(namespace: Namespace):
    said = "Traceback (most recent call last):\nModuleNotFoundError: No module named 'transformrs'"
    await run(namespace)
    await namespace.end("digits-trainer-0", exit_code=1, message=said)
    await namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-0", "0.1"))
    await namespace.end("digits-trainer-0", exit_code=1, message=said)
    job = await namespace.until_state("digits", "Failed")
    assert told_of(job, "Failed")["reason"] == "PermanentError"
    assert "No module named 'transformrs'; a retry would fail again" in told_of(job, "Failed")["message"]
    assert job["status"]["failures"] == 2


async def test_fail_job_allows_no_restart(namespace: Namespace):
    await run(namespace, failurePolicy={"action": "FailJob"}, runPolicy={"cleanPodPolicy": "None"})
    await namespace.end("digits-pserver-1", exit_code=1)
    job = await namespace.until_state("digits", "Failed")
    assert job["status"]["restarts"] == 0
    assert job["status"]["lastFailure"]["pod"] == "digits-pserver-1"
    pods = await namespace.until_pods("digits", "the pods", bool)
    assert set(pods) == {*SERVERS, *TRAINERS}


async def test_a_deleted_pod_comes_back_and_counts_as_no_failure(namespace: Namespace):
    await run(namespace)
    await namespace.delete("pods", "digits-trainer-0")
    pods = await namespace.until_pods("digits", "the second attempt", runs_again("digits-trainer-0", "0.1"))
    job = await namespace.until_state("digits", "Running")
    assert job["status"].get("failures", 0) == 0
    told = {name for name, pod in pods.items() if "FLEET_LIFE" in env_of(main_of(pod))}
    assert told == {*SERVERS, "digits-trainer-0"}, "it may have completed before, which servers will say"


async def test_a_deleted_service_comes_back(namespace: Namespace):
    await run(namespace)
    uid = (await namespace.get("services", "digits"))["metadata"]["uid"]
    await namespace.delete("services", "digits")
    await namespace.until(
        "services",
        "a new service",
        lambda found: "digits" in found and found["digits"]["metadata"]["uid"] != uid,
    )


async def test_a_job_that_is_deleted_in_the_foreground_goes_after_all_of_its_pods(namespace: Namespace):
    """As `kubectl delete --cascade=foreground` asks for it, and returns when the job is gone."""
    await run(namespace)
    pod, kept = namespace.path("pods", "digits-trainer-1"), ["fleet.test/kept"]
    await namespace.client.merge_patch(pod, {"metadata": {"finalizers": kept}})
    path = namespace.path("fleetjobs", "digits")
    await namespace.client.delete(path, {"propagationPolicy": "Foreground"})
    await namespace.until_pods("digits", "the other pods gone", lambda found: {*found} == {TRAINERS[1]})
    await namespace.until("services", "the Service gone", lambda found: "digits" not in found)
    job = await namespace.get("fleetjobs", "digits")
    assert job["metadata"]["finalizers"] == ["foregroundDeletion"]
    await namespace.client.merge_patch(pod, {"metadata": {"finalizers": None}})
    await namespace.until("fleetjobs", "the job gone", lambda found: not found)
    assert not await namespace.all("pods")


async def test_a_deleted_job_leaves_nothing_behind(namespace: Namespace):
    await run(namespace)
    await namespace.delete("fleetjobs", "digits")
    await namespace.until_pods("digits", "no pod", lambda pods: not pods)
    await namespace.until("services", "no service", lambda found: "digits" not in found)
    # And the name is free again at once: what is left of the first job is not taken for the second's.
    await run(namespace)


async def test_a_job_created_again_while_its_old_pods_end_waits_for_their_names(namespace: Namespace):
    old = await run(namespace)
    await namespace.annotate("digits-trainer-0", stuck="yes")
    await namespace.delete("fleetjobs", "digits")
    await namespace.until_pods("digits", "one stuck pod", lambda pods: set(pods) == {"digits-trainer-0"})
    told_before = await namespace.until_told("digits", "Started")
    await namespace.create_job(manifest())
    job = await namespace.until_job(
        "digits", "a reason", lambda job: condition(job, "PodsCreated") == "False"
    )
    assert told_of(job, "PodsCreated")["reason"] == "PredecessorTerminating"
    assert await namespace.events("digits") == told_before  # nothing to be alarmed about
    await namespace.annotate("digits-trainer-0", stuck=None)
    new = await namespace.until_running("digits", *SERVERS, *TRAINERS)
    assert new["digits-trainer-0"]["metadata"]["uid"] != old["digits-trainer-0"]["metadata"]["uid"]


async def test_an_object_of_another_owner_is_never_adopted(namespace: Namespace):
    foreign = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "digits-trainer-0"},
        "spec": {"containers": [{"name": "c", "image": "i"}]},
    }
    await namespace.client.create(namespace.path("pods"), foreign)
    await namespace.create_job(manifest())
    job = await namespace.until_job(
        "digits",
        "the name is taken",
        lambda job: any(
            each["reason"] == "NameTaken" for each in job.get("status", {}).get("conditions", ())
        ),
    )
    (told,) = [each for each in job["status"]["conditions"] if each["reason"] == "NameTaken"][:1]
    assert "Pod/digits-trainer-0" in told["message"]
    found = await namespace.get("pods", "digits-trainer-0")
    assert "ownerReferences" not in found["metadata"]
    assert is_running(found) or found["status"]["phase"] == "Pending"
    await namespace.delete("pods", "digits-trainer-0")
    await namespace.until_running("digits", *SERVERS, *TRAINERS)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        pytest.param("imagePullPolicy", "Sometimes", "Sometimes", id="a-value"),
        pytest.param("imagePullPolcy", "Always", "unknown field", id="a-misspelt-field"),
    ],
)
async def test_a_pod_that_can_never_be_created_fails_the_job_with_the_servers_sentence(
    namespace: Namespace, field: str, value: str, told: str
):
    bad = manifest()
    bad["spec"]["template"]["spec"]["containers"][0][field] = value
    await namespace.create_job(bad)
    job = await namespace.until_state("digits", "Failed")
    failed = told_of(job, "Failed")
    assert failed["reason"] == "PodRejected"
    assert field in failed["message"]
    assert told in failed["message"]


async def test_a_quota_that_forbids_a_pod_is_told_and_waited_for(namespace: Namespace):
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
    await namespace.until(
        "events",
        "a warning about the quota",
        lambda found: any(
            each["reason"] == "ActionRefused" and "exceeded quota" in each["message"]
            for each in found.values()
        ),
    )
    job = await namespace.until_job(
        "digits",
        "the quota as the reason",
        lambda job: "status" in job and told_of(job, "PodsCreated")["reason"] == "CreationRefused",
    )
    assert "exceeded quota" in told_of(job, "PodsCreated")["message"]
    await namespace.delete("resourcequotas", "few")
    await namespace.until_running("digits", *SERVERS, *TRAINERS)


@pytest.mark.parametrize("contract", sorted(CONTRACT))
async def test_the_environment_of_the_pods_is_the_contracts(namespace: Namespace, contract: str):
    written = CONTRACT[contract]
    name = written["job"]["metadata"]["name"]
    created = await namespace.create_job({**written["job"], "metadata": {"name": name}})
    replicas = {f"{name}-{each['role']}-{each['index']}": each["env"] for each in written["replicas"]}
    pods = await namespace.until_running(name, *replicas)
    for pod, expected in replicas.items():
        env = env_of(main_of(pods[pod]))
        key = env["FLEET_JOB_KEY"]
        assert key is not None
        assert len(bytes.fromhex(key)) == 32
        assert {env_of(main_of(each))["FLEET_JOB_KEY"] for each in pods.values()} == {key}
        for variable, value in (expected | {"FLEET_JOB_KEY": key}).items():
            here = value.replace(".default.svc", f".{namespace.name}.svc")
            if variable == "FLEET_JOB_UID":
                here = created["metadata"]["uid"]
            assert env[variable] == here, variable
        assert pods[pod]["spec"]["hostname"] == pod
        assert pods[pod]["spec"]["subdomain"] == name


async def test_nothing_is_written_on_the_users_object_but_its_status(namespace: Namespace):
    await run(namespace)
    await namespace.end(*TRAINERS)
    job = await namespace.until_state("digits", "Succeeded")
    assert "annotations" not in job["metadata"]
    assert "finalizers" not in job["metadata"]
    assert job["metadata"]["generation"] == 1
    managers = {(each["manager"], each.get("subresource")) for each in job["metadata"]["managedFields"]}
    assert {subresource for _, subresource in managers} == {None, "status"}


async def test_many_jobs_at_once(namespace: Namespace):
    names = [f"job-{index}" for index in range(20)]
    await asyncio.gather(*(namespace.create_job(manifest(name, pservers=1, trainers=1)) for name in names))
    await namespace.until(
        "fleetjobs",
        "all jobs running",
        lambda jobs: all(job.get("status", {}).get("state") == "Running" for job in jobs.values()),
    )
    for name in names:
        await namespace.end(f"{name}-trainer-0")
    await namespace.until(
        "fleetjobs",
        "all jobs succeeded",
        lambda jobs: all(job["status"]["state"] == "Succeeded" for job in jobs.values()),
    )


async def test_the_metrics_tell_of_the_jobs(namespace: Namespace, operator: OperatorProcess):
    await run(namespace)
    await namespace.end(*TRAINERS)
    await namespace.until_state("digits", "Succeeded")
    labels = f'{{job_namespace="{namespace.name}",mode="ParameterServer"}}'
    text = ""
    async with asyncio.timeout(WAIT_SECONDS):  # the answer to a status comes after what a watch tells of it
        while f"fleet_operator_jobs_successful_total{labels} 1.0" not in text:
            found = await asyncio.to_thread(operator.get, "/metrics")
            text = found or ""
    assert "fleet_operator_leader 1.0" in text
    assert f"fleet_operator_jobs_created_total{labels} 1.0" in text
    assert f'fleet_operator_jobs{{job_namespace="{namespace.name}",state="Succeeded"}} 1.0' in text
    assert 'fleet_operator_api_request_duration_seconds_count{code="201",resource="pods",verb="POST"}' in text
