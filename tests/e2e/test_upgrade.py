"""A job that trains while its operator is upgraded, rolled back, uninstalled and installed again.

After test_uninstall.py by name: the other tests share the only operator for all namespaces.
"""

from __future__ import annotations

import copy
import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.support.e2e.namespaces import fresh_namespace
from tests.support.e2e.release import Release

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.e2e.bringup import Programs
    from tests.support.e2e.images import Images
    from tests.support.e2e.kubectl import Kubectl

START_SECONDS = 240.0
TRAINING_SECONDS = 600.0
DEFINITION = "fleetjobs.fleetjob.dev"
TRAINERS = ("digits-trainer-0", "digits-trainer-1")
TRAIN_AND_WAIT = "python examples/digits/train.py --epochs 300; until [ -e /tmp/end ]; do sleep 0.2; done"


def job_that_ends_when_told() -> dict[str, Any]:
    """Return the job digits, whose trainers end once a file is there, and not before."""
    job: dict[str, Any] = yaml.safe_load(Path("examples/digits/fleetjob.yaml").read_text())
    trainer = copy.deepcopy(job["spec"]["template"])
    trainer["spec"]["containers"][0]["command"] = ["sh", "-ec", TRAIN_AND_WAIT]
    job["spec"]["trainer"]["template"] = trainer
    job["spec"]["runPolicy"] = {"cleanPodPolicy": "None"}
    return job


@pytest.fixture
def new_release(
    cluster: Kubectl, programs: Programs, operator: Release
) -> Iterator[Callable[[str], Release]]:
    """Make releases on a cluster that has no operator, and leave none there, nor the definition."""
    operator.uninstall()
    releases: list[Release] = []

    def make(name: str) -> Release:
        namespace = f"fleet-{name}-{secrets.token_hex(3)}"
        releases.append(Release(programs.helm, cluster, namespace, name))
        return releases[-1]

    yield make
    for release in releases:
        release.uninstall()
        cluster("delete", "namespace", release.namespace, "--ignore-not-found", timeout=180)
    cluster("delete", "crd", DEFINITION, "--ignore-not-found", timeout=180)


def test_a_job_is_not_disturbed_by_what_happens_to_its_operator(
    cluster: Kubectl, loaded: Images, new_release: Callable[[str], Release]
):
    first, second = new_release("first"), new_release("second")
    first.install(loaded.operator, "operator.leaseSeconds=3")
    with fresh_namespace(cluster, f"e2e-upgrade-{secrets.token_hex(3)}") as namespace:
        namespace("apply", "-f", "-", stdin=json.dumps(job_that_ends_when_told()))
        namespace.wait_until("fleetjobs", "digits", in_state("Running"), timeout=START_SECONDS, what="to run")
        started = lives(namespace)
        assert len(started) == 4

        first.upgrade("replicas=2", "operator.logFormat=json", "podDisruptionBudget.enabled=true")
        first.test()
        assert lives(namespace) == started
        first.rollback()
        first.test()
        assert lives(namespace) == started
        first.uninstall()
        assert lives(namespace) == started

        second.install(loaded.operator, "operator.leaseSeconds=3", "crd.adopt=true", take_ownership=True)
        second.test()
        for trainer in TRAINERS:
            namespace("exec", trainer, "--", "touch", "/tmp/end")  # noqa: S108 the container's own
        job = namespace.wait_until(
            "fleetjobs", "digits", has_finished, timeout=TRAINING_SECONDS, what="to succeed or fail"
        )
        assert (job["status"]["state"], job["status"]["restarts"]) == ("Succeeded", 0), job["status"]
        assert lives(namespace) == started
        assert "test accuracy" in namespace("logs", TRAINERS[0])


def lives(namespace: Kubectl) -> set[tuple[str, str, int]]:
    """Return name, uid and restarts of each pod."""
    return {
        (
            pod["metadata"]["name"],
            pod["metadata"]["uid"],
            pod["status"]["containerStatuses"][0]["restartCount"],
        )
        for pod in namespace.get("pods")
    }


def in_state(*states: str) -> Callable[[dict[str, Any]], bool]:
    return lambda job: job.get("status", {}).get("state") in states


has_finished = in_state("Succeeded", "Failed")
