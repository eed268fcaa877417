"""What a run on this machine is given, and what that makes of a built pod, and of its command."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fleet_operator.api import Role
from fleet_operator.api.names import LABEL_ATTEMPT, LABEL_INDEX, LABEL_ROLE
from fleet_operator.cluster.local_env import local_command
from fleet_operator.cluster.local_gpus import VISIBLE, share_of
from fleet_operator.cluster.local_pod import LocalPod
from fleet_operator.cluster.local_volumes import CHECKPOINT, Given, folders_of, places
from fleet_operator.plan.model import Attempt

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from fleet_operator.api import FleetJob
    from fleet_operator.build import Hosts
    from fleet_operator.cluster.local_env import LocalCommand

THREADS = "OMP_NUM_THREADS"


@dataclass(frozen=True, slots=True)
class LocalSettings:
    """What a run on this machine is given.

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
        What stands for Secrets, ConfigMaps and volumes.
    python : str
        The interpreter that ``python`` and ``python3`` mean.
    num_threads : int
        OMP_NUM_THREADS where a template does not set it: a limit on CPUs, from which the built pod has its
        own, is not applied here.
    defaults, overrides : mapping
        Variables for replicas that do not set them, and variables that win.
    gpus : sequence of str
        What trainers that ask for GPUs get their shares of, as of `visible_gpus`.
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
        """Return what becomes of a built pod here."""
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
            probed_port=job.port(role) if role is Role.PSERVER else None,  # the others have no probe
        )

    def command(self, job: FleetJob, pod: LocalPod) -> LocalCommand:
        """Return what to start for a pod; the folders that are its own are made."""
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
        """Return where the pod's volumes are here, and make the folders that are its own."""
        given = self.given.volumes
        spec, own = pod.manifest["spec"], self.scratch / f"{pod.uid}-volumes"
        folders = folders_of(spec, given, replica=pod.replica, own=own)
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        found = places(spec, folders)
        if job.spec.checkpoint is not None and CHECKPOINT in given:  # all roles hear of it, mounted or not
            found[job.spec.checkpoint.mount_path.rstrip("/")] = str(given[CHECKPOINT])
        return found
