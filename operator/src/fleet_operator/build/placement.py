"""Pod placement: nodes, priority, devices and the host network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fleet_operator.api import Mode, Role

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob
    from fleet_operator.api.placement import Scheduling

__all__ = ["place"]

_SHARED_MEMORY = "fleet-shared-memory"
_SHARED_MEMORY_PATH = "/dev/shm"  # noqa: S108  the standard path of shared memory
_ADDRESS = "FLEET_POD_IP"
_NCCL = {"NCCL_DEBUG": "WARN"}  # NCCL is silent about failures by default
_FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""The variables that make torch dump each rank's last collectives when an NCCL collective times out."""


def place(spec: dict[str, Any], container: dict[str, Any], job: FleetJob, role: Role) -> None:
    """Apply the job's scheduling, devices, shared memory and host network to a pod.

    A priority class, a DNS policy, variables and a mount of /dev/shm in the template take precedence.

    Parameters
    ----------
    spec : dict
        The pod's spec; modified in place.
    container : dict
        The main container in it; modified in place.
    job : FleetJob
        The job.
    role : Role
        The role of the replica.
    """
    if job.spec.scheduling is not None:
        _schedule(spec, job.spec.scheduling)
    if role is Role.TRAINER:
        _equip(container, job)
        _share_memory(spec, container, job)
    if job.host_ports is not None:
        spec["hostNetwork"] = True
        # By default the pod would use its node's resolver, which cannot resolve the names of its peers.
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
        if job.spec.mode is Mode.COLLECTIVE:
            _tell_address(container)


def _schedule(spec: dict[str, Any], scheduling: Scheduling) -> None:
    """Restrict the pod to the job's nodes, and set its priority."""
    if scheduling.node_selector:
        spec["nodeSelector"] = {**spec.get("nodeSelector", {}), **scheduling.node_selector}
    if scheduling.tolerations:
        spec["tolerations"] = [*spec.get("tolerations", []), *(dict(each) for each in scheduling.tolerations)]
    if scheduling.priority_class_name is not None:
        spec.setdefault("priorityClassName", scheduling.priority_class_name)


def _equip(container: dict[str, Any], job: FleetJob) -> None:
    """Request a trainer's devices, and set variables of NCCL if its main container gets any devices."""
    if (devices := job.spec.trainer.devices) is not None:
        resources = container.setdefault("resources", {})
        resources.setdefault("limits", {})[devices.resource_name] = devices.count
    if _has_devices(container):
        own = {entry["name"] for entry in container.setdefault("env", [])}
        wanted = _nccl(job)
        container["env"] += [{"name": name, "value": wanted[name]} for name in wanted if name not in own]


def _tell_address(container: dict[str, Any]) -> None:
    """Set the variable with the address at which peers reach the pod, unless the template sets it."""
    env = container["env"]
    if all(entry["name"] != _ADDRESS for entry in env):
        env.append({"name": _ADDRESS, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})


def _nccl(job: FleetJob) -> dict[str, str]:
    """Return the variables for reports of NCCL failures and, in a collective job, for torch's dumps."""
    if job.spec.mode is not Mode.COLLECTIVE:
        return _NCCL
    checkpoint = job.spec.checkpoint
    if checkpoint is None:
        return _NCCL | _FLIGHT_RECORDER
    kept = {"TORCH_FR_DUMP_TEMP_FILE": f"{checkpoint.mount_path}/nccl_trace_rank_"}
    return _NCCL | _FLIGHT_RECORDER | kept


def _share_memory(spec: dict[str, Any], container: dict[str, Any], job: FleetJob) -> None:
    """Mount a larger /dev/shm if a trainer needs more than the container runtime's 64 MiB.

    NCCL, gloo and the workers of a DataLoader exchange tensors through it.
    """
    size = job.spec.trainer.shared_memory
    mounts = container.get("volumeMounts", [])
    # The API server refuses a path that is not a string.
    is_mounted = any(str(each.get("mountPath")).rstrip("/") == _SHARED_MEMORY_PATH for each in mounts)
    is_needed = job.nproc_per_node > 1 or _has_devices(container)
    is_wanted = is_needed if size is None else not _is_nothing(size)
    if is_mounted or not is_wanted:
        return
    memory = {"medium": "Memory"} | ({"sizeLimit": size} if size is not None else {})
    spec.setdefault("volumes", []).append({"name": _SHARED_MEMORY, "emptyDir": memory})
    container["volumeMounts"] = [*mounts, {"name": _SHARED_MEMORY, "mountPath": _SHARED_MEMORY_PATH}]


def _has_devices(container: dict[str, Any]) -> bool:
    """Return whether a container gets devices such as GPUs from the job, the template or a claim.

    A device plugin's resources have a domain in their names.
    """
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    return bool(resources.get("claims")) or any(
        "/" in name and str(count) != "0" for name, count in limits.items()
    )


def _is_nothing(size: str) -> bool:
    return int(size.rstrip("KMGTik")) == 0
