"""The volume that outlives the pods: its claims, and where they are mounted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import CheckpointScope, Retention, Role
from fleet_operator.api.names import claim_name
from fleet_operator.build.metadata import job_labels, owner_references

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["build_claims", "mount_checkpoint"]

_VOLUME = "fleet-checkpoint"


def build_claims(job: FleetJob) -> list[dict[str, Any]]:
    """Return the claims that a job makes: one, one for each parameter server, or none.

    A claim that is to outlive its job has no owner. It keeps the job's labels, by which a later job of the
    same name knows it.
    """
    checkpoint = job.spec.checkpoint
    if checkpoint is None or checkpoint.volume_claim_template is None:
        return []
    template = checkpoint.volume_claim_template
    metadata: dict[str, Any] = {
        "namespace": job.metadata.namespace,
        "labels": {**((template.metadata and template.metadata.labels) or {}), **job_labels(job)},
        "annotations": (template.metadata and template.metadata.annotations) or {},
    }
    if checkpoint.retention is Retention.DELETE:
        metadata["ownerReferences"] = owner_references(job)
    own = job.checkpoint_scope is CheckpointScope.PSERVER
    names = (
        [claim_name(job.name, server) for server in range(job.replicas(Role.PSERVER))]
        if own
        else [claim_name(job.name)]
    )
    spec = template.spec.to_manifest()
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {**metadata, "name": name},
            "spec": spec,
        }
        for name in names
    ]


def mount_checkpoint(
    spec: dict[str, Any], container: dict[str, Any], job: FleetJob, role: Role, index: int
) -> None:
    """Mount a replica's volume in the main container of its pod.

    Parameters
    ----------
    spec : dict
        The pod's spec, which is changed.
    container : dict
        The main container in it, which is changed as well.
    job : FleetJob
        The job.
    role, index : Role, int
        Which replica.
    """
    checkpoint = job.spec.checkpoint
    own = job.checkpoint_scope is CheckpointScope.PSERVER
    if checkpoint is None or (own and role is not Role.PSERVER):
        return
    name = checkpoint.claim_name or claim_name(job.name, index if own else None)
    claim = {"name": _VOLUME, "persistentVolumeClaim": {"claimName": name}}
    spec["volumes"] = [*spec.get("volumes", []), claim]
    mount = {"name": _VOLUME, "mountPath": checkpoint.mount_path}
    container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
