"""The PodDisruptionBudget of a job's parameter servers: none of them may be evicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.api.names import LABEL_JOB_NAME, LABEL_ROLE
from fleet_operator.build.metadata import job_labels, owner_references

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["build_disruption_budget"]


def build_disruption_budget(job: FleetJob) -> dict[str, Any] | None:
    """Return the manifest of the servers' PodDisruptionBudget, if the job asks for one.

    It counts in whole pods (``minAvailable``): shares and ``maxUnavailable`` would be reckoned from the scale
    of the pods' owner, which is the number of trainers.
    """
    if job.spec.pserver is None or not job.spec.pserver.pod_disruption_budget:
        return None
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": f"{job.name}-pserver",
            "namespace": job.metadata.namespace,
            "labels": job_labels(job),
            "ownerReferences": owner_references(job),
        },
        "spec": {
            "minAvailable": job.replicas(Role.PSERVER),
            "selector": {"matchLabels": {LABEL_JOB_NAME: job.name, LABEL_ROLE: Role.PSERVER.value}},
        },
    }
