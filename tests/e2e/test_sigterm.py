"""SIGTERM ends a replica at once, though it is the first process of its container.

The kernel gives signals no effect of their own there, and Python runs its handlers between bytecodes only.
"""

from __future__ import annotations

import copy
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.conftest import NewNamespace
    from tests.support.e2e.kubectl import Kubectl

START_SECONDS = 240.0
END_SECONDS = 60.0
STUCK_IN_C = "import re; print('stuck', flush=True); re.match('(a+)+$', 'a' * 64 + 'b')"


def job_that_never_ends() -> dict[str, Any]:
    """Return a job whose server waits for a trainer that does nothing else than to be busy in C."""
    job: dict[str, Any] = yaml.safe_load(Path("examples/digits/fleetjob.yaml").read_text())
    spec = job["spec"]
    job["metadata"]["name"] = "endless"
    stuck = copy.deepcopy(spec["template"])
    stuck["spec"]["containers"][0]["command"] = ["python", "-c", STUCK_IN_C]
    spec["pserver"]["replicas"] = 1
    spec["trainer"] |= {"replicas": 1, "template": stuck}
    spec["failurePolicy"] = {"action": "FailJob"}
    spec["runPolicy"] = {"cleanPodPolicy": "None"}
    return job


@pytest.fixture
def namespace(new_namespace: NewNamespace) -> Iterator[Kubectl]:
    with new_namespace("sigterm") as kubectl:
        yield kubectl


@pytest.mark.parametrize("role", ["pserver", "trainer"])
def test_sigterm_ends_a_replica_within_two_seconds(namespace: Kubectl, role: str):
    pod = f"endless-{role}-0"
    namespace("apply", "-f", "-", stdin=json.dumps(job_that_never_ends()))
    namespace.wait_until(
        "fleetjobs",
        "endless",
        lambda job: job.get("status", {}).get("state") == "Running",
        timeout=START_SECONDS,
        what="to run",
    )
    # The signal comes a second later, when this command is over: it would end with the container otherwise.
    # The clock is that of the node, whose kubelet says when the container ended.
    later = "(sleep 1; kill -TERM 1) >/dev/null 2>&1 </dev/null &"
    signalled = int(namespace("exec", pod, "--", "sh", "-c", f"{later} date +%s")) + 1
    # Nobody deletes the pod, so an end by SIGTERM is a failure in either role, and the status tells it.
    job = namespace.wait_until(
        "fleetjobs",
        "endless",
        lambda job: "lastFailure" in job["status"],
        timeout=END_SECONDS,
        what="to tell of the SIGTERM",
    )
    failure = job["status"]["lastFailure"]
    assert (failure["pod"], failure["exitCode"]) == (pod, 143)
    finished = datetime.strptime(failure["time"], "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC)
    assert finished.timestamp() - signalled <= 2
