"""Labels and owners: what ties an object to its job."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api.names import API_VERSION, KIND, LABEL_JOB_NAME, LABEL_MANAGED_BY, MANAGED_BY

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["job_labels", "owner_references"]


def job_labels(job: FleetJob) -> dict[str, str]:
    """Return the labels of everything that belongs to a job."""
    return {LABEL_JOB_NAME: job.name, LABEL_MANAGED_BY: MANAGED_BY}


def owner_references(job: FleetJob) -> list[dict[str, Any]]:
    """Return the reference by which an object is deleted with its job, and known to be this very job's.

    ``blockOwnerDeletion`` makes a foreground deletion of the job wait for the object. Where the API server
    checks it, setting it needs the right to update the job's finalizers (docs/adr/0079).
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
