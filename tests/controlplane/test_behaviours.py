"""The table of behaviours, on a cluster; local runs must pass it, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.behaviours import BEHAVIOURS, exit_code_of, is_pause
from tests.support.digits_job import SERVERS, annotated
from tests.support.jobs import collective_manifest, manifest
from tests.support.kube import attempt, is_running, told_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.behaviours import Behaviour
    from tests.support.kube import Manifest, Namespace

REPLICAS = 4


def life_of(pod: Manifest) -> int:
    """Return how often a pod's replica was started before."""
    job, _, replica = attempt(pod).partition(".")
    return int(job) + int(replica)


def replica_of(pod: Manifest) -> str:
    """Return a pod's replica, such as trainer-1."""
    labels = pod["metadata"]["labels"]
    return f"{labels['fleetjob.dev/role']}-{labels['fleetjob.dev/index']}"


def has_ended(pod: Manifest) -> Callable[[dict[str, Manifest]], bool]:
    """Return a probe: this very pod has ended, or is gone."""
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]

    def probe(pods: dict[str, Manifest]) -> bool:
        now = pods.get(name)
        return now is None or now["metadata"]["uid"] != uid or now["status"]["phase"] == "Failed"

    return probe


async def until_first(namespace: Namespace, trainers: int) -> None:
    """Wait for the trainers that are created before a server is ready, and for the status that says why."""
    await namespace.until_pods("digits", "the first pods", lambda found: len(found) == 2 + trainers)
    reason = "PodsCreated" if trainers else "WaitingForParameterServers"
    job = await namespace.until_job(
        "digits", reason, lambda job: "status" in job and told_of(job, "PodsCreated")["reason"] == reason
    )
    assert job["status"]["state"] == "Pending"
    assert len(await namespace.all("pods")) == 2 + trainers


async def until_left(namespace: Namespace, replicas: frozenset[str]) -> None:
    """Wait for the event about a job's failure, which follows the cleanup, and check which pods are left."""
    await namespace.until(
        "events", "the end", lambda found: any(each["reason"] == "Failed" for each in found.values())
    )
    await namespace.until_pods(
        "digits",
        f"left: {sorted(replicas)}",
        lambda found: {replica_of(pod) for pod in found.values()} == replicas,
    )
    pods = await namespace.all("pods")
    assert not [pod for pod in pods if "deletionTimestamp" in pod["metadata"]]


@pytest.mark.parametrize("behaviour", [pytest.param(each, id=each.id) for each in BEHAVIOURS])
async def test_on_a_cluster(namespace: Namespace, behaviour: Behaviour):
    build = collective_manifest if behaviour.collective else manifest
    document = build(**behaviour.spec)
    if behaviour.slow_servers:
        document["spec"]["pserver"]["template"] = annotated(hold="yes")["spec"]["template"]
    await namespace.create_job(document)
    if behaviour.first is not None:
        await until_first(namespace, behaviour.first)
        for server in SERVERS:
            await namespace.annotate(server, hold=None)
    replicas = 2 if behaviour.collective else REPLICAS
    failing = sum(sum(code > 0 for code in codes) for codes in behaviour.lives.values())
    if behaviour.state == "Failed":
        failing = behaviour.failures
    for _ in range(failing):
        pods = await namespace.until_pods(
            "digits",
            "all pods running",
            lambda found: len(found) == replicas and all(map(is_running, found.values())),
        )
        ends = {
            pod: code
            for pod, each in pods.items()
            if (code := exit_code_of(behaviour, replica_of(each), life_of(each)))
        }
        (pod, code), *_ = ends.items()
        await namespace.end(pod, exit_code=code)
        await namespace.until_pods("digits", f"the end of {pod}", has_ended(pods[pod]))
    if behaviour.state == "Succeeded":
        await namespace.until_pods(
            "digits",
            "all pods running",
            lambda found: len(found) == replicas and all(map(is_running, found.values())),
        )
        done = {"trainer-0", "trainer-1"} - {name for name, codes in behaviour.lives.items() if codes[-1] < 0}
        await namespace.end(*(f"digits-{name}" for name in done))
    job = await namespace.until_state("digits", behaviour.state)
    told = told_of(job, job["status"]["terminalState"])
    assert told["reason"] == behaviour.reason, told["message"]
    counted = (job["status"].get("failures", 0), job["status"].get("jobRestarts", 0))
    assert counted == (behaviour.failures, behaviour.job_restarts)
    assert behaviour.says in told["message"]
    if behaviour.pause_seconds is not None:
        assert is_pause(job["status"], behaviour.pause_seconds)
    if behaviour.left is not None:
        await until_left(namespace, behaviour.left)
