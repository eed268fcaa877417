"""The certificates of ``spec.network.tls``: a Secret that others make, and that only the pods read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from fleet_operator.api.names import TLS_DIR, TLS_SERVER_NAME

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["mount_certificates", "tls_env"]

_VOLUME: Final = "fleet-tls"
_FOLDER: Final = "/etc/fleet/tls"
_READABLE: Final = 0o444
"""By whatever user the template's container has: nothing else runs in it, and nothing else has the mount."""


def tls_env(job: FleetJob) -> dict[str, str]:
    """Return what tells a replica where its certificates are; nothing for a job that does not encrypt."""
    tls = job.tls
    if tls is None:
        return {}
    return {TLS_DIR: _FOLDER} | ({TLS_SERVER_NAME: tls.server_name} if tls.server_name else {})


def mount_certificates(spec: dict[str, Any], container: dict[str, Any], job: FleetJob) -> None:
    """Mount the Secret in the main container of a pod, whole, so that the kubelet renews its files.

    Parameters
    ----------
    spec : dict
        The pod's spec, which is changed.
    container : dict
        The main container in it, which is changed as well.
    job : FleetJob
        The job.
    """
    tls = job.tls
    if tls is None:
        return
    secret = {"secretName": tls.secret_name, "defaultMode": _READABLE}
    spec["volumes"] = [*spec.get("volumes", []), {"name": _VOLUME, "secret": secret}]
    mount = {"name": _VOLUME, "mountPath": _FOLDER, "readOnly": True}
    container["volumeMounts"] = [*container.get("volumeMounts", []), mount]
