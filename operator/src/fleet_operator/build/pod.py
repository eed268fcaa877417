"""Builds a replica's pod: the user's template plus the replica's environment and settings."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.api.names import (
    ANNOTATION_MAIN,
    JOB_KEY,
    LABEL_ATTEMPT,
    LABEL_INDEX,
    LABEL_ROLE,
    TLS_DIR,
    TLS_SERVER_NAME,
    pod_name,
    service_name,
)
from fleet_operator.build.env import FIRST_START, role_env
from fleet_operator.build.gang import join_gang
from fleet_operator.build.placement import place
from fleet_operator.build.ports import listening_role, replica_ports
from fleet_operator.build.service import job_labels, owner_references
from fleet_operator.build.volumes import mount_certificates, mount_checkpoint

if TYPE_CHECKING:
    from collections.abc import Iterator

    from fleet_operator.api import FleetJob
    from fleet_operator.build.env import Peers, Start
    from fleet_operator.build.ports import ReplicaPorts
    from fleet_operator.build.service import Hosts
    from fleet_operator.plan.model import Attempt

__all__ = ["PodBuilder", "build_pod"]

_MAIN_ONLY = frozenset({JOB_KEY, TLS_DIR, TLS_SERVER_NAME})  # only for the main container
_MOST_CORES = 10_000  # more than any node has, so a higher limit has no effect
_UNITS = {"m": Decimal("0.001"), "": Decimal(1), "k": Decimal(1000)}


@dataclass(frozen=True, slots=True, eq=False)
class PodBuilder:
    """Builds one replica's pod on each call.

    A plan may create 1,700 pods, and all of their manifests at once would take much memory. Two builders are
    equal if their manifests are equal.

    Attributes
    ----------
    role, index : Role, int
        The replica.
    attempt : Attempt
        The attempt of the replica.
    start : Start
        The values of the current start.
    peers : Peers
        The job, and the lists that all of its replicas have.
    """

    role: Role
    index: int
    attempt: Attempt
    start: Start
    peers: Peers

    def __call__(self) -> dict[str, Any]:
        """Return the pod's manifest."""
        peers = self.peers
        return build_pod(peers.job, self.role, self.index, self.attempt, peers.hosts, self.start, peers=peers)

    def __eq__(self, other: object) -> bool:
        """Return whether two builders build the same manifest."""
        return self() == other() if isinstance(other, PodBuilder) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def build_pod(
    job: FleetJob,
    role: Role,
    index: int,
    attempt: Attempt,
    hosts: Hosts,
    start: Start = FIRST_START,
    *,
    peers: Peers | None = None,
) -> dict[str, Any]:
    """Return the manifest of a replica's pod.

    Parameters
    ----------
    job : FleetJob
        The job.
    role, index : Role, int
        The replica.
    attempt : Attempt
        The attempt of the replica.
    hosts : Hosts
        Maps each replica to its host.
    start : Start
        The values of the current start.
    peers : Peers, optional
        The lists of this job, if several replicas share them.

    Returns
    -------
    dict
        The role's template and the operator's settings. The template takes precedence for probes, ports,
        token and termination messages; restartPolicy, hostname, subdomain, our labels and the role's
        environment are always the operator's.
    """
    template, name = job.template(role), pod_name(job.name, role, index)
    env = role_env(job, role, index, hosts, start, restarts=attempt.restarts, peers=peers)
    labels = {LABEL_ROLE: role.value, LABEL_INDEX: str(index), LABEL_ATTEMPT: str(attempt)}
    pod: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.metadata.namespace,
            "labels": {**template.labels, **job_labels(job), **labels},
            # Injected containers may come first; the annotation marks the main one, also for kubectl.
            "annotations": {**template.annotations, ANNOTATION_MAIN: template.main_container.name},
            "ownerReferences": owner_references(job),
        },
        "spec": {
            **_spec(job, role, index, env, replica_ports(job, role, index, start.ports)),
            "restartPolicy": "Never",
            "hostname": name,
            "subdomain": service_name(job.name),
        },
    }
    join_gang(pod, job, attempt.job)
    return pod


def _spec(job: FleetJob, role: Role, index: int, env: dict[str, str], own: ReplicaPorts) -> dict[str, Any]:
    """Return the template's pod spec with a replica's environment and settings added."""
    template = job.template(role)
    spec = template.spec.to_manifest()
    main = next(each for each in spec["containers"] if each["name"] == template.main_container.name)
    without_secrets = {name: value for name, value in env.items() if name not in _MAIN_ONLY}
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        _complete_container(container, env if container is main else without_secrets)
    _complete_main(main, job, role, own)
    place(spec, main, job, role)
    mount_checkpoint(spec, main, job, role, index)
    mount_certificates(spec, main, job)
    spec.setdefault("automountServiceAccountToken", False)
    # Service links add variables: a Service named fleet-metrics would set FLEET_METRICS_PORT.
    spec.setdefault("enableServiceLinks", False)
    return spec


def _complete_container(container: dict[str, Any], env: dict[str, str]) -> None:
    """Add a replica's variables before the container's own, which may then refer to them."""
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    own = [entry for entry in container.get("env", []) if entry["name"] not in env]
    container["env"] = [{"name": name, "value": value} for name, value in env.items()] + own


def _complete_main(container: dict[str, Any], job: FleetJob, role: Role, own: ReplicaPorts) -> None:
    """Add ports, a server's readiness probe, and the thread count to the main container."""
    ports = container.setdefault("ports", [])
    taken = {entry.get("containerPort") for entry in ports} | {entry.get("name") for entry in ports}
    ports += [
        {"name": name, "containerPort": port, "protocol": "TCP"}
        for name, port in _wanted_ports(job, role, own)
        if name not in taken and port not in taken
    ]
    if role is Role.PSERVER:
        # With TLS, the HTTP probe: Kubernetes' gRPC probe does not support TLS.
        asked = {"httpGet": {"path": "/readyz", "port": own.metrics}}
        if job.tls is None:
            asked = {"grpc": {"port": own.first}}
        container.setdefault("readinessProbe", {**asked, "periodSeconds": 2, "timeoutSeconds": 2})
    threads = _num_threads(container, job.nproc_per_node if role is Role.TRAINER else 1)
    if threads is not None and all(entry["name"] != "OMP_NUM_THREADS" for entry in container["env"]):
        container["env"].append({"name": "OMP_NUM_THREADS", "value": str(threads)})


def _wanted_ports(job: FleetJob, role: Role, own: ReplicaPorts) -> Iterator[tuple[str, int]]:
    """Yield the named ports of a replica; on the host network, those of all its processes."""
    if role is listening_role(job):
        yield role.value, own.first
        if job.host_ports is not None and role is Role.TRAINER:
            for slot in range(1, job.nproc_per_node):
                yield f"{role.value}-{slot}", own.first + slot
    yield "metrics", own.metrics


def _num_threads(container: dict[str, Any], num_processes: int) -> int | None:
    """Return each process's share of the CPU limit, rounded up, or None if the limit is missing or invalid.

    By default, torch starts one thread for each core of the node, which the CPU limit would throttle.
    """
    limit = str(((container.get("resources") or {}).get("limits") or {}).get("cpu", ""))
    unit = limit[-1:] if limit[-1:] in _UNITS else ""
    try:
        cores = Decimal(limit.removesuffix(unit)) * _UNITS[unit]
    except ArithmeticError:  # not a number, or out of range
        return None
    if not cores.is_finite() or cores > _MOST_CORES:
        return None
    return max(1, int((cores / num_processes).to_integral_value(ROUND_CEILING)))
