"""What a plan is made of: what was observed, what is to be done, and what to tell.

Everything here is a frozen value, so that a test compares whole plans and both clusters carry out the
same actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime, timedelta

    from fleet_operator.api import FleetJobStatus, JobProgress, Role


@dataclass(frozen=True, order=True, slots=True)
class Attempt:
    """Which life of a replica a pod is: restarts of the whole job, then restarts of this replica.

    A pod whose attempt is lower than the one the status asks for belongs to the past and is removed.
    """

    job: int = 0
    replica: int = 0

    def __str__(self) -> str:
        """Return the value of the pod's ``fleetjob.dev/attempt`` label."""
        return f"{self.job}.{self.replica}"

    @property
    def restarts(self) -> int:
        """How often the replica was started before, as it is told."""
        return self.job + self.replica

    @classmethod
    def parse(cls, label: str) -> Attempt:
        """Read the label's value back; anything else is attempt 0.0, the oldest there is."""
        job, dot, replica = label.partition(".")
        return cls(int(job), int(replica)) if dot and job.isdigit() and replica.isdigit() else cls()


class PodPhase(StrEnum):
    """The phase of a pod, as the API server tells it."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """One pod of the job, or one that merely has the name of one, reduced to what decisions need."""

    name: str
    uid: str
    role: Role
    index: int
    attempt: Attempt
    phase: PodPhase
    owned: bool = True  # controlled by this very job, by uid; else only the name is the same
    ready: bool = False
    not_ready_reason: str | None = None  # reason of Ready=False, e.g. NodeNotReady
    not_ready_since: datetime | None = None  # when Ready became False
    disruption: str | None = None  # reason of DisruptionTarget or TerminationTarget: evicted, preempted, …
    deleted_at: datetime | None = None  # deletionTimestamp: the moment its grace period ends
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    container: str | None = None  # the main container: exit_code, reason and message are its own
    exit_code: int | None = None
    reason: str | None = None  # terminated.reason, waiting.reason, or the pod's own (Evicted, …)
    message: str | None = None  # the termination message, or why it waits (the scheduler's own sentence)
    scheduler: str | None = None
    gates: tuple[str, ...] = ()  # what must be removed before a scheduler looks at it
    finalizers: tuple[str, ...] = ()  # what must be removed before it is gone, once it is deleted
    node: str | None = None
    ip: str | None = None
    key: str | None = field(default=None, repr=False)  # of the job's life, as its main container has it
    metrics_port: int | None = None  # where its main container serves its progress
    told_ports: tuple[int, ...] = ()  # on its node's network: the first port of each replica that listens
    version: str | None = field(
        default=None, compare=False
    )  # resourceVersion: most changes of it are no news


class ObjectRef(NamedTuple):
    """An object in the job's namespace."""

    api_version: str
    kind: str
    name: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> ObjectRef:
        """Return the reference to what a manifest describes."""
        return cls(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class ObservedObject:
    """One object of the job beside its pods and its Service, reduced to what decisions need."""

    made_from: str | None = None  # its annotation; None if it has none, or if it is on its way out already
    held_back: str | None = None  # a PodGroup that waits: its phase, and why in its scheduler's words


@dataclass(frozen=True, slots=True)
class Observed:
    """What the cluster holds for one job at one moment."""

    pods: tuple[ObservedPod, ...] = ()
    service: bool = False  # the job's headless Service is there, and is its own
    objects: Mapping[ObjectRef, ObservedObject] = field(default_factory=dict)  # what else it has: claims, …
    metrics_readers: tuple[Mapping[str, Any], ...] = ()  # who else may read metrics: peers of a NetworkPolicy
    metrics_open: bool = False  # whether all may read metrics of jobs that do not ask for a NetworkPolicy
    unserved: frozenset[tuple[str, str]] = frozenset()  # (apiVersion, kind) that the operator may not make
    foreign: tuple[str, ...] = ()  # "Kind/name" of objects with our names that others own
    left_over: tuple[str, ...] = ()  # "Kind/name" of what a deleted job of our name left, for the moment
    refused: str | None = None  # the API server's sentence when it last refused to create anything, for now
    over_quota: bool = False  # whether what was refused is a pod, for which a quota has no room
    rejected: str | None = None  # the API server's sentence when it refused to create a thing for good
    progress: JobProgress | None = None  # what the present trainer 0 was last heard to say
    one_machine: bool = False  # every life of a replica finds the same files and programs
    new_key: str | None = field(default=None, repr=False, compare=False)  # random; for a life that has none
    departed: tuple[ObservedPod, ...] = ()  # own pods that were seen to be deleted, as they were last


@dataclass(frozen=True, slots=True)
class CreateService:
    """Create the job's headless Service."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """Create one replica's pod.

    The first pod of a life brings the key that all others get. It is created alone, and where there is one of
    its name already, that one may have another key: look again.
    """

    manifest: Mapping[str, Any] = field(repr=False)  # it has the job's key
    brings_key: bool = False


@dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete one pod, only if it is still the pod with this uid.

    Where the decision rests on what the pod does, and not on which pod it is, it must also be as it was seen.
    """

    name: str
    uid: str
    grace_period_seconds: int | None = None  # None: the pod's own; 0: at once, for a node that is gone
    version: str | None = None  # resourceVersion at which it is to be deleted; None: any


@dataclass(frozen=True, slots=True)
class DeleteService:
    """Delete the job's headless Service, if it is as it was last seen."""

    name: str


@dataclass(frozen=True, slots=True)
class EnsureObject:
    """Create what the job needs beside its pods and its Service, if it is not there."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """Delete what the job needs no more, if it is the job's own and as it was last seen."""

    ref: ObjectRef


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job itself, when its time to live after it finished is over.

    It must still be as it was when that was decided: somebody may have given it more time.
    """

    uid: str


Action = CreateService | CreatePod | DeletePod | DeleteService | EnsureObject | DeleteObject | DeleteJob


@dataclass(frozen=True, slots=True)
class Event:
    """Something a person should see in ``kubectl describe``."""

    type: str  # Normal or Warning
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step for one job: first the status, then the actions, in this order."""

    status: FleetJobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: timedelta | None = None  # look again by then even if nothing happens
    urgent: bool = field(default=True)  # False: only counts changed, the write may wait a little
