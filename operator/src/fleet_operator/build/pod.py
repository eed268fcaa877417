"""One replica's pod: the user's template with the replica's place filled in."""

from __future__ import annotations

from decimal import ROUND_CEILING, Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any

from fleet_operator.api import Mode, Role
from fleet_operator.api.names import (
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_ROLE,
    METRICS_PORT,
    pod_name,
    service_name,
)
from fleet_operator.build.env import role_env
from fleet_operator.build.metadata import job_labels, owner_references

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob
    from fleet_operator.build.hosts import Hosts
    from fleet_operator.plan.model import Attempt

__all__ = ["build_pod"]

_SHARED_MEMORY = "fleet-shared-memory"
_UNITS = {"m": Decimal("0.001"), "": Decimal(1), "k": Decimal(1000)}


def build_pod(job: FleetJob, role: Role, index: int, attempt: Attempt, hosts: Hosts) -> dict[str, Any]:
    """Return the manifest of one replica's pod.

    Parameters
    ----------
    job : FleetJob
        The job.
    role, index : Role, int
        Which replica.
    attempt : Attempt
        Which life of the replica.
    hosts : Hosts
        Where each replica is reached.

    Returns
    -------
    dict
        The role's template and what the operator sets. The template wins wherever both are possible (probes,
        ports, token, termination messages); restartPolicy, hostname, subdomain, our labels and the role's
        environment are always the operator's.
    """
    template = job.template(role)
    spec = template.spec.to_manifest()
    main = template.main_container.name
    env = role_env(job, role, index, hosts, restarts=attempt.job + attempt.replica)
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        _complete_container(container, env)
    for container in spec["containers"]:
        if container["name"] == main:
            _complete_main(container, job, role)
    _apply_node_pool(spec, main, job, role)
    spec.setdefault("automountServiceAccountToken", False)
    # Links add variables for each Service of the namespace: one named fleet-metrics sets FLEET_METRICS_PORT.
    spec.setdefault("enableServiceLinks", False)
    name = pod_name(job.name, role, index)
    spec |= {"restartPolicy": "Never", "hostname": name, "subdomain": service_name(job.name)}
    labels = {LABEL_ROLE: role.value, LABEL_INDEX: str(index), LABEL_ATTEMPT: str(attempt)}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "labels": {**template.labels, **job_labels(job), **labels},
            "annotations": dict(template.annotations),
            "ownerReferences": owner_references(job),
        },
        "spec": spec,
    }


def _complete_container(container: dict[str, Any], env: dict[str, str]) -> None:
    """Give a container its place: first, because a variable can only refer to those before it."""
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    own = [entry for entry in container.get("env", []) if entry["name"] not in env]
    container["env"] = [{"name": name, "value": value} for name, value in env.items()] + own


def _complete_main(container: dict[str, Any], job: FleetJob, role: Role) -> None:
    """Add what only the main container has: the ports, the servers' probe, a fitting number of threads."""
    listening = Role.TRAINER if job.spec.mode is Mode.COLLECTIVE else Role.PSERVER
    wanted = [("metrics", METRICS_PORT)]
    if role is listening:
        wanted.insert(0, (role.value, job.port(role)))
    ports = container.setdefault("ports", [])
    taken = {entry.get("containerPort") for entry in ports} | {entry.get("name") for entry in ports}
    ports += [
        {"name": name, "containerPort": port, "protocol": "TCP"}
        for name, port in wanted
        if name not in taken and port not in taken
    ]
    if role is Role.PSERVER:
        container.setdefault(
            "readinessProbe", {"grpc": {"port": job.port(role)}, "periodSeconds": 2, "timeoutSeconds": 2}
        )
    threads = _num_threads(container, job.slots_per_pod if role is Role.TRAINER else 1)
    if threads is not None and all(entry["name"] != "OMP_NUM_THREADS" for entry in container["env"]):
        container["env"].append({"name": "OMP_NUM_THREADS", "value": str(threads)})


def _num_threads(container: dict[str, Any], num_processes: int) -> int | None:
    """Return each process's share of the CPU limit, rounded up; None without a limit that can be read.

    torch would start a thread per core of the node, which a limit then throttles.
    """
    limit = str(((container.get("resources") or {}).get("limits") or {}).get("cpu", ""))
    unit = limit[-1:] if limit[-1:] in _UNITS else ""
    try:
        cores = Decimal(limit.removesuffix(unit)) * _UNITS[unit]
    except InvalidOperation:
        return None
    if not cores.is_finite():
        return None
    return max(1, int((cores / num_processes).to_integral_value(ROUND_CEILING)))


def _apply_node_pool(spec: dict[str, Any], main: str, job: FleetJob, role: Role) -> None:
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
    container = next(each for each in spec["containers"] if each["name"] == main)
    if pool.gpus_per_trainer:
        resources = container.setdefault("resources", {})
        resources.setdefault("limits", {})[pool.resource_name] = pool.gpus_per_trainer
    if pool.shared_memory is not None:
        memory = {"medium": "Memory", "sizeLimit": pool.shared_memory}
        spec.setdefault("volumes", []).append({"name": _SHARED_MEMORY, "emptyDir": memory})
        mount = {"name": _SHARED_MEMORY, "mountPath": "/dev/shm"}  # noqa: S108  shared memory has this path
        container.setdefault("volumeMounts", []).append(mount)
