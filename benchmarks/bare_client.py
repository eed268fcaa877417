"""The limit for any operator: a plain asynchronous client that only creates the objects of jobs.

``python -m benchmarks.bare_client KUBECONFIG`` connects, prints ``ready``, and for each line of its input,
``NAMESPACE NUM_JOBS``, creates as fast as it can what an operator would: a Service, a
NetworkPolicy and four pods a job.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleet_operator.api import FleetJob, Role, parse_job
from fleet_operator.build import ClusterHosts, build_extras, build_pod, build_service
from fleet_operator.kubernetes.client import FEATURES, ApiClient, collection
from fleet_operator.kubernetes.login import from_kubeconfig
from fleet_operator.plan.model import Attempt

__all__ = ["NUM_PODS", "job_manifest", "main"]

CONCURRENCY = 16
NUM_REPLICAS = 2
NUM_PODS = 2 * NUM_REPLICAS
"""Pods of a job: two parameter servers and two trainers."""


def job_manifest(name: str, namespace: str) -> dict[str, Any]:
    """Return a job of 2 + 2 whose pods are about 2 kB each, all of which may be created at once."""
    container = {
        "name": "fleet",
        "image": "registry.example.org/recsys/ctr-train:2026.11.21",
        "command": ["python", "-m", "train.ctr", "--data=/data/criteo", "--batch-size=1000"],
        "resources": {
            "requests": {"cpu": "100m", "memory": "128Mi"},
            "limits": {"cpu": "4", "memory": "8Gi"},
        },
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }
    return {
        "apiVersion": "fleetjob.dev/v1alpha1",
        "kind": "FleetJob",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "mode": "ParameterServer",
            "startupPolicy": "AnyOrder",
            "template": {"metadata": {"labels": {"team": "recsys"}}, "spec": {"containers": [container]}},
            "pserver": {"replicas": NUM_REPLICAS},
            "trainer": {"replicas": NUM_REPLICAS},
        },
    }


def objects(job: FleetJob) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the resources and manifests of what a job needs, without an owner: there is none here."""
    yield "services", build_service(job)
    for policy in build_extras(job, life=0, metrics_open=True):
        yield FEATURES["networkPolicies"].key, dict(policy.manifest)
    for role in (Role.PSERVER, Role.TRAINER):
        for index in range(NUM_REPLICAS):
            yield "pods", build_pod(job, role, index, Attempt(), ClusterHosts(job))


async def create_all(client: ApiClient, namespace: str, num_jobs: int) -> None:
    """Create everything, so many requests at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def create(plural: str, manifest: dict[str, Any]) -> None:
        manifest["metadata"].pop("ownerReferences", None)
        try:
            await client.create(collection(plural, namespace), manifest)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for index in range(num_jobs):
            manifest = job_manifest(f"job-{index}", namespace)
            manifest["metadata"]["uid"] = "11111111-1111-4111-8111-111111111111"
            for plural, each in objects(parse_job(manifest)):
                await slots.acquire()
                group.create_task(create(plural, each))


async def main(kubeconfig: Path) -> None:
    async with ApiClient(from_kubeconfig(kubeconfig)) as client:
        print("ready", flush=True)
        for line in sys.stdin:
            namespace, num_jobs = line.split()
            await create_all(client, namespace, int(num_jobs))
            print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
