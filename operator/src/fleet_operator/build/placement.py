"""Where a pod runs and what it gets of its node: the pool, the priority, the node's network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["place"]

_SHARED_MEMORY = "fleet-shared-memory"
_SHARED_MEMORY_PATH = "/dev/shm"  # noqa: S108  shared memory has this path
_NCCL = {"NCCL_DEBUG": "WARN"}  # else it keeps to itself what goes wrong


def place(spec: dict[str, Any], container: dict[str, Any], job: FleetJob, role: Role) -> None:
    """Put a pod where its job wants it; what the template says itself stays where both are possible.

    Parameters
    ----------
    spec : dict
        The pod's spec, which is changed.
    container : dict
        The main container in it, which is changed as well.
    job : FleetJob
        The job.
    role : Role
        The role of the replica.
    """
    _apply_pool(spec, container, job, role)
    scheduling = job.spec.scheduling
    if scheduling is not None and scheduling.priority_class_name is not None:
        spec.setdefault("priorityClassName", scheduling.priority_class_name)
    if job.host_ports is not None:
        spec["hostNetwork"] = True
        # Without it the pod would ask its node's resolver, which does not know the names of its peers.
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")


def _apply_pool(spec: dict[str, Any], container: dict[str, Any], job: FleetJob, role: Role) -> None:
    """Put the pod where the pool is, and give the main container of a trainer its share of it."""
    pool = job.spec.node_pool
    if pool is None:
        return
    if pool.node_selector:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **pool.node_selector}
    if pool.tolerations:
        spec["tolerations"] = [*spec.get("tolerations", []), *(dict(each) for each in pool.tolerations)]
    if role is not Role.TRAINER:
        return
    if pool.gpus_per_trainer:
        resources = container.setdefault("resources", {})
        resources.setdefault("limits", {})[pool.resource_name] = pool.gpus_per_trainer
        own = {entry["name"] for entry in container.setdefault("env", [])}
        container["env"] += [
            {"name": name, "value": value} for name, value in _NCCL.items() if name not in own
        ]
    mounts = container.get("volumeMounts", [])
    if pool.shared_memory is not None and all(
        each.get("mountPath") != _SHARED_MEMORY_PATH for each in mounts
    ):
        memory = {"medium": "Memory", "sizeLimit": pool.shared_memory}
        spec.setdefault("volumes", []).append({"name": _SHARED_MEMORY, "emptyDir": memory})
        mount = {"name": _SHARED_MEMORY, "mountPath": _SHARED_MEMORY_PATH}
        container["volumeMounts"] = [*mounts, mount]
