"""The NetworkPolicy of a job: its pods talk to each other on every port, and nobody else to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.api.names import LABEL_JOB_NAME
from fleet_operator.build.metadata import job_labels, owner_references
from fleet_operator.build.ports import replica_ports

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["build_network_policy"]


def build_network_policy(job: FleetJob) -> dict[str, Any] | None:
    """Return the manifest of a job's NetworkPolicy, if it asks for one.

    Tensors travel on ports that a server picks when it starts, so a job's pods reach each other on all of
    them. Whoever scrapes may read the metrics port, which takes no orders. What pods may reach is left alone:
    data, images and code are anywhere.
    """
    if job.spec.network is None or not job.spec.network.policy:
        return None
    peers = {"matchLabels": {LABEL_JOB_NAME: job.name}}
    metrics = {
        replica_ports(job, role, index).metrics for role in job.roles for index in range(_most(job, role))
    }
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {
            "name": job.name,
            "namespace": job.metadata.namespace,
            "labels": job_labels(job),
            "ownerReferences": owner_references(job),
        },
        "spec": {
            "podSelector": peers,
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": peers}]},
                {"ports": [{"port": port, "protocol": "TCP"} for port in sorted(metrics)]},
            ],
        },
    }


def _most(job: FleetJob, role: Role) -> int:
    return job.most_trainers if role is Role.TRAINER else job.replicas(role)
