"""The inputs and outputs of a plan: observed objects, actions and events.

Everything here is a frozen value, so that tests can compare whole plans and both kinds of cluster can carry
out the same actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime, timedelta

    from fleet_operator.api import FleetJobStatus, JobProgress, Role


class Attempt(NamedTuple):
    """An attempt of a replica, identified by the restarts of the job and of the replica.

    A pod with a lower attempt than the status requires is outdated, and is removed.
    """

    job: int = 0
    replica: int = 0

    def __str__(self) -> str:
        """Return the attempt in the form of the pod label ``fleetjob.dev/attempt``."""
        return f"{self.job}.{self.replica}"

    @property
    def restarts(self) -> int:
        """The total number of restarts, as passed to the replica in its environment."""
        return self.job + self.replica

    @classmethod
    def parse(cls, label: str) -> Attempt:
        """Parse a pod's label; an invalid value counts as attempt 0.0, the oldest."""
        job, dot, replica = label.partition(".")
        return cls(int(job), int(replica)) if dot and job.isdigit() and replica.isdigit() else cls()


class PodPhase(StrEnum):
    """The phase of a pod, as in its status."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class ObservedPod:
    """An observed pod that has the name of a job's pod, reduced to the data that decisions use."""

    name: str
    uid: str
    role: Role
    index: int
    attempt: Attempt
    phase: PodPhase
    owned: bool = True  # whether this job controls it, by uid; otherwise, only the name matches
    ready: bool = False
    not_ready_reason: str | None = None  # reason of Ready=False, e.g. NodeNotReady
    not_ready_since: datetime | None = None  # when Ready became False
    disruption: str | None = None  # reason of DisruptionTarget or TerminationTarget: evicted, preempted, …
    disruption_message: str | None = None  # Kueue's sentence in TerminationTarget
    deleted_at: datetime | None = None  # deletionTimestamp: the moment its grace period ends
    created_at: datetime | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    container: str | None = None  # the container that exit_code, reason and message belong to
    exit_code: int | None = None
    reason: str | None = None  # terminated.reason, waiting.reason, or the pod's own (Evicted, …)
    message: str | None = None  # the termination message, or why it waits (the scheduler's message)
    scheduler: str | None = None
    gates: tuple[str, ...] = ()  # scheduling gates
    finalizers: tuple[str, ...] = ()  # finalizers
    node: str | None = None
    ip: str | None = None
    key: str | None = field(default=None, repr=False)  # the key of the job's life, from its main container
    metrics_port: int | None = None  # the port at which it reports its progress
    assigned_ports: tuple[int, ...] = ()  # on its node's network: the first port of each listening replica
    version: str | None = field(
        default=None, compare=False
    )  # resourceVersion; most changes of it are irrelevant


class ObjectRef(NamedTuple):
    """A reference to an object in the job's namespace."""

    api_version: str
    kind: str
    name: str

    @classmethod
    def of(cls, manifest: Mapping[str, Any]) -> ObjectRef:
        """Return a reference to the object that a manifest describes."""
        return cls(manifest["apiVersion"], manifest["kind"], manifest["metadata"]["name"])


@dataclass(frozen=True, slots=True)
class ObservedObject:
    """An additional object of the job, reduced to the data that decisions use."""

    made_from: str | None = None  # the digest in its annotation; None if it has none or is being deleted
    held_back: str | None = None  # of a pending PodGroup: its phase, and its scheduler's message


@dataclass(frozen=True, slots=True)
class Observed:
    """The observed state at one moment: the job's objects in the cluster, and facts about the cluster."""

    pods: tuple[ObservedPod, ...] = ()
    service: bool = False  # whether the job's own headless Service exists
    objects: Mapping[ObjectRef, ObservedObject] = field(default_factory=dict)  # claims, …
    metrics_readers: tuple[Mapping[str, Any], ...] = ()  # the readers of metrics: peers of a NetworkPolicy
    metrics_open: bool = False  # whether any client may read metrics of jobs that require no NetworkPolicy
    unserved: frozenset[tuple[str, str]] = frozenset()  # (apiVersion, kind) that the operator may not create
    foreign: tuple[str, ...] = ()  # "Kind/name" of other owners' objects with our names
    left_over: tuple[str, ...] = ()  # "Kind/name" of remaining objects of a deleted job with our name
    refused: str | None = None  # the API server's message of its last temporary refusal
    over_quota: bool = False  # whether a quota refused a pod
    rejected: str | None = None  # the API server's message of a permanent refusal
    progress: JobProgress | None = None  # the latest progress of the current trainer 0
    queue_message: str | None = None  # why Kueue holds the job back, as its Workload says
    deactivated: bool = False  # whether somebody deactivated the Workload of a group that has lost its pods
    one_machine: bool = False  # whether every attempt of a replica has the same files and programs
    new_key: str | None = field(default=None, repr=False, compare=False)  # random, for a life without a key
    departed: tuple[ObservedPod, ...] = ()  # the last states of own pods whose deletion was observed


@dataclass(frozen=True, slots=True)
class CreateService:
    """The action that creates the job's headless Service."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class CreatePod:
    """The action that creates a replica's pod.

    The first pod of a life determines the key of all other pods, so it is created alone. If a pod with its
    name already exists, that pod may have another key, so another pass follows.
    """

    build: Callable[[], Mapping[str, Any]] = field(repr=False)  # the manifest contains the job's key
    brings_key: bool = False

    @property
    def manifest(self) -> Mapping[str, Any]:
        """The pod's manifest, rebuilt on each access so that a large plan does not hold every manifest."""
        return self.build()


@dataclass(frozen=True, slots=True)
class DeletePod:
    """The action that deletes a pod if it still has the same uid.

    The pod must also be unchanged if the decision depends on its state.
    """

    name: str
    uid: str
    grace_period_seconds: int | None = None  # None: the pod's own; 0: immediately, for a lost node
    version: str | None = None  # the required resourceVersion; None: any


@dataclass(frozen=True, slots=True)
class DeleteService:
    """The action that deletes the job's headless Service unless it has changed."""

    name: str


@dataclass(frozen=True, slots=True)
class EnsureObject:
    """The action that creates an additional object of the job unless it exists."""

    manifest: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class DeleteObject:
    """The action that deletes an unneeded additional object, if the job owns it and it has not changed."""

    ref: ObjectRef


@dataclass(frozen=True, slots=True)
class DeleteJob:
    """The action that deletes the job itself once its ttlSecondsAfterFinished has expired.

    The job must be unchanged, because a person may have extended this time.
    """

    uid: str


Action = CreateService | CreatePod | DeletePod | DeleteService | EnsureObject | DeleteObject | DeleteJob


@dataclass(frozen=True, slots=True)
class Event:
    """A Kubernetes event, as shown by ``kubectl describe``."""

    type: str  # Normal or Warning
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step for a job: a status, to be written first, then actions to execute in order."""

    status: FleetJobStatus
    actions: tuple[Action, ...] = ()
    events: tuple[Event, ...] = ()
    requeue_after: timedelta | None = None  # when the next pass is due even without events
    urgent: bool = field(default=True)  # False: only counts changed, and the write may wait a little
