"""The operator beside a real coscheduling scheduler; `make test-kueue` builds it, else these are skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.controlplane import free_ports
from tests.support.digits_job import SERVERS, TRAINERS
from tests.support.jobs import manifest
from tests.support.kube import told_of
from tools import assets

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.controlplane import ControlPlane
    from tests.support.kube import Manifest, Namespace

pytestmark = [
    pytest.mark.programs,
    pytest.mark.on_request,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("scheduler"),
]

ALL = (*SERVERS, *TRAINERS)
SCHEDULER = "scheduler-plugins-scheduler"


@pytest.fixture(scope="module")
def scheduler(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A second scheduler with the coscheduling plugin, as scheduler-plugins recommends it."""
    try:
        program = assets.find(["coscheduling"])["coscheduling"]
    except assets.MissingError as missing:
        pytest.skip(str(missing))
    config = tmp_path_factory.mktemp("coscheduling") / "scheduler.yaml"
    config.write_text(yaml.safe_dump(configuration(control_plane.admin.kubeconfig)))
    control_plane.daemons.run(
        "coscheduling",
        program,
        f"--config={config}",
        "--bind-address=127.0.0.1",
        f"--secure-port={free_ports(1)[0]}",
        # The plugin tries a waiting gang again when a pod is added, not when others end; else in 5 minutes.
        "--pod-max-in-unschedulable-pods-duration=2s",
    )
    yield
    control_plane.daemons.kill("coscheduling")


def configuration(kubeconfig: Path) -> Manifest:
    """Return the scheduler's configuration."""
    plugins = {
        "multiPoint": {"enabled": [{"name": "Coscheduling"}]},
        "queueSort": {"enabled": [{"name": "Coscheduling"}], "disabled": [{"name": "*"}]},
    }
    arguments = [{"name": "Coscheduling", "args": {"permitWaitingTimeSeconds": 5}}]
    return {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(kubeconfig)},
        "podInitialBackoffSeconds": 1,
        "podMaxBackoffSeconds": 2,
        "profiles": [{"schedulerName": SCHEDULER, "plugins": plugins, "pluginConfig": arguments}],
    }


def asking(cpu: str, *, name: str = "digits") -> Manifest:
    """Return a job of a gang whose pods request some CPU each."""
    job = manifest(podGroupPolicy={"coscheduling": {"scheduleTimeoutSeconds": 5}})
    job["metadata"]["name"] = name
    job["spec"]["template"]["spec"]["containers"][0]["resources"] = {"requests": {"cpu": cpu}}
    return job


async def test_a_gang_for_which_there_is_no_room_waits_whole_and_its_scheduler_says_why(namespace: Namespace):
    await namespace.create_job(asking("40"))  # on four nodes of 64
    pods = await namespace.until_running("digits", *ALL)
    assert {pod["spec"]["schedulerName"] for pod in pods.values()} == {SCHEDULER}
    await namespace.create_job(asking("20", name="small"))
    await namespace.until_running("small", *(pod.replace("digits", "small") for pod in ALL))
    await namespace.create_job(asking("40", name="second"))
    kind = "podgroups.scheduling.x-k8s.io"
    found = await namespace.until(kind, "its group", lambda groups: "second-0" in groups)
    assert found["second-0"]["spec"] == {
        "minMember": 4,
        "minResources": {"cpu": "160"},
        "scheduleTimeoutSeconds": 5,
    }
    gap = "nodes are available: resource gap"  # between minResources and what is free
    job = await namespace.until_job("second", gap, lambda job: gap in str(job.get("status")))
    told = told_of(job, "Running")
    assert told["reason"] == "Unschedulable"
    assert told["message"].startswith("the gang second-0 needs nodes for 4 pods together, but 4 have none")
    waiting = [pod for pod in await namespace.all("pods") if pod["metadata"]["name"].startswith("second")]
    assert not any(pod["spec"].get("nodeName") for pod in waiting)
    await namespace.end(*TRAINERS)
    await namespace.until_state("digits", "Succeeded")
    await namespace.end(*SERVERS)
    await namespace.until_running("second", *(pod.replace("digits", "second") for pod in ALL))
