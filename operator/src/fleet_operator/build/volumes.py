"""The volumes that the operator adds to pods: persistent ones for checkpoints, and certificates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fleet_operator.api import CheckpointScope, Retention, Role
from fleet_operator.api.names import TLS_DIR, TLS_SERVER_NAME, claim_name, server_claim_name
from fleet_operator.build.service import job_labels, owner_references

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["build_claims", "mount_certificates", "mount_checkpoint", "tls_env"]

_CHECKPOINT_VOLUME = "fleet-checkpoint"


def build_claims(job: FleetJob) -> list[dict[str, Any]]:
    """Return a job's PersistentVolumeClaims: none, one for the job, or one per parameter server.

    A claim that outlives its job has no owner. Because its name contains a part of the job's uid, a later job
    of the same name neither finds nor changes the weights in it, unless its manifest names the claim.
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
    name = claim_name(job.name, job.metadata.uid)
    servers = range(job.replicas(Role.PSERVER))
    names = [server_claim_name(name, server) for server in servers] if own else [name]
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
    """Mount a replica's checkpoint volume in the main container of its pod.

    Parameters
    ----------
    spec : dict
        The pod's spec; modified in place.
    container : dict
        The main container in it; modified in place.
    job : FleetJob
        The job.
    role, index : Role, int
        The replica.
    """
    checkpoint = job.spec.checkpoint
    own = job.checkpoint_scope is CheckpointScope.PSERVER
    if checkpoint is None or (own and role is not Role.PSERVER):
        return
    name = checkpoint.claim_name or claim_name(job.name, job.metadata.uid)
    name = server_claim_name(name, index) if own else name
    claim = {"name": _CHECKPOINT_VOLUME, "persistentVolumeClaim": {"claimName": name}}
    spec["volumes"] = [*spec.get("volumes", []), claim]
    mount = {"name": _CHECKPOINT_VOLUME, "mountPath": checkpoint.mount_path}
    container["volumeMounts"] = [*container.get("volumeMounts", []), mount]


_TLS_VOLUME: Final = "fleet-tls"
_TLS_FOLDER: Final = "/etc/fleet/tls"
_TLS_MODE: Final = 0o444
"""The mode of the certificate files: readable by any user in the main container, which alone mounts them."""


def tls_env(job: FleetJob) -> dict[str, str]:
    """Return the variables with the paths of a replica's certificates; empty without TLS."""
    tls = job.tls
    if tls is None:
        return {}
    return {TLS_DIR: _TLS_FOLDER} | ({TLS_SERVER_NAME: tls.server_name} if tls.server_name else {})


def mount_certificates(spec: dict[str, Any], container: dict[str, Any], job: FleetJob) -> None:
    """Mount the whole Secret in a pod's main container, so that renewed certificates appear there.

    Parameters
    ----------
    spec : dict
        The pod's spec; modified in place.
    container : dict
        The main container in it; modified in place.
    job : FleetJob
        The job.
    """
    tls = job.tls
    if tls is None:
        return
    secret = {"secretName": tls.secret_name, "defaultMode": _TLS_MODE}
    spec["volumes"] = [*spec.get("volumes", []), {"name": _TLS_VOLUME, "secret": secret}]
    mount = {"name": _TLS_VOLUME, "mountPath": _TLS_FOLDER, "readOnly": True}
    container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
