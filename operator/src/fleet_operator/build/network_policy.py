"""The NetworkPolicy of a job: its pods talk to each other on every port, and others only read metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.api.names import LABEL_JOB_NAME
from fleet_operator.build.metadata import job_labels, owner_references
from fleet_operator.build.ports import replica_ports

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleet_operator.api import FleetJob

__all__ = ["asks_for_network_policy", "build_network_policy", "wants_network_policy"]


def asks_for_network_policy(job: FleetJob) -> bool:
    """Return whether the manifest asks for a NetworkPolicy, and the job is not to run without."""
    return job.spec.network is not None and job.spec.network.policy is True


def wants_network_policy(job: FleetJob) -> bool:
    """Return whether a job gets a NetworkPolicy: not if it refuses one, or is on its nodes' network."""
    network = job.spec.network
    if network is None or network.policy is None:
        return network is None or not network.host_network
    return network.policy


def build_network_policy(job: FleetJob, readers: Sequence[Mapping[str, Any]] | None = ()) -> dict[str, Any]:
    """Return the manifest of a job's NetworkPolicy.

    Parameters
    ----------
    job : FleetJob
        The job.
    readers : sequence of mapping, optional
        Who else may read the metrics port, as peers of a NetworkPolicy; nobody if it is empty, everybody if
        it is None.

    Notes
    -----
    Tensors travel on ports that a server picks when it starts, so a job's pods reach each other on all of
    them. What pods may reach is left alone: data, images and code are anywhere.
    """
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
            "ingress": [{"from": [{"podSelector": peers}]}, *_reading(readers, sorted(metrics))],
        },
    }


def _reading(readers: Sequence[Mapping[str, Any]] | None, ports: Sequence[int]) -> list[dict[str, Any]]:
    """Return the rule that lets somebody read. One that names no peers would let everybody."""
    shown = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    if readers is None:
        return [shown]
    return [{"from": [dict(peer) for peer in readers], **shown}] if readers else []


def _most(job: FleetJob, role: Role) -> int:
    return job.most_trainers if role is Role.TRAINER else job.replicas(role)
