"""The examples' manifests, the very files that run locally, trained by pods."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import NewNamespace
    from tests.support.e2e.kubectl import Kubectl

TRAINING_SECONDS = 600.0
ENDING_SECONDS = 30.0
DELETION_SECONDS = 90.0
ACCURACY = 0.95


@dataclass(frozen=True)
class Example:
    """One example and the replicas that it runs."""

    name: str
    manifest: Path
    roles: dict[str, int]


EXAMPLES = [
    Example("digits", Path("examples/digits/fleetjob.yaml"), {"pserver": 2, "trainer": 2}),
    Example("collective", Path("examples/collective/fleetjob.yaml"), {"trainer": 2}),
    Example("plain-ddp", Path("examples/collective/fleetjob-ddp.yaml"), {"trainer": 2}),
]


@dataclass(frozen=True)
class Trained:
    """A job that has come to its end, its pods as they were then, and what the namespace held before it."""

    kubectl: Kubectl
    example: Example
    job: dict[str, Any]
    pods: list[dict[str, Any]]
    before: set[str]

    def logs(self, role: str, index: int = 0) -> str:
        return self.kubectl("logs", f"{self.job['metadata']['name']}-{role}-{index}")


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda example: example.name)
def example(request: pytest.FixtureRequest) -> Example:
    assert isinstance(request.param, Example)
    return request.param


@pytest.fixture(scope="module")
def namespace(new_namespace: NewNamespace, example: Example) -> Iterator[Kubectl]:
    with new_namespace(example.name) as kubectl:
        yield kubectl


@pytest.fixture(scope="module")
def trained(namespace: Kubectl, example: Example) -> Trained:
    before = namespace.inventory()
    name = namespace("apply", "-f", example.manifest, "-o", "name").strip().rpartition("/")[2]
    job = namespace.wait_until(
        "fleetjobs", name, is_finished, timeout=TRAINING_SECONDS, what="to succeed or fail"
    )
    # The job has succeeded with its trainers; the servers, told by them, end a moment later.
    pods = [
        namespace.wait_until(
            "pods", pod["metadata"]["name"], has_ended, timeout=ENDING_SECONDS, what="to end by itself"
        )
        for pod in namespace.get("pods")
    ]
    return Trained(namespace, example, job, pods, before)


def is_finished(job: dict[str, Any]) -> bool:
    return job.get("status", {}).get("state") in ("Succeeded", "Failed")


def has_ended(pod: dict[str, Any]) -> bool:
    return -1 not in exit_codes(pod)


def exit_codes(pod: dict[str, Any]) -> list[int]:
    return [
        container["state"].get("terminated", {}).get("exitCode", -1)
        for container in pod["status"].get("containerStatuses", [])
    ]


def test_the_job_succeeds_at_the_first_attempt(trained):
    status = trained.job["status"]
    assert status["state"] == "Succeeded", status.get("lastFailure")
    assert status["restarts"] == 0
    conditions = {each["type"]: each["status"] for each in status["conditions"]}
    assert conditions["PodsCreated"] == conditions["Complete"] == "True"
    assert conditions.get("Failed", "False") == "False"
    assert status["completionTime"] >= status["startTime"]


def test_every_replica_has_its_pod_and_ends_by_itself(trained):
    name = trained.job["metadata"]["name"]
    expected = {
        f"{name}-{role}-{index}": [0]
        for role, count in trained.example.roles.items()
        for index in range(count)
    }
    assert {pod["metadata"]["name"]: exit_codes(pod) for pod in trained.pods} == expected


def test_the_log_tells_the_accuracy(trained):
    found = re.findall(r"test accuracy\D*(\d\.\d+)", trained.logs("trainer"))
    assert found, trained.logs("trainer")[-2000:]
    assert float(found[-1]) >= ACCURACY


def test_the_status_tells_the_progress(trained):
    if trained.example.name == "plain-ddp":
        assert "progress" not in trained.job["status"]  # a plain script reports nothing
        return
    progress = trained.job["status"]["progress"]
    assert progress["percentage"] == 100
    assert progress["step"] == progress["totalSteps"] > 0
    assert progress["loss"] > 0


def test_events_tell_the_jobs_story(trained):
    events = trained.kubectl.get("events", fieldSelector="involvedObject.kind=FleetJob")
    assert {"Started", "Succeeded"} <= {event["reason"] for event in events}


def test_the_users_object_stays_clean(trained):
    metadata = trained.job["metadata"]
    assert "finalizers" not in metadata
    assert metadata["annotations"].keys() == {"kubectl.kubernetes.io/last-applied-configuration"}


def test_deleting_the_job_leaves_nothing_behind(trained):
    kubectl, name = trained.kubectl, trained.job["metadata"]["name"]
    assert kubectl.inventory() > trained.before
    kubectl("delete", "-f", trained.example.manifest, "--wait", timeout=DELETION_SECONDS)
    selector = f"fleetjob.dev/job-name={name}"
    for kind in ("pods", "services"):
        kubectl(
            "wait", "--for=delete", kind, "-l", selector, f"--timeout={DELETION_SECONDS:.0f}s", timeout=120
        )
    assert kubectl.inventory() == trained.before
