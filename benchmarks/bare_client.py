"""A minimal client that only creates the objects of jobs, as an upper bound on the speed of any operator.

``python -m benchmarks.bare_client KUBECONFIG`` connects and prints ``ready``. For each line of input,
``NAMESPACE NUM_JOBS SERVERS TRAINERS``, it creates the objects that an operator would create, as fast as
possible: a Service, a NetworkPolicy and the pods of each job. A job without servers is collective.
"""

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from fleet_operator.api import FleetJob, parse_job
from fleet_operator.build import ClusterHosts, Peers, build_extras, build_pod, build_service
from fleet_operator.kubernetes.client import FEATURES, ApiClient, collection
from fleet_operator.kubernetes.login import from_kubeconfig
from fleet_operator.plan.model import Attempt

__all__ = ["NUM_PODS", "SMALL", "Size", "job_manifest", "main"]

CONCURRENCY = 16
NUM_REPLICAS = 2
NUM_PODS = 2 * NUM_REPLICAS
"""The number of pods of a job: two parameter servers and two trainers."""


class Size(NamedTuple):
    """The size of a job: its number of replicas in each role."""

    servers: int
    trainers: int

    @property
    def pods(self) -> int:
        """The total number of pods."""
        return self.servers + self.trainers


SMALL = Size(NUM_REPLICAS, NUM_REPLICAS)


def job_manifest(name: str, namespace: str, size: Size = SMALL) -> dict[str, Any]:
    """Return a job whose pods are about 2 kB each and can all be created at once."""
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
    pod: dict[str, Any] = {"containers": [container]}
    if size != SMALL:
        # kwok deletes terminating pods by name; a late deletion would hit the next pod with that name.
        pod["terminationGracePeriodSeconds"] = 0
    spec: dict[str, Any] = {
        "mode": "Collective",
        "template": {"metadata": {"labels": {"team": "recsys"}}, "spec": pod},
        "trainer": {"replicas": size.trainers},
    }
    if size.servers:
        servers = {"replicas": size.servers}
        spec |= {"mode": "ParameterServer", "startupPolicy": {"order": "AnyOrder"}, "pserver": servers}
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "fleetjob.dev/v1alpha1", "kind": "FleetJob", "metadata": metadata, "spec": spec}


def objects(job: FleetJob) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the resource and manifest of each object of a job, without owner references."""
    yield "services", build_service(job)
    for policy in build_extras(job, life=0, metrics_open=True):
        yield FEATURES["networkPolicies"].key, dict(policy.manifest)
    peers = Peers(job, ClusterHosts(job))
    for role in job.roles:
        for index in range(job.replicas(role)):
            yield "pods", build_pod(job, role, index, Attempt(), peers.hosts, peers=peers)


async def create_all(client: ApiClient, namespace: str, num_jobs: int, size: Size) -> None:
    """Create the objects of all jobs, with `CONCURRENCY` requests at a time."""
    slots = asyncio.Semaphore(CONCURRENCY)

    async def create(plural: str, manifest: dict[str, Any]) -> None:
        manifest["metadata"].pop("ownerReferences", None)
        try:
            await client.create(collection(plural, namespace), manifest)
        finally:
            slots.release()

    async with asyncio.TaskGroup() as group:
        for index in range(num_jobs):
            manifest = job_manifest(f"job-{index}", namespace, size)
            manifest["metadata"]["uid"] = "11111111-1111-4111-8111-111111111111"
            for plural, each in objects(parse_job(manifest)):
                await slots.acquire()
                group.create_task(create(plural, each))


async def main(kubeconfig: Path) -> None:
    async with ApiClient(from_kubeconfig(kubeconfig)) as client:
        print("ready", flush=True)
        for line in sys.stdin:
            namespace, *numbers = line.split()
            num_jobs, servers, trainers = map(int, numbers)
            await create_all(client, namespace, num_jobs, Size(servers, trainers))
            print("done", flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
