"""The local cluster: executes the operator's plans, and runs their pods as processes.

It plays the role of the API server for one job, and has a kubelet (`kubelet`). Every change, such as an exit
or a server that becomes ready, leads to a call of `changed`, after which the engine reconciles the job.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Protocol

from fleet_operator.cluster import KEY_BYTES, ConflictError, Key
from fleet_operator.local.kubelet import Kubelet
from fleet_operator.plan.model import (
    CreatePod,
    CreateService,
    DeleteJob,
    DeleteObject,
    DeletePod,
    DeleteService,
    EnsureObject,
    ObjectRef,
    Observed,
    ObservedObject,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from datetime import datetime

    from fleet_operator.api import FleetJob, FleetJobStatus
    from fleet_operator.build import Hosts
    from fleet_operator.local.pod import LocalPod, LocalSettings
    from fleet_operator.plan.model import Action, Event


class Listener(Protocol):
    """An observer of changes to pods, statuses and events, such as the display of a run."""

    def pod_changed(self, pod: LocalPod) -> None:
        """React to a pod that was created, has started, became ready or has ended."""

    def status_written(self, before: FleetJob, after: FleetJob) -> None:
        """React to a new status of the job."""

    def recorded(self, event: Event) -> None:
        """React to an event about the job."""


class ProcessCluster:
    """Executes the plans of one job on this machine, as a `fleet_operator.cluster.Cluster`.

    Parameters
    ----------
    job : FleetJob
        The job, with its uid; `fleet_operator.local.limits.refusals` must accept it.
    hosts : Hosts
        The claimed loopback address of each replica.
    settings : LocalSettings
        Folders, interpreter and environment.
    now : callable
        The time of day.
    listener : Listener
        Notified of changes, to show them.
    hold : sequence of int
        Descriptors that stay open until the last process is gone: the locks of the addresses.
    """

    def __init__(
        self,
        job: FleetJob,
        *,
        hosts: Hosts,
        settings: LocalSettings,
        now: Callable[[], datetime],
        listener: Listener,
        hold: tuple[int, ...] = (),
    ) -> None:
        self._job: FleetJob | None = job
        self._key = Key.of(job)
        self._hosts = hosts
        self._listener = listener
        self._service = False
        self._objects: set[ObjectRef] = set()
        changed = self._pod_changed
        self.kubelet = Kubelet(hosts=hosts, settings=settings, now=now, on_change=changed, hold=hold)
        self.changed: Callable[[Key], None] = lambda _: None

    def job(self, key: Key) -> FleetJob | None:
        """Return the job, or None if it was deleted or `key` refers to another job."""
        return self._job if key == self._key else None

    def observe(self, job: FleetJob) -> Observed:  # noqa: ARG002  there is one job here
        """Return the job's objects, which always include our own writes."""
        return Observed(
            pods=tuple(pod.observed() for pod in self.kubelet.pods),
            service=self._service,
            objects=dict.fromkeys(self._objects, ObservedObject()),
            one_machine=True,
            new_key=secrets.token_hex(KEY_BYTES),
        )

    def hosts(self, job: FleetJob) -> Hosts:  # noqa: ARG002  there is one job here
        """Return the replicas' loopback addresses."""
        return self._hosts

    async def write_status(self, job: FleetJob, status: FleetJobStatus) -> FleetJob:
        """Replace the job's status; raise ConflictError if `job` is not its newest version."""
        if self._job is None or job.metadata.resource_version != self._job.metadata.resource_version:
            raise ConflictError(f"{self._key} has changed since it was read")
        version = str(int(job.metadata.resource_version or 0) + 1)
        metadata = job.metadata.model_copy(update={"resource_version": version})
        self._job = job.model_copy(update={"metadata": metadata, "status": status})
        self._listener.status_written(job, self._job)
        self.changed(self._key)
        return self._job

    async def apply(self, job: FleetJob, action: Action) -> None:
        """Execute an action; repeating it is safe."""
        match action:
            case CreateService():
                self._service = True
            case DeleteService():
                self._service = False
            case CreatePod(manifest=manifest):  # no other controller creates pods here
                self.kubelet.create(job, manifest)
            case DeletePod(name, uid, grace_period_seconds):
                self.kubelet.delete(name, uid, grace_period_seconds)
            case EnsureObject(manifest):  # unused on this machine
                self._objects.add(ObjectRef.of(manifest))
            case DeleteObject(ref):
                self._objects.discard(ref)
            case DeleteJob():
                self._job = None
                self.kubelet.stop_all()
        self.changed(self._key)

    async def record(self, job: FleetJob, event: Event) -> None:  # noqa: ARG002  there is one job here
        """Pass an event to the listener."""
        self._listener.recorded(event)

    def _pod_changed(self, pod: LocalPod) -> None:
        self._listener.pod_changed(pod)
        self.changed(self._key)
