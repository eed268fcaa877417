"""The headless Service that gives each replica its name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import Mode, Role
from fleet_operator.api.names import LABEL_JOB_NAME, METRICS_PORT, service_name
from fleet_operator.build.metadata import job_labels, owner_references

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["build_service"]


def build_service(job: FleetJob) -> dict[str, Any]:
    """Return the manifest of a job's headless Service.

    It publishes pods that are not ready: replicas find each other while they start, and a replica that is
    slow for a moment does not lose its name.
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
