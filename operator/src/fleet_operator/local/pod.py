"""A replica's attempt on this machine: its settings, GPUs and state.

Each trainer gets a share of the machine's GPUs, as on a cluster.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.api.names import JOB_KEY, LABEL_ATTEMPT, LABEL_INDEX, LABEL_ROLE
from fleet_operator.local.container import (
    CHECKPOINT,
    NVIDIA,
    Given,
    folders_of,
    local_command,
    main_container,
    places,
)
from fleet_operator.plan.model import Attempt, ObservedPod, PodPhase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from fleet_operator.api import FleetJob
    from fleet_operator.build import Hosts
    from fleet_operator.local.container import LocalCommand

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICE = re.compile(r"nvidia\d+")

GRACE_SECONDS = 30
"""The default of terminationGracePeriodSeconds."""

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class LocalPod:
    """One attempt of a replica, run as a process on this machine."""

    manifest: Mapping[str, Any]
    uid: str
    role: Role
    index: int
    attempt: Attempt
    host: str
    log: Path
    termination_log: Path
    created_at: datetime
    probed_port: int | None = None  # the pod is ready once it listens here, or as soon as it runs if None
    log_start: int = 0  # the offset of this attempt's output in the log
    phase: PodPhase = PodPhase.PENDING
    ready: bool = False
    pid: int | None = None
    started_at: datetime | None = None
    finished_at: datetime | None = None
    deleted_at: datetime | None = None
    exit_code: int | None = None
    reason: str | None = None
    message: str | None = None

    @property
    def name(self) -> str:
        """The pod's name."""
        return str(self.manifest["metadata"]["name"])

    @property
    def replica(self) -> str:
        """The replica's name in its job, such as trainer-1."""
        return f"{self.role.value}-{self.index}"

    @property
    def ended(self) -> bool:
        """True if the pod's process has ended."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def grace_seconds(self) -> int:
        """The seconds between SIGTERM and SIGKILL for the pod's process."""
        seconds = self.manifest["spec"].get("terminationGracePeriodSeconds")
        return GRACE_SECONDS if seconds is None else int(seconds)

    def observed(self) -> ObservedPod:
        """Return the pod's state in the form that plans use."""
        _, container = main_container(self.manifest["spec"])
        variables = {each["name"]: each.get("value") for each in container.get("env") or ()}
        return ObservedPod(
            name=self.name,
            uid=self.uid,
            role=self.role,
            index=self.index,
            attempt=self.attempt,
            phase=self.phase,
            ready=self.ready,
            deleted_at=self.deleted_at,
            created_at=self.created_at,
            started_at=self.started_at,
            finished_at=self.finished_at,
            container=container["name"],
            exit_code=self.exit_code,
            reason=self.reason,
            message=self.message,
            node="localhost",
            key=variables.get(JOB_KEY) or None,
        )


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """The settings of a local run.

    Attributes
    ----------
    workdirs : mapping
        The working directory of each role's replicas.
    logs : Path
        The folder of the replicas' logs; it exists.
    scratch : Path
        A folder for termination logs, and for the emptyDirs of the pods; it exists.
    environ : mapping
        The environment that replicas inherit.
    given : Given
        The replacements of Secrets, ConfigMaps and volumes.
    python : str
        The interpreter for ``python`` and ``python3``.
    num_threads : int
        OMP_NUM_THREADS if a template does not set it: the CPU limit, from which the built pod has its
        own, is not applied here.
    defaults, overrides : mapping
        Variables for replicas that do not set them, and variables that override theirs.
    gpus : sequence of str
        The GPUs to divide among the trainers that request some, from `visible_gpus`.
    """

    workdirs: Mapping[Role, Path]
    logs: Path
    scratch: Path
    environ: Mapping[str, str]
    python: str
    num_threads: int
    given: Given = field(default_factory=Given)
    defaults: Mapping[str, str] = field(default_factory=dict)
    overrides: Mapping[str, str] = field(default_factory=dict)
    gpus: Sequence[str] = ()

    def pod(self, job: FleetJob, manifest: Mapping[str, Any], hosts: Hosts, now: datetime) -> LocalPod:
        """Convert a pod that was built for the cluster to a local pod."""
        uid = str(uuid.uuid4())
        metadata = {**manifest["metadata"], "uid": uid}
        labels = metadata["labels"]
        role, index = Role(labels[LABEL_ROLE]), int(labels[LABEL_INDEX])
        return LocalPod(
            manifest={**manifest, "metadata": metadata},
            uid=uid,
            role=role,
            index=index,
            attempt=Attempt.parse(labels[LABEL_ATTEMPT]),
            host=hosts(role, index),
            log=self.logs / f"{role.value}-{index}.log",
            termination_log=self.scratch / uid,
            created_at=now,
            probed_port=job.port(role) if role is Role.PSERVER else None,  # other replicas have no probe
        )

    def command(self, job: FleetJob, pod: LocalPod) -> LocalCommand:
        """Create the folders of a pod's volumes, and return the pod's command."""
        overrides = {**self.overrides, "FLEET_TERMINATION_LOG": str(pod.termination_log)}
        given = self.given.variables or {}
        variables = {variable.name for variable in job.template(pod.role).main_container.env or ()}
        if THREADS not in variables | given.keys():
            overrides[THREADS] = str(self.num_threads)
        if VISIBLE not in variables:
            overrides |= share_of(self.gpus, job, pod.role, pod.index)
        return local_command(
            pod.manifest,
            host=pod.host,
            environ=self.environ,
            python=self.python,
            defaults=self.defaults,
            overrides=overrides,
            given=given,
            places=self._places(job, pod),
        )

    def _places(self, job: FleetJob, pod: LocalPod) -> dict[str, str]:
        """Create the folders of the pod's volumes; return them by mount path."""
        given = self.given.volumes
        spec, own = pod.manifest["spec"], self.scratch / f"{pod.uid}-volumes"
        folders = folders_of(spec, given, replica=pod.replica, own=own)
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        found = places(spec, folders)
        if job.spec.checkpoint is not None and CHECKPOINT in given:  # for all roles, mounted or not
            found[job.spec.checkpoint.mount_path.rstrip("/")] = str(given[CHECKPOINT])
        return found


def visible_gpus(environ: Mapping[str, str], devices: Iterable[str]) -> tuple[str, ...]:
    """Return the GPUs visible to a process with this environment, as named in CUDA_VISIBLE_DEVICES.

    Parameters
    ----------
    environ : mapping
        The environment. The variable `VISIBLE` selects GPUs; without it, all are visible.
    devices : iterable of str
        The names in /dev. CUDA renumbers the existing devices; a container may have only a few of the node's.
    """
    if (chosen := environ.get(VISIBLE)) is not None:
        return tuple(each.strip() for each in chosen.split(",") if each.strip() not in ("", "-1"))
    return tuple(
        str(number) for number in range(sum(_DEVICE.fullmatch(name) is not None for name in devices))
    )


def too_few(gpus: Sequence[str], job: FleetJob) -> str:
    """Return a warning if this machine has GPUs but fewer than requested, else an empty string."""
    wanted = _each(job) * job.replicas(Role.TRAINER)
    if not 0 < len(gpus) < wanted:
        return ""
    return (
        f"the trainers request {wanted} GPUs, but this machine has {len(gpus)}: each trainer sees all of them"
    )


def share_of(gpus: Sequence[str], job: FleetJob, role: Role, index: int) -> dict[str, str]:
    """Return the variable that limits a replica to its GPUs, or {} if it needs none or too few exist.

    Parameters
    ----------
    gpus : sequence of str
        The GPUs, from `visible_gpus`.
    job : FleetJob
        The job, whose `trainer.devices` or else trainer template requests NVIDIA GPUs.
    role, index : Role, int
        The replica.
    """
    each = _each(job)
    if role is not Role.TRAINER or each == 0 or len(gpus) < each * job.replicas(role):
        return {}
    return {VISIBLE: ",".join(gpus[each * index : each * (index + 1)])}


def _each(job: FleetJob) -> int:
    """Return the number of NVIDIA GPUs per trainer, from `trainer.devices` or else the pod template."""
    devices = job.spec.trainer.devices
    if devices is not None and devices.resource_name == NVIDIA:
        return devices.count
    resources = job.template(Role.TRAINER).main_container.resources
    asked = str((resources.limits or {}).get(NVIDIA, 0)) if resources is not None else "0"
    return int(asked) if asked.isdecimal() else 0
