"""The local cluster: the same plans, carried out with processes of this machine from the same built pods.

A pod is a process that the guardian keeps (`guardian`), at a loopback address of its own
(`local_address`), started as its manifest says (`local_env`). Everything here runs on one event loop.
What changes, an exit or a server that becomes ready, ends in a call of `changed`, upon which the engine
looks at the job again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import uuid
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

from fleet_operator.api import Role
from fleet_operator.api.names import LABEL_ATTEMPT, LABEL_INDEX, LABEL_ROLE
from fleet_operator.cluster.interface import KEY_BYTES, ConflictError, Key
from fleet_operator.cluster.local_env import local_command, main_container
from fleet_operator.cluster.local_gpus import VISIBLE, share_of
from fleet_operator.cluster.local_guard import Exited, Guard, GuardianLostError, Started
from fleet_operator.cluster.local_log import begin_log, tail
from fleet_operator.cluster.local_volumes import CHECKPOINT, Given, folders_of, places
from fleet_operator.cluster.observe import job_key
from fleet_operator.plan.model import (
    Attempt,
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
    ObservedPod,
    PodPhase,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from datetime import datetime
    from pathlib import Path

    from fleet_operator.api import FleetJob, FleetJobStatus
    from fleet_operator.build import Hosts
    from fleet_operator.plan.model import Action, Event

logger = logging.getLogger(__name__)

GRACE_SECONDS = 30  # terminationGracePeriodSeconds where the pod has none
MESSAGE_BYTES = 4096  # of a termination log, as the kubelet keeps
THREADS = "OMP_NUM_THREADS"
READY_POLL_SECONDS = 0.1
READY_TELL_SECONDS = 60.0  # a server that is being started imports torch, and builds its model


@dataclass(frozen=True, slots=True)
class LocalPod:
    """One life of a replica on this machine."""

    manifest: Mapping[str, Any]
    uid: str
    role: Role
    index: int
    attempt: Attempt
    host: str
    log: Path
    termination_log: Path
    created_at: datetime
    log_start: int = 0  # where this life begins in the log
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
        """The replica's name within its job, such as trainer-1."""
        return f"{self.role.value}-{self.index}"

    @property
    def ended(self) -> bool:
        """Whether its process is gone."""
        return self.phase in (PodPhase.SUCCEEDED, PodPhase.FAILED)

    @property
    def grace_seconds(self) -> int:
        """How long its process may take to end after SIGTERM."""
        seconds = self.manifest["spec"].get("terminationGracePeriodSeconds")
        return GRACE_SECONDS if seconds is None else int(seconds)

    def observed(self) -> ObservedPod:
        """Return what a plan sees of it."""
        _, container = main_container(self.manifest["spec"])
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
            key=job_key(self.manifest),
        )


class Listener(Protocol):
    """Who wants to know what happens: the runner's table and lines."""

    def pod_changed(self, pod: LocalPod) -> None:
        """Note that a pod was created, started, became ready or ended."""

    def status_written(self, before: FleetJob, after: FleetJob) -> None:
        """Note that the job's status was replaced."""

    def recorded(self, event: Event) -> None:
        """Note an event of the job."""


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


class ProcessCluster:
    """Carries out the plans of one job on this machine; see `fleet_operator.cluster.interface.Cluster`.

    Parameters
    ----------
    job : FleetJob
        The job, with its uid; `local_limits.refusals` has found nothing in it.
    hosts : Hosts
        The claimed loopback address of each replica.
    settings : LocalSettings
        Folders, interpreter and environment.
    now : callable
        The time of day.
    listener : Listener
        Told of everything that a person may want to see.
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
        self._key = Key(job.metadata.namespace, job.metadata.name)
        self._hosts = hosts
        self._settings = settings
        self._now = now
        self._listener = listener
        self._service = False
        self._objects: set[ObjectRef] = set()
        self._pods: dict[str, LocalPod] = {}  # by name
        self._probes: dict[str, asyncio.Task[None]] = {}  # by uid
        self._guard = Guard(self._reported, self._guardian_lost, hold)
        self._lost: asyncio.Future[None] | None = None
        self._none_alive = asyncio.Event()
        self._none_alive.set()
        self.changed: Callable[[Key], None] = lambda _: None

    async def start(self) -> None:
        """Start the guardian."""
        self._lost = asyncio.get_running_loop().create_future()
        await self._guard.start()

    async def close(self) -> None:
        """Stop every process, and return when none is left."""
        for probe in self._probes.values():
            probe.cancel()
        await self._guard.close()

    async def guardian_lost(self) -> None:
        """Wait until the guardian dies, which it should not: raises GuardianLostError."""
        if self._lost is None:
            raise RuntimeError("the cluster has not been started: call start() first")
        await asyncio.shield(self._lost)

    def stop_all(self, *, grace_seconds: float | None = None) -> None:
        """Stop every process, within `grace_seconds` or within the time that its pod gives it."""
        for pod in self.pods:
            if not pod.ended:
                self._guard.stop(pod.uid, pod.grace_seconds if grace_seconds is None else grace_seconds)

    async def none_alive(self) -> None:
        """Wait until no process runs; `stop_all` bounds how long that takes."""
        await self._none_alive.wait()

    @property
    def pods(self) -> tuple[LocalPod, ...]:
        """The pods that there are now."""
        return tuple(self._pods.values())

    def job(self, key: Key) -> FleetJob | None:
        """Return the job, or None if it was deleted or `key` is another's."""
        return self._job if key == self._key else None

    def observe(self, job: FleetJob) -> Observed:  # noqa: ARG002  there is one job here
        """Return what is there; writes on this machine are seen at once."""
        return Observed(
            pods=tuple(pod.observed() for pod in self.pods),
            service=self._service,
            objects=dict.fromkeys(self._objects, ObservedObject()),
            one_machine=True,
            new_key=secrets.token_hex(KEY_BYTES),
        )

    def hosts(self, job: FleetJob) -> Hosts:  # noqa: ARG002  there is one job here
        """Return the replicas' loopback addresses."""
        return self._hosts

    async def write_status(self, job: FleetJob, status: FleetJobStatus) -> FleetJob:
        """Replace the job's status; ConflictError if `job` is not its newest version."""
        if self._job is None or job.metadata.resource_version != self._job.metadata.resource_version:
            raise ConflictError(f"{self._key} has changed since it was read")
        version = str(int(job.metadata.resource_version or 0) + 1)
        metadata = job.metadata.model_copy(update={"resource_version": version})
        self._job = job.model_copy(update={"metadata": metadata, "status": status})
        self._listener.status_written(job, self._job)
        self.changed(self._key)
        return self._job

    async def apply(self, job: FleetJob, action: Action) -> None:
        """Carry one action out. An action that has been carried out already is no error."""
        match action:
            case CreateService():
                self._service = True
            case DeleteService():
                self._service = False
            case CreatePod(manifest):  # nobody else creates any here
                self._create(job, manifest)
            case DeletePod(name, uid, grace_period_seconds):
                self._delete(name, uid, grace_period_seconds)
            case EnsureObject(manifest):  # nothing here has a use for it
                self._objects.add(ObjectRef.of(manifest))
            case DeleteObject(ref):
                self._objects.discard(ref)
            case DeleteJob():
                self._job = None
                self.stop_all()
        self.changed(self._key)

    async def record(self, job: FleetJob, event: Event) -> None:  # noqa: ARG002  there is one job here
        """Tell people."""
        self._listener.recorded(event)

    def _create(self, job: FleetJob, manifest: Mapping[str, Any]) -> None:
        name = manifest["metadata"]["name"]
        if (existing := self._pods.get(name)) is not None:
            if existing.manifest["metadata"]["labels"] == manifest["metadata"]["labels"]:
                return
            raise ConflictError(f"pod {name} of attempt {existing.attempt} is still there")
        pod = self._new_pod(manifest)
        moment = pod.created_at.astimezone().isoformat(timespec="seconds")
        head = f"=== {pod.replica} of {job.name}, attempt {pod.attempt}, {moment} ==="
        pod = replace(pod, log_start=begin_log(pod.log, head))
        overrides = {**self._settings.overrides, "FLEET_TERMINATION_LOG": str(pod.termination_log)}
        given = self._settings.given
        variables = {variable.name for variable in job.template(pod.role).main_container.env or ()}
        if THREADS not in variables | (given.variables or {}).keys():
            overrides[THREADS] = str(self._settings.num_threads)
        if VISIBLE not in variables:
            overrides |= share_of(self._settings.gpus, job, pod.role, pod.index)
        command = local_command(
            pod.manifest,
            host=pod.host,
            environ=self._settings.environ,
            python=self._settings.python,
            defaults=self._settings.defaults,
            overrides=overrides,
            given=given.variables or {},
            places=self._places(job, pod),
        )
        self._put(pod)
        workdir = self._settings.workdirs[pod.role]
        self._guard.launch(pod.uid, argv=command.argv, env=command.env, cwd=workdir, log=pod.log)

    def _new_pod(self, manifest: Mapping[str, Any]) -> LocalPod:
        uid = str(uuid.uuid4())
        metadata = {**manifest["metadata"], "uid": uid}
        manifest = {**manifest, "metadata": metadata}
        labels = metadata["labels"]
        role, index = Role(labels[LABEL_ROLE]), int(labels[LABEL_INDEX])
        return LocalPod(
            manifest=manifest,
            uid=uid,
            role=role,
            index=index,
            attempt=Attempt.parse(labels[LABEL_ATTEMPT]),
            host=self._hosts(role, index),
            log=self._settings.logs / f"{role.value}-{index}.log",
            termination_log=self._settings.scratch / uid,
            created_at=self._now(),
        )

    def _places(self, job: FleetJob, pod: LocalPod) -> dict[str, str]:
        """Return where the pod's volumes are here, and make the folders that are its own."""
        given = self._settings.given.volumes
        spec, own = pod.manifest["spec"], self._settings.scratch / f"{pod.uid}-volumes"
        folders = folders_of(spec, given, replica=pod.replica, own=own)
        for folder in folders.values():
            folder.mkdir(parents=True, exist_ok=True)
        found = places(spec, folders)
        if job.spec.checkpoint is not None and CHECKPOINT in given:  # all roles hear of it, mounted or not
            found[job.spec.checkpoint.mount_path.rstrip("/")] = str(given[CHECKPOINT])
        return found

    def _delete(self, name: str, uid: str, grace_seconds: int | None) -> None:
        pod = self._pods.get(name)
        if pod is None or pod.uid != uid:
            return
        if pod.ended:
            del self._pods[name]
            return
        grace = pod.grace_seconds if grace_seconds is None else grace_seconds
        due = self._now() + timedelta(seconds=grace)
        if pod.deleted_at is None or due < pod.deleted_at:
            self._guard.stop(uid, grace)
            self._put(replace(pod, deleted_at=due))

    def _put(self, pod: LocalPod) -> None:
        self._pods[pod.name] = pod
        self._note(pod)

    def _note(self, pod: LocalPod) -> None:
        if all(each.ended for each in self._pods.values()):
            self._none_alive.set()
        else:
            self._none_alive.clear()
        self._listener.pod_changed(pod)
        self.changed(self._key)

    def _find(self, uid: str) -> LocalPod | None:
        return next((pod for pod in self._pods.values() if pod.uid == uid), None)

    def _reported(self, report: Started | Exited) -> None:
        pod = self._find(report.id)
        if pod is None:
            return
        if isinstance(report, Started):
            self._started(pod, report)
        else:
            self._exited(pod, report)

    def _started(self, pod: LocalPod, report: Started) -> None:
        ready = pod.role is not Role.PSERVER  # the others have no probe, and so are ready as they run
        pod = replace(pod, phase=PodPhase.RUNNING, pid=report.pid, started_at=self._now(), ready=ready)
        self._put(pod)
        if not ready:
            self._probes[pod.uid] = asyncio.create_task(self._probe(pod), name=f"probe {pod.name}")

    def _exited(self, pod: LocalPod, report: Exited) -> None:
        if (probe := self._probes.pop(pod.uid, None)) is not None:
            probe.cancel()
        failed = report.code != 0
        pod = replace(
            pod,
            phase=PodPhase.FAILED if failed else PodPhase.SUCCEEDED,
            ready=False,
            finished_at=self._now(),
            exit_code=report.code,
            reason="StartError" if report.error else "Error" if failed else "Completed",
            message=report.error or self._last_words(pod, failed=failed),
        )
        if pod.deleted_at is None:
            self._put(pod)
        else:
            del self._pods[pod.name]
            self._note(pod)

    def _last_words(self, pod: LocalPod, *, failed: bool) -> str | None:
        """Return the termination message, else the end of the log, as FallbackToLogsOnError asks for."""
        words = ""
        with contextlib.suppress(OSError):
            words = pod.termination_log.read_bytes()[:MESSAGE_BYTES].decode(errors="replace")
            pod.termination_log.unlink()
        if not words and failed:
            with contextlib.suppress(OSError):
                words = tail(pod.log, pod.log_start)
        return words.strip() or None

    async def _probe(self, pod: LocalPod) -> None:
        """Wait until a parameter server accepts connections on its port; its exit ends the waiting."""
        if (job := self._job) is None:
            return
        port = job.port(Role.PSERVER)
        waited, tell_at = 0.0, READY_TELL_SECONDS
        while not await _accepts(pod.host, port):
            await asyncio.sleep(READY_POLL_SECONDS)
            waited += READY_POLL_SECONDS
            if waited >= tell_at:
                logger.warning(
                    "trainers wait for %s, which has run for %.0f s and does not listen on %s:%d yet;"
                    " its log may say why: %s",
                    pod.replica,
                    waited,
                    pod.host,
                    port,
                    pod.log,
                )
                tell_at *= 2
        if (now := self._find(pod.uid)) is not None and not now.ended:
            self._put(replace(now, ready=True))

    def _guardian_lost(self, error: GuardianLostError) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_exception(error)
        self._none_alive.set()  # no end will be reported any more: close() waits for the processes themselves


async def _accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True
