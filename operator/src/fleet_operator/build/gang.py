"""Gang scheduling: the PodGroup of a job, and the membership of its pods.

A restart of the whole job starts a new gang, whose pods are scheduled together again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from fleet_operator.api import Gang
from fleet_operator.api.names import LABEL_INDEX, gang_name
from fleet_operator.build.service import job_labels, owner_references

if TYPE_CHECKING:
    from fleet_operator.api import FleetJob

__all__ = ["build_pod_group", "join_gang"]


class GangScheduler(Protocol):
    """A scheduler that places the pods of a gang together."""

    def pod_group(self, job: FleetJob) -> dict[str, Any] | None:
        """Return the apiVersion and the spec of the PodGroup, if the scheduler uses one."""

    def join(self, pod: dict[str, Any], job: FleetJob, name: str) -> None:
        """Make a pod a member of the gang with this name."""


class Volcano:
    """Volcano, with its own scheduler and PodGroup."""

    def pod_group(self, job: FleetJob) -> dict[str, Any] | None:
        """Return apiVersion and spec of the PodGroup."""
        spec: dict[str, Any] = {"minMember": job.min_available}
        scheduling = job.spec.scheduling
        if scheduling is not None and scheduling.queue is not None:
            spec["queue"] = scheduling.queue
        if scheduling is not None and scheduling.priority_class_name is not None:
            spec["priorityClassName"] = scheduling.priority_class_name
        return {"apiVersion": "scheduling.volcano.sh/v1beta1", "spec": spec}

    def join(self, pod: dict[str, Any], job: FleetJob, name: str) -> None:  # noqa: ARG002  the name says all
        """Make a pod a member."""
        pod["metadata"]["annotations"]["scheduling.k8s.io/group-name"] = name
        pod["spec"].setdefault("schedulerName", "volcano")


class Coscheduling:
    """The coscheduling plugin of kubernetes-sigs/scheduler-plugins."""

    def pod_group(self, job: FleetJob) -> dict[str, Any] | None:
        """Return apiVersion and spec of the PodGroup."""
        return {"apiVersion": "scheduling.x-k8s.io/v1alpha1", "spec": {"minMember": job.min_available}}

    def join(self, pod: dict[str, Any], job: FleetJob, name: str) -> None:  # noqa: ARG002  the name says all
        """Make a pod a member."""
        pod["metadata"]["labels"]["scheduling.x-k8s.io/pod-group"] = name
        pod["spec"].setdefault("schedulerName", "scheduler-plugins-scheduler")


class Kueue:
    """Kueue's groups of plain pods, which Kueue's webhook gates until its queue admits the whole group."""

    def pod_group(self, job: FleetJob) -> dict[str, Any] | None:  # noqa: ARG002  Kueue creates its own objects
        """Return None: Kueue reads the pods' labels."""
        return None

    def join(self, pod: dict[str, Any], job: FleetJob, name: str) -> None:
        """Make a pod a member."""
        queue = job.spec.scheduling.queue if job.spec.scheduling else None
        pod["metadata"]["labels"] |= {
            "kueue.x-k8s.io/queue-name": queue or "",
            "kueue.x-k8s.io/pod-group-name": name,
        }
        pod["metadata"]["annotations"] |= {
            "kueue.x-k8s.io/pod-group-total-count": str(job.num_replicas),
            # Pods of a group are never replaced: a group with a failed pod ends once all pods have ended, and
            # Kueue then releases their names.
            "kueue.x-k8s.io/retriable-in-group": "false",
            # Kueue places pods in a topology by their index: neighbouring ranks are close on the network.
            "kueue.x-k8s.io/pod-group-pod-index-label": LABEL_INDEX,
        }


_SCHEDULERS: dict[Gang, GangScheduler] = {
    Gang.VOLCANO: Volcano(),
    Gang.COSCHEDULING: Coscheduling(),
    Gang.KUEUE: Kueue(),
}


def build_pod_group(job: FleetJob, life: int) -> dict[str, Any] | None:
    """Return the manifest of the PodGroup of one life of a job, if its scheduler uses one.

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
        "name": gang_name(job.name, life),
        "namespace": job.metadata.namespace,
        "labels": job_labels(job),
        "ownerReferences": owner_references(job),
    }
    return {"kind": "PodGroup", "metadata": metadata, **group}


def join_gang(pod: dict[str, Any], job: FleetJob, life: int) -> None:
    """Make a pod a member of its job's gang, if the job has one."""
    scheduler = _SCHEDULERS.get(job.gang)
    if scheduler is not None:
        scheduler.join(pod, job, gang_name(job.name, life))
