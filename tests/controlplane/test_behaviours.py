"""What jobs do on a cluster: the table that this machine is held to as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.behaviours import BEHAVIOURS, exit_code_of
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


@pytest.mark.parametrize("behaviour", [pytest.param(each, id=each.id) for each in BEHAVIOURS])
async def test_on_a_cluster(namespace: Namespace, behaviour: Behaviour):
    build = collective_manifest if behaviour.collective else manifest
    await namespace.create_job(build(**behaviour.spec))
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
    told = told_of(job, behaviour.state)
    assert told["reason"] == behaviour.reason, told["message"]
    counted = (job["status"].get("failures", 0), job["status"].get("jobRestarts", 0))
    assert counted == (behaviour.failures, behaviour.job_restarts)
