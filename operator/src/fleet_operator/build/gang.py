"""Gang scheduling: a job's PodGroup, and the labels that make pods its members.

A restart of the whole job starts a new gang, whose pods are scheduled together again.
"""

from __future__ import annotations

from decimal import Decimal
from typing import TYPE_CHECKING, Any, Final, Protocol

from fleet_operator.api import Gang, Role
from fleet_operator.api.names import LABEL_INDEX, LABEL_QUEUE, LABEL_ROLE
from fleet_operator.build.service import job_labels, owner_references

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.api import FleetJob

__all__ = ["build_pod_group", "join_gang", "requests_of"]

_UNITS: Final = {f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGTPE", start=1)} | {
    **{letter: Decimal(1000**power) for power, letter in enumerate("kMGTPE", start=1)},
    **{letter: Decimal(1000) ** -power for power, letter in enumerate("mun", start=1)},
}
"""Maps the suffixes of Kubernetes quantities to factors."""


class GangScheduler(Protocol):
    """A scheduler that starts the pods of a gang together."""

    def pod_group(self, job: FleetJob) -> dict[str, Any] | None:
        """Return the apiVersion and spec of the PodGroup, or None if the scheduler uses no PodGroup."""

    def join(self, pod: dict[str, Any], job: FleetJob, name: str) -> None:
        """Make a pod a member of the gang."""


class Volcano:
    """The Volcano scheduler and its PodGroup."""

    def pod_group(self, job: FleetJob) -> dict[str, Any] | None:
        """Return the apiVersion and spec of Volcano's PodGroup."""
        spec: dict[str, Any] = {"minMember": job.min_member, **_min_resources(job)}
        policy, scheduling = job.spec.pod_group_policy, job.spec.scheduling
        if policy is not None and policy.volcano is not None and policy.volcano.queue is not None:
            spec["queue"] = policy.volcano.queue
        if scheduling is not None and scheduling.priority_class_name is not None:
            spec["priorityClassName"] = scheduling.priority_class_name
        return {"apiVersion": "scheduling.volcano.sh/v1beta1", "spec": spec}

    def join(self, pod: dict[str, Any], job: FleetJob, name: str) -> None:  # noqa: ARG002  the name says all
        """Make a pod a member of Volcano's PodGroup."""
        pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] = name
        pod["spec"].setdefault("schedulerName", "volcano")


class Coscheduling:
    """The coscheduling plugin of kubernetes-sigs/scheduler-plugins, and its PodGroup."""

    def pod_group(self, job: FleetJob) -> dict[str, Any] | None:
        """Return the apiVersion and spec of the plugin's PodGroup."""
        spec: dict[str, Any] = {"minMember": job.min_member, **_min_resources(job)}
        policy = job.spec.pod_group_policy.coscheduling if job.spec.pod_group_policy is not None else None
        if policy is not None and policy.schedule_timeout_seconds is not None:
            spec["scheduleTimeoutSeconds"] = policy.schedule_timeout_seconds
        return {"apiVersion": "scheduling.x-k8s.io/v1alpha1", "spec": spec}

    def join(self, pod: dict[str, Any], job: FleetJob, name: str) -> None:  # noqa: ARG002  the name says all
        """Make a pod a member of the plugin's PodGroup."""
        pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] = name
        pod["spec"].setdefault("schedulerName", "scheduler-plugins-scheduler")


class Kueue:
    """Kueue's groups of plain pods, held back by a webhook until a queue admits the whole group."""

    def pod_group(self, job: FleetJob) -> dict[str, Any] | None:  # noqa: ARG002  Kueue creates its own objects
        """Return None, because Kueue needs no PodGroup: it reads the pods' labels."""
        return None

    def join(self, pod: dict[str, Any], job: FleetJob, name: str) -> None:
        """Make a pod a member of Kueue's pod group."""
        pod["metadata"]["labels"] |= {
            LABEL_QUEUE: job.queue_name or "",
            "kueue.x-k8s.io/pod-group-name": name,
        }
        pod["metadata"]["annotations"] |= {
            "kueue.x-k8s.io/pod-group-total-count": str(job.num_replicas),
            # One pod set for each role. Otherwise, each pod with its own host ports would be a set, and Kueue
            # refuses groups of many sets.
            "kueue.x-k8s.io/role-hash": pod["metadata"]["labels"][LABEL_ROLE],
            # Pods of a group are never replaced: after a failure, the group ends once all of its pods have
            # ended, and Kueue then releases their names.
            "kueue.x-k8s.io/retriable-in-group": "false",
            # Kueue places pods in a topology by their index: neighbouring ranks are close on the network.
            "kueue.x-k8s.io/pod-group-pod-index-label": LABEL_INDEX,
        }


def _min_resources(job: FleetJob) -> dict[str, Any]:
    """Return the field minResources: the sum of the gang's requests; empty if there are no requests.

    With this field, the scheduler does not start placing a gang for which the cluster has too few resources.
    If minMember does not cover all pods, it covers the servers first, because trainers wait for them.
    """
    servers = min(job.replicas(Role.PSERVER), job.min_member)
    numbers = {Role.PSERVER: servers, Role.TRAINER: job.min_member - servers}
    total: dict[str, Decimal] = {}
    try:
        for role in job.roles:
            for name, amount in requests_of(job, role).items():
                total[name] = total.get(name, Decimal()) + amount * numbers[role]
    except ArithmeticError:  # the API server refuses the pods, and reports the quantity
        return {}
    return {"minResources": {name: f"{total[name].normalize():f}" for name in sorted(total)}} if total else {}


def requests_of(job: FleetJob, role: Role) -> dict[str, Decimal]:
    """Return the effective resource requests of a role's pod, excluding pod overhead.

    The requests of containers that run together are added. An init container counts if it requests more.

    Raises
    ------
    ArithmeticError
        The template has a quantity that is not a number.
    """
    template, devices = job.template(role), job.spec.trainer.devices
    spec = template.spec.to_manifest()
    beside: dict[str, Decimal] = {}
    most: dict[str, Decimal] = {}
    for container in spec.get("initContainers") or ():
        own = _requests(container)
        before = beside
        if container.get("restartPolicy") == "Always":
            beside = _sum(beside, own)
        most = _max(most, _sum(before, own))
    for container in spec["containers"]:
        own = _requests(container)
        is_main = container["name"] == template.main_container.name
        if role is Role.TRAINER and devices is not None and is_main:
            own[devices.resource_name] = Decimal(devices.count)
        beside = _sum(beside, own)
    return {name: amount for name, amount in _max(most, beside).items() if amount}


def _requests(container: Mapping[str, Any]) -> dict[str, Decimal]:
    """Return a container's resource requests; a limit without a request counts as a request."""
    resources = container.get("resources") or {}
    asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
    return {name: _amount(quantity) for name, quantity in asked.items()}


def _amount(quantity: object) -> Decimal:
    text = str(quantity)
    unit = next((each for each in _UNITS if text.endswith(each)), "")
    amount = Decimal(text.removesuffix(unit)) * _UNITS.get(unit, 1)
    if not amount.is_finite():
        raise ArithmeticError(f"found the quantity {text!r}, expected a number such as 500m or 2Gi")
    return amount


def _sum(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: one.get(name, Decimal()) + other.get(name, Decimal()) for name in {**one, **other}}


def _max(one: Mapping[str, Decimal], other: Mapping[str, Decimal]) -> dict[str, Decimal]:
    return {name: max(one.get(name, Decimal()), other.get(name, Decimal())) for name in {**one, **other}}


_SCHEDULERS: dict[Gang, GangScheduler] = {
    Gang.VOLCANO: Volcano(),
    Gang.COSCHEDULING: Coscheduling(),
    Gang.KUEUE: Kueue(),
}


def build_pod_group(job: FleetJob, life: int) -> dict[str, Any] | None:
    """Return the PodGroup of a job, or None if its scheduler uses no PodGroup.

    Parameters
    ----------
    job : FleetJob
        The job.
    life : int
        How often all of its replicas were restarted.
    """
    scheduler = _SCHEDULERS.get(job.gang)
    group = scheduler.pod_group(job) if scheduler is not None else None
    if group is None:
        return None
    metadata = {
        "name": job.gang_name(life),
        "namespace": job.metadata.namespace,
        "labels": job_labels(job),
        "ownerReferences": owner_references(job),
    }
    return {"kind": "PodGroup", "metadata": metadata, **group}


def join_gang(pod: dict[str, Any], job: FleetJob, life: int) -> None:
    """Make a pod a member of its job's gang, if the job uses gang scheduling."""
    scheduler = _SCHEDULERS.get(job.gang)
    if scheduler is not None:
        scheduler.join(pod, job, job.gang_name(life))
