"""The operator beside a real Kueue; `make test-kueue` builds it, and without it these tests are skipped."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pytest

from fleet_operator.settings import FEATURES
from tests.support.controlplane import ControlPlane
from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.jobs import manifest
from tests.support.kube import attempt, client_for, fresh_namespace, is_running, told_of, uids
from tests.support.kueue import API, Kueue, definitions
from tests.support.operator_process import CRD, NAMESPACE, POD_GROUPS, OperatorProcess, install, refusals
from tools import assets

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from tests.support.kube import Manifest, Namespace

pytestmark = [pytest.mark.programs, pytest.mark.on_request, pytest.mark.timeout(300)]

ALL = (*SERVERS, *TRAINERS)
LACKING = "insufficient unused quota for cpu in flavor"
RACK = "example.com/rack"


@contextmanager
def kueue_and_operator(folder: Path, **configuration: Any) -> Iterator[tuple[Kueue, OperatorProcess]]:
    """Run Kueue and the operator on a control plane of their own: Kueue's webhooks see every pod."""
    try:
        program, components = assets.find(["kueue"])["kueue"], definitions()
    except assets.MissingError as missing:
        pytest.skip(str(missing))
    plane = ControlPlane(folder / "plane", definitions=[CRD, POD_GROUPS])
    plane.start()
    kueue = Kueue(plane, folder, program, components, **configuration)
    try:
        kueue.start()
        token = install(plane, FEATURES)
        kubeconfig = plane.admin.write_kubeconfig(folder / "operator.kubeconfig", token, NAMESPACE)
        operator = OperatorProcess(folder, kubeconfig, FLEET_OPERATOR_FEATURES=",".join(FEATURES))
        operator.start()
        yield kueue, operator
        operator.stop()
        log = operator.log.read_text()
        assert not refusals(log)
        assert "Traceback" not in log
    finally:
        plane.stop()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kueue, OperatorProcess]]:
    with kueue_and_operator(tmp_path_factory.mktemp("kueue")) as both:
        yield both


@pytest.fixture
def kueue(both: tuple[Kueue, OperatorProcess]) -> Kueue:
    return both[0]


@pytest.fixture
def operator(both: tuple[Kueue, OperatorProcess]) -> OperatorProcess:
    return both[1]


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[Kueue]:
    """Kueue that gives the pods of a group ten seconds to be ready."""
    with kueue_and_operator(tmp_path, waitForPodsReady={"timeout": "10s"}) as (kueue, _):
        yield kueue


@pytest.fixture
async def namespace(kueue: Kueue) -> AsyncIterator[Namespace]:
    """A new namespace of Kueue's control plane."""
    async with client_for(kueue.plane.admin.kubeconfig) as client, fresh_namespace(client) as fresh:
        yield fresh


def asking(cpu: str, *, name: str = "digits", **spec: Any) -> Manifest:
    """Return a job in the queue research whose pods request some CPU each."""
    job = manifest(**{"podGroupPolicy": {"kueue": {"queueName": "research"}}, **spec})
    job["metadata"]["name"] = name
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": cpu}}
    return job


def names(job: str) -> tuple[str, ...]:
    """Return the pods of a job with two servers and two trainers."""
    return tuple(pod.replace("digits", job) for pod in ALL)


def why_waiting(job: Manifest) -> str:
    """Return why a job does not run, by its condition Running."""
    conditions = job.get("status", {}).get("conditions", ())
    return next((each["message"] for each in conditions if each["type"] == "Running"), "")


async def workloads(namespace: Namespace) -> dict[str, Manifest]:
    """Return Kueue's Workloads in a namespace by name."""
    found = await namespace.client.get(f"/apis/{API}/namespaces/{namespace.name}/workloads")
    return {each["metadata"]["name"]: each for each in found["items"]}


async def test_a_job_above_the_quota_waits_until_there_is_room_and_its_deadlines_with_it(
    kueue: Kueue, namespace: Namespace
):
    kueue.make_queue(namespace.name, "4")
    await namespace.create_job(asking("1"))
    await namespace.until_running("digits", *ALL)
    limits = {"pendingDeadlineSeconds": 4, "activeDeadlineSeconds": 30}
    await namespace.create_job(asking("1", name="second", runPolicy=limits))
    await namespace.until_job("second", LACKING, lambda job: LACKING in why_waiting(job))
    await asyncio.sleep(limits["pendingDeadlineSeconds"] + 2)  # the time that must have no effect
    await namespace.end(*TRAINERS)
    await namespace.until_state("digits", "Succeeded")
    await namespace.end(*SERVERS)
    await namespace.until_running("second", *names("second"))
    job = await namespace.until_state("second", "Running")
    assert job["status"]["jobRestarts"] == 0


async def test_the_flavor_that_kueue_chooses_reaches_the_pods_of_a_job_with_kueues_label(
    kueue: Kueue, namespace: Namespace
):
    labels = {"kubernetes.io/os": "linux"}
    kueue.make_queue(namespace.name, "4", node_labels=labels)
    job = asking("1")
    del job["spec"]["podGroupPolicy"]
    job["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "research"}
    await namespace.create_job(job)
    pods = await namespace.until_running("digits", *ALL)
    assert all(pod["spec"]["nodeSelector"] == labels for pod in pods.values())


async def test_24_pods_with_ports_of_their_own_on_the_nodes_network_are_admitted(
    kueue: Kueue, namespace: Namespace
):
    kueue.make_queue(namespace.name, "24")
    network = {"hostNetwork": True, "portRange": {"first": 25000, "last": 25999}}
    await namespace.create_job(
        asking("1", pserver={"replicas": 12}, trainer={"replicas": 12}, network=network)
    )
    pods = await namespace.until_pods(
        "digits", "24 pods", lambda pods: len(pods) == 24 and all(map(is_running, pods.values()))
    )
    ports = {each["containerPort"] for pod in pods.values() for each in ports_of(pod)}
    assert len(ports) >= 24
    (workload,) = (await workloads(namespace)).values()
    assert {each["name"]: each["count"] for each in workload["spec"]["podSets"]} == {
        "pserver": 12,
        "trainer": 12,
    }


def ports_of(pod: Manifest) -> list[Manifest]:
    """Return the ports of a pod's containers."""
    return [port for each in pod["spec"]["containers"] for port in each.get("ports", ())]


async def test_a_preempted_job_queues_again_and_no_failure_is_counted(kueue: Kueue, namespace: Namespace):
    kueue.make_queue(namespace.name, "4")
    for name, value in (("low", 1), ("high", 1000)):
        kueue.make_priority(f"{name}-{namespace.name}", value)
    low, high = ({"priorityClassName": f"{name}-{namespace.name}"} for name in ("low", "high"))
    await namespace.create_job(asking("1", scheduling=low))
    await namespace.until_running("digits", *ALL)
    await namespace.create_job(asking("1", name="urgent", scheduling=high))
    await namespace.until_running("urgent", *names("urgent"))
    job = await namespace.until_job(
        "digits", "the queue again", lambda job: "has not admitted" in why_waiting(job)
    )
    assert "Preempted to accommodate a workload" in job["status"]["lastFailure"]["message"]
    assert (job["status"]["jobRestarts"], job["status"].get("failures", 0)) == (1, 0)
    await namespace.end(*names("urgent")[2:])
    await namespace.until_state("urgent", "Succeeded")
    await namespace.end(*names("urgent")[:2])
    await namespace.until_running("digits", *ALL)


async def test_a_deactivated_job_stays_without_pods_until_somebody_resumes_it(
    kueue: Kueue, namespace: Namespace
):
    kueue.make_queue(namespace.name, "4")
    await namespace.create_job(asking("1"))
    await namespace.until_running("digits", *ALL)
    (name,) = await workloads(namespace)
    path = f"/apis/{API}/namespaces/{namespace.name}/workloads/{name}"
    await namespace.client.merge_patch(path, {"spec": {"active": False}})
    job = await namespace.until_job("digits", "Deactivated", lambda job: "deactivated" in why_waiting(job))
    await namespace.until_pods("digits", "none", lambda pods: not pods)
    assert told_of(job, "Running")["reason"] == "Deactivated"
    await namespace.create_job(asking("1", name="next"))  # which needs the whole quota
    await namespace.until_running("next", *names("next"))
    assert [each for each in await workloads(namespace) if each.startswith("digits")] in ([name], [])
    await namespace.delete("fleetjobs", "next")
    mine = namespace.path("fleetjobs", "digits")
    await namespace.client.merge_patch(mine, {"spec": {"suspend": True}})
    await namespace.until_state("digits", "Suspended")
    await namespace.client.merge_patch(mine, {"spec": {"suspend": False}})
    await namespace.until_running("digits", *ALL)


@pytest.mark.parametrize("kept", [True, False], ids=["its-workload-is-there", "its-workload-is-gone"])
async def test_a_job_that_was_deactivated_while_no_operator_ran_holds_as_well(
    kueue: Kueue, operator: OperatorProcess, namespace: Namespace, *, kept: bool
):
    kueue.make_queue(namespace.name, "4")
    await namespace.create_job(asking("1"))
    await namespace.until_running("digits", *ALL)
    await namespace.until_state("digits", "Running")
    [(name, workload)] = (await workloads(namespace)).items()
    path = f"/apis/{API}/namespaces/{namespace.name}/workloads/{name}"
    finalizers = [*workload["metadata"].get("finalizers", ()), *(["fleet.test/kept"] if kept else [])]
    operator.stop()
    try:
        await namespace.client.merge_patch(
            path, {"metadata": {"finalizers": finalizers}, "spec": {"active": False}}
        )
        await namespace.until_pods("digits", "none", lambda pods: not pods)
        while not kept and await workloads(namespace):  # noqa: ASYNC110 there is only the asking
            await asyncio.sleep(0.1)
    finally:
        operator.start()
    job = await namespace.until_job("digits", "Deactivated", lambda job: "deactivated" in why_waiting(job))
    assert told_of(job, "Running")["reason"] == "Deactivated"
    assert list(await workloads(namespace)) == ([name] if kept else [])
    if kept:
        await namespace.client.merge_patch(path, {"metadata": {"finalizers": None}})


async def test_an_operator_that_starts_again_leaves_a_queued_job_in_its_place(
    kueue: Kueue, operator: OperatorProcess, namespace: Namespace
):
    kueue.make_queue(namespace.name, "4")
    await namespace.create_job(asking("1"))
    await namespace.until_running("digits", *ALL)
    await namespace.create_job(asking("1", name="second"))
    await namespace.until_job("second", LACKING, lambda job: LACKING in why_waiting(job))
    before = uids(await namespace.until_pods("second", "its pods", lambda pods: len(pods) == 4))
    queued = {each["metadata"]["uid"] for each in (await workloads(namespace)).values()}
    operator.stop()
    operator.start()
    await operator.until_leading()
    await namespace.end(*TRAINERS)
    await namespace.until_state("digits", "Succeeded")
    assert {each["metadata"]["uid"] for each in (await workloads(namespace)).values()} == queued
    await namespace.end(*SERVERS)
    assert uids(await namespace.until_running("second", *names("second"))) == before
    job = await namespace.until_state("second", "Running")
    assert (job["status"]["jobRestarts"], job["status"]["restarts"]) == (0, 0)


async def test_a_job_waits_for_an_admission_check_and_says_which(kueue: Kueue, namespace: Namespace):
    check = f"budget-{namespace.name}"
    kueue.make_check(check)
    kueue.make_queue(namespace.name, "4", check=check)
    await namespace.create_job(asking("1"))
    await namespace.until_job("digits", "the check", lambda job: check in why_waiting(job))
    (name,) = await workloads(namespace)
    path = f"/apis/{API}/namespaces/{namespace.name}/workloads/{name}/status"
    passed = {"name": check, "state": "Ready", "message": "yes"}
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    patch = {"status": {"admissionChecks": [{**passed, "lastTransitionTime": now}]}}
    await namespace.client.merge_patch(path, patch)
    await namespace.until_running("digits", *ALL)


async def test_the_pods_of_a_role_are_placed_in_one_rack(kueue: Kueue, namespace: Namespace):
    kueue.make_topology("racks", RACK)
    kueue.make_queue(namespace.name, "120", node_labels={"kubernetes.io/os": "linux"}, topology="racks")
    job = asking("30")
    annotations = {"kueue.x-k8s.io/podset-required-topology": RACK}
    job["spec"]["template"].setdefault("metadata", {})["annotations"] = annotations
    await namespace.create_job(job)
    pods = await namespace.until_running("digits", *ALL)
    for role in (SERVERS, TRAINERS):
        assert len({pods[each]["spec"]["nodeSelector"][RACK] for each in role}) == 1


async def test_pods_that_are_not_ready_in_time_send_their_job_back_to_the_queue(impatient: Kueue):
    async with (
        client_for(impatient.plane.admin.kubeconfig) as client,
        fresh_namespace(client) as namespace,
    ):
        impatient.make_queue(namespace.name, "4")
        job = asking("1")
        job["spec"]["template"].setdefault("metadata", {})["annotations"] = {"fleet.test/hold": "yes"}
        await namespace.create_job(job)
        job = await namespace.until_job(
            "digits", "the next group", lambda job: job.get("status", {}).get("jobRestarts", 0) >= 1
        )
        assert "Exceeded the PodsReady timeout" in job["status"]["lastFailure"]["message"]
        assert job["status"].get("failures", 0) == 0


async def test_a_failed_trainer_brings_a_new_group_and_a_namesake_has_another(
    kueue: Kueue, namespace: Namespace
):
    kueue.make_queue(namespace.name, "4")
    first = await namespace.create_job(asking("1"))
    await namespace.until_running("digits", *ALL)
    await namespace.end(TRAINERS[1], exit_code=1)
    await namespace.until_pods(
        "digits",
        "the second group",
        lambda pods: (
            len(pods) == 4 and all(attempt(pod) == "1.0" and is_running(pod) for pod in pods.values())
        ),
    )
    await namespace.delete("fleetjobs", "digits")
    second = await namespace.create_job(asking("1"))
    pods = await namespace.until_pods(
        "digits",
        "the namesake's pods",
        lambda pods: (
            set(pods) == set(ALL) and all(attempt(pod) == "0.0" and is_running(pod) for pod in pods.values())
        ),
    )
    groups = {pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in pods.values()}
    assert groups == {f"digits-{second['metadata']['uid'][:8]}-0"}
    assert first["metadata"]["uid"] != second["metadata"]["uid"]
