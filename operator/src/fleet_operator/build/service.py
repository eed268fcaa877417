"""The Service of a job, the host names of its replicas, and the labels and owners of all its objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fleet_operator.api import Mode, Role
from fleet_operator.api.names import (
    API_VERSION,
    KIND,
    LABEL_JOB_NAME,
    LABEL_MANAGED_BY,
    MANAGED_BY,
    METRICS_PORT,
    cluster_host,
    service_name,
)

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["ClusterHosts", "Hosts", "build_service", "job_labels", "owner_references"]


def job_labels(job: FleetJob) -> dict[str, str]:
    """Return the labels of all objects of a job."""
    return {LABEL_JOB_NAME: job.name, LABEL_MANAGED_BY: MANAGED_BY}


def owner_references(job: FleetJob) -> list[dict[str, Any]]:
    """Return an owner reference to a job, so that Kubernetes deletes the owned object along with the job.

    ``blockOwnerDeletion`` makes a foreground deletion of the job wait for the object. If the API server
    enforces it, setting it requires the right to update the job's finalizers (docs/adr/0079).
    """
    return [
        {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "name": job.name,
            "uid": job.metadata.uid,
            "controller": True,
            "blockOwnerDeletion": True,
        }
    ]


class Hosts(Protocol):
    """Maps a replica to its host name or address, without a port."""

    def __call__(self, role: Role, index: int, /) -> str:
        """Return a replica's host; the same replica always has the same host."""


@dataclass(frozen=True, slots=True)
class ClusterHosts:
    """Maps replicas to their DNS names under the job's headless Service."""

    job: FleetJob

    def __call__(self, role: Role, index: int, /) -> str:
        """Return ``{pod}.{service}.{namespace}.svc``."""
        return cluster_host(self.job.name, self.job.metadata.namespace, role, index)


def build_service(job: FleetJob) -> dict[str, Any]:
    """Return the headless Service of a job.

    The Service publishes pods that are not ready: replicas find each other while they start, and a replica
    that fails a probe keeps its DNS name.
    """
    listening = Role.TRAINER if job.spec.mode is Mode.COLLECTIVE else Role.PSERVER
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {
            "name": service_name(job.name),
            "namespace": job.metadata.namespace,
            "labels": job_labels(job),
            "ownerReferences": owner_references(job),
        },
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {LABEL_JOB_NAME: job.name},
            "ports": [_port(listening.value, job.port(listening)), _port("metrics", METRICS_PORT)],
        },
    }


def _port(name: str, port: int) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": port, "protocol": "TCP"}
