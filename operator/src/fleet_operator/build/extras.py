"""The objects that a job may need besides its pods and its Service."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from fleet_operator.api import NetworkPolicyType, Role
from fleet_operator.api.names import ANNOTATION_MADE_FROM, LABEL_JOB_NAME, LABEL_ROLE
from fleet_operator.build.gang import build_pod_group
from fleet_operator.build.ports import replica_ports
from fleet_operator.build.service import job_labels, owner_references
from fleet_operator.build.volumes import build_claims

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleet_operator.api import FleetJob


__all__ = [
    "Extra",
    "asks_for_network_policy",
    "build_disruption_budget",
    "build_extras",
    "build_network_policy",
    "wants_network_policy",
]


def asks_for_network_policy(job: FleetJob) -> bool:
    """Return whether the manifest requires a NetworkPolicy."""
    return _policy_type(job) is NetworkPolicyType.ISOLATED


def wants_network_policy(job: FleetJob) -> bool:
    """Return whether a job gets a NetworkPolicy: the default, except on the host network."""
    if (asked := _policy_type(job)) is not None:
        return asked is NetworkPolicyType.ISOLATED
    return job.spec.network is None or not job.spec.network.host_network


def _policy_type(job: FleetJob) -> NetworkPolicyType | None:
    """Return the type of NetworkPolicy that the manifest sets, or None."""
    network = job.spec.network
    return network.policy.type if network is not None and network.policy is not None else None


def build_network_policy(job: FleetJob, readers: Sequence[Mapping[str, Any]] | None = ()) -> dict[str, Any]:
    """Return the NetworkPolicy of a job.

    Parameters
    ----------
    job : FleetJob
        The job.
    readers : sequence of mapping, optional
        The additional readers of the metrics port, as peers of a NetworkPolicy. An empty sequence admits no
        additional reader; None admits every client.

    Notes
    -----
    Servers choose the ports for tensors when they start, so a job's pods can reach each other on all ports.
    Egress is not restricted: data, images and code may be anywhere.
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
    """Return the ingress rules for metrics readers: everyone if `readers` is None, nobody if it is empty."""
    shown = {"ports": [{"port": port, "protocol": "TCP"} for port in ports]}
    if readers is None:
        return [shown]
    return [{"from": [dict(peer) for peer in readers], **shown}] if readers else []


def _most(job: FleetJob, role: Role) -> int:
    return job.most_trainers if role is Role.TRAINER else job.replicas(role)


def build_disruption_budget(job: FleetJob) -> dict[str, Any] | None:
    """Return the PodDisruptionBudget of the parameter servers, or None if the job requests none.

    The budget counts whole pods (``minAvailable``): percentages and ``maxUnavailable`` would be relative to
    the scale of the pods' owner, which is the number of trainers.
    """
    budget = job.spec.pserver.disruption_budget if job.spec.pserver is not None else None
    if budget is None:
        return None
    spec: dict[str, Any] = {
        "minAvailable": budget.min_available or job.replicas(Role.PSERVER),
        "selector": {"matchLabels": {LABEL_JOB_NAME: job.name, LABEL_ROLE: Role.PSERVER.value}},
    }
    if budget.unhealthy_pod_eviction_policy is not None:
        spec["unhealthyPodEvictionPolicy"] = budget.unhealthy_pod_eviction_policy.value
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": f"{job.name}-pserver",
            "namespace": job.metadata.namespace,
            "labels": job_labels(job),
            "ownerReferences": owner_references(job),
        },
        "spec": spec,
    }


@dataclass(frozen=True, slots=True)
class Extra:
    """An additional object of a job, and the field of the manifest that requests it.

    Attributes
    ----------
    field : str
        The field of the manifest that requests it.
    manifest : mapping
        The object.
    while_held : bool
        Whether the object stays while the job is suspended and has no pods.
    after_end : bool
        Whether the object stays when the job has finished.
    by_default : bool
        Whether the job gets the object by default, and runs without it if the operator cannot create it.
    """

    field: str
    manifest: Mapping[str, Any]
    while_held: bool = False
    after_end: bool = False
    by_default: bool = False

    @property
    def made_from(self) -> str | None:
        """The digest of the desired state, used to detect outdated objects; None for claims."""
        said: str | None = self.manifest["metadata"].get("annotations", {}).get(ANNOTATION_MADE_FROM)
        return said


def build_extras(
    job: FleetJob, life: int, *, readers: Sequence[Mapping[str, Any]] = (), metrics_open: bool = False
) -> tuple[Extra, ...]:
    """Return the objects that must exist before the job's pods.

    Parameters
    ----------
    job : FleetJob
        The job.
    life : int
        How often all of its replicas were restarted.
    readers : sequence of mapping
        The readers of its metrics in addition to its own pods, as peers of a NetworkPolicy.
    metrics_open : bool
        Whether any client may read the metrics if the manifest does not require a NetworkPolicy.
    """
    found = [
        Extra("spec.checkpoint.volumeClaimTemplate", claim, while_held=True, after_end=True)
        for claim in build_claims(job)
    ]
    if wants_network_policy(job):
        asked = asks_for_network_policy(job)
        policy = _signed(build_network_policy(job, readers if asked or not metrics_open else None))
        found.append(
            Extra("spec.network.policy", policy, while_held=True, after_end=True, by_default=not asked)
        )
    if (budget := build_disruption_budget(job)) is not None:
        found.append(Extra("spec.pserver.disruptionBudget", _signed(budget)))
    if (group := build_pod_group(job, life)) is not None:
        found.append(Extra("spec.podGroupPolicy", _signed(group)))
    return tuple(found)


def _signed(manifest: dict[str, Any]) -> dict[str, Any]:
    """Return an object with the digest of its desired state as an annotation.

    The stored object itself cannot be compared, because the API server adds defaults, and webhooks and people
    may change it.
    """
    digest = sha256(json.dumps(manifest["spec"], sort_keys=True).encode()).hexdigest()[:16]
    metadata = manifest["metadata"]
    annotations = {**metadata.get("annotations", {}), ANNOTATION_MADE_FROM: digest}
    return {**manifest, "metadata": {**metadata, "annotations": annotations}}
