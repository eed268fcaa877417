"""The local kubelet, which runs pods as processes, probes servers, and reports how pods end.

A pod is a process under the supervisor (`supervisor`), at a loopback address of its own (`addresses`),
started as its manifest says (`container`). Everything here runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from fleet_operator.cluster import ConflictError
from fleet_operator.local.log import begin_log, tail
from fleet_operator.local.supervisor_client import Exited, Started, SupervisorClient, SupervisorLostError
from fleet_operator.plan.model import PodPhase
from fleet_operator.plan.observe.termination_message import last_sentence, parse_words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import datetime

    from fleet_operator.api import FleetJob
    from fleet_operator.build import Hosts
    from fleet_operator.local.pod import LocalPod, LocalSettings

logger = logging.getLogger(__name__)

MESSAGE_BYTES = 4096  # of a termination log, the same limit as the kubelet's
READY_POLL_SECONDS = 0.1
READY_TELL_SECONDS = 60.0  # a starting server imports torch and builds its model


class Kubelet:
    """Runs the pods of one job.

    Parameters
    ----------
    hosts : Hosts
        The claimed loopback address of each replica.
    settings : LocalSettings
        Folders, interpreter and environment.
    now : callable
        The time of day.
    on_change : callable
        Called with a pod that was created, started, became ready, ended, or is gone.
    hold : sequence of int
        Descriptors that stay open until the last process is gone: the locks of the addresses.
    """

    def __init__(
        self,
        *,
        hosts: Hosts,
        settings: LocalSettings,
        now: Callable[[], datetime],
        on_change: Callable[[LocalPod], None],
        hold: tuple[int, ...] = (),
    ) -> None:
        self._hosts = hosts
        self._settings = settings
        self._now = now
        self._on_change = on_change
        self._pods: dict[str, LocalPod] = {}  # by name
        self._probes: dict[str, asyncio.Task[None]] = {}  # by uid
        self._supervisor = SupervisorClient(self._reported, self._supervisor_lost, hold)
        self._lost: asyncio.Future[None] | None = None
        self._none_alive = asyncio.Event()
        self._none_alive.set()

    async def start(self) -> None:
        """Start the supervisor."""
        self._lost = asyncio.get_running_loop().create_future()
        await self._supervisor.start()

    async def close(self) -> None:
        """Stop all processes, and wait until they have ended."""
        for probe in self._probes.values():
            probe.cancel()
        await self._supervisor.close()

    async def supervisor_lost(self) -> None:
        """Wait for the supervisor to end unexpectedly, then raise SupervisorLostError."""
        if self._lost is None:
            raise RuntimeError("the kubelet has not been started: call start() first")
        # A cancelled caller must not cancel the future, which other callers may await.
        await asyncio.shield(self._lost)

    def stop_all(self, *, grace_seconds: float | None = None) -> None:
        """Stop all processes within `grace_seconds`, or within their pods' grace periods if it is None."""
        for pod in self.pods:
            if not pod.ended:
                self._supervisor.stop(pod.uid, pod.grace_seconds if grace_seconds is None else grace_seconds)

    async def none_alive(self) -> None:
        """Wait until no process is running, which takes a bounded time after `stop_all`."""
        await self._none_alive.wait()

    @property
    def pods(self) -> tuple[LocalPod, ...]:
        """The existing pods."""
        return tuple(self._pods.values())

    def create(self, job: FleetJob, manifest: Mapping[str, Any]) -> None:
        """Start a pod unless it exists; raise ConflictError if a different pod has its name."""
        name = manifest["metadata"]["name"]
        if (existing := self._pods.get(name)) is not None:
            if existing.manifest["metadata"]["labels"] == manifest["metadata"]["labels"]:
                return
            raise ConflictError(f"pod {name} of attempt {existing.attempt} is still there")
        pod = self._settings.pod(job, manifest, self._hosts, self._now())
        moment = pod.created_at.astimezone().isoformat(timespec="seconds")
        head = f"=== {pod.replica} of {job.name}, attempt {pod.attempt}, {moment} ==="
        pod = replace(pod, log_start=begin_log(pod.log, head))
        command, workdir = self._settings.command(job, pod), self._settings.workdirs[pod.role]
        self._put(pod)
        self._supervisor.launch(pod.uid, argv=command.argv, env=command.env, cwd=workdir, log=pod.log)

    def delete(self, name: str, uid: str, grace_seconds: int | None) -> None:
        """Stop a pod within `grace_seconds`, by default its own grace period; remove it once it has ended."""
        pod = self._pods.get(name)
        if pod is None or pod.uid != uid:
            return
        if pod.ended:
            del self._pods[name]
            return
        grace = pod.grace_seconds if grace_seconds is None else grace_seconds
        due = self._now() + timedelta(seconds=grace)
        if pod.deleted_at is None or due < pod.deleted_at:
            self._supervisor.stop(uid, grace)
            self._put(replace(pod, deleted_at=due))

    def _put(self, pod: LocalPod) -> None:
        """Record a pod's state, or remove the pod if it was deleted and has ended."""
        if pod.ended and pod.deleted_at is not None:
            del self._pods[pod.name]
        else:
            self._pods[pod.name] = pod
        if all(each.ended for each in self._pods.values()):
            self._none_alive.set()
        else:
            self._none_alive.clear()
        self._on_change(pod)

    def _find(self, uid: str) -> LocalPod | None:
        return next((pod for pod in self._pods.values() if pod.uid == uid), None)

    def _reported(self, report: Started | Exited) -> None:
        pod = self._find(report.id)
        if pod is None:
            return
        if isinstance(report, Exited):
            self._exited(pod, report)
            return
        ready = pod.probed_port is None
        pod = replace(pod, phase=PodPhase.RUNNING, pid=report.pid, started_at=self._now(), ready=ready)
        self._put(pod)
        if pod.probed_port is not None:
            probe = self._probe(pod, pod.probed_port)
            self._probes[pod.uid] = asyncio.create_task(probe, name=f"probe {pod.name}")

    def _exited(self, pod: LocalPod, report: Exited) -> None:
        if (probe := self._probes.pop(pod.uid, None)) is not None:
            probe.cancel()
        failed = report.code != 0
        ended = replace(
            pod,
            phase=PodPhase.FAILED if failed else PodPhase.SUCCEEDED,
            ready=False,
            finished_at=self._now(),
            exit_code=report.code,
            reason="StartError" if report.error else "Error" if failed else "Completed",
            message=report.error or _last_words(pod, failed=failed),
        )
        self._put(ended)

    async def _probe(self, pod: LocalPod, port: int) -> None:
        """Probe a parameter server's port until it accepts connections or the server exits."""
        waited, tell_at = 0.0, READY_TELL_SECONDS
        while not await _accepts(pod.host, port):
            await asyncio.sleep(READY_POLL_SECONDS)
            waited += READY_POLL_SECONDS
            if waited >= tell_at:
                logger.warning(
                    "trainers wait for %s, which has run for %.0f s and does not listen on %s:%d yet;"
                    " see its log: %s",
                    pod.replica,
                    waited,
                    pod.host,
                    port,
                    pod.log,
                )
                tell_at *= 2
        if (now := self._find(pod.uid)) is not None and not now.ended:
            self._put(replace(now, ready=True))

    def _supervisor_lost(self, error: SupervisorLostError) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_exception(error)
        self._none_alive.set()  # no end will be reported: close() waits for the processes themselves


def _last_words(pod: LocalPod, *, failed: bool) -> str | None:
    """Return a pod's termination message, or else the end of its log, as FallbackToLogsOnError does.

    A progress report that a script wrote before it failed does not count, because it does not explain the
    failure.
    """
    words = ""
    with contextlib.suppress(OSError):
        words = pod.termination_log.read_bytes()[:MESSAGE_BYTES].decode(errors="replace")
        pod.termination_log.unlink()
    if failed and not last_sentence(words) and parse_words(words).joined is None:
        with contextlib.suppress(OSError):
            words = tail(pod.log, pod.log_start)
    return words.strip() or None


async def _accepts(host: str, port: int) -> bool:
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError is an OSError
        return False
    writer.close()
    return True
