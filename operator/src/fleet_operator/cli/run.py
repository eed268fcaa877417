"""``fleetjob run``: runs one job on this machine, from its manifest to its summary.

The engine drives the local cluster with the same plans as in Kubernetes. Separate tasks read the replicas'
progress, show the table or the lines, and wait for the end. A run never leaves a process behind: the
cluster's `close` returns when the supervisor has seen the last one end.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from fleet_operator.api import (
    CleanPodPolicy,
    JobState,
)
from fleet_operator.api.names import METRICS_PORT
from fleet_operator.cli.lines import now
from fleet_operator.cli.local_job import RunOptions, claim_port, local_settings, without_cluster
from fleet_operator.cli.run_record import RunRecord
from fleet_operator.cli.view import JobView
from fleet_operator.cluster import Key
from fleet_operator.engine import Engine, Observer, Result
from fleet_operator.kubernetes.progress import fetch_progress
from fleet_operator.local.addresses import Claim, LocalHosts, claim_addresses, job_ports
from fleet_operator.local.cluster import ProcessCluster
from fleet_operator.local.limits import not_applied
from fleet_operator.local.log import printable, split_time
from fleet_operator.local.pod import too_few
from fleet_operator.local.supervisor_client import SupervisorLostError
from fleet_operator.plan.model import PodPhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleet_operator.api import FleetJob
    from fleet_operator.cli.display import Display
    from fleet_operator.cli.replica import ReplicaView

READ_BYTES = 1 << 18
"""The maximum number of bytes per read; output that is written faster is shown with a delay."""


class Follower:
    """Follows a replica's log and shows new lines.

    Parameters
    ----------
    log : Path
        The log, which may not exist yet. Its current content, from an earlier run, is not shown.
    replica : str
        The replica's name, shown before each line.
    show : callable
        Called with each line.
    """

    def __init__(self, log: Path, replica: str, show: Callable[[str], None]) -> None:
        self._log = log
        self._replica = replica
        self._show = show
        self._rest = b""
        self._position = 0
        with contextlib.suppress(FileNotFoundError):
            self._position = log.stat().st_size

    def read(self) -> bool:
        """Read from the log and show complete lines; return whether the log may have more to read."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return False
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._show_line(line)
        return len(data) == READ_BYTES

    def finish(self) -> None:
        """Show the rest of the log, including an incomplete line."""
        while self.read():
            pass
        if self._rest:
            self._show_line(self._rest)
            self._rest = b""

    def _show_line(self, line: bytes) -> None:
        moment, text = split_time(line.decode(errors="replace"))
        clock = "" if moment is None else f"{moment.astimezone():%H:%M:%S} "
        self._show(f"[{self._replica}] {clock}{printable(text)}")


POLL_SECONDS = 1.0
TELL_FAILURE_SECONDS = 2.0  # how long a failure waits for its consequence before it is shown without it
SERVERS_END_SECONDS = 30.0  # how long servers may take to exit by themselves if no policy stops them
CLEAN_UP_SECONDS = 60.0  # beyond the pods' grace period, for the plan's deletions
STOP_GRACE_SECONDS = 10.0  # the maximum between SIGTERM and SIGKILL when the run is stopped
LATE_SECONDS = 5.0  # for the supervisor, beyond the grace period
SILENT_SECONDS = 3.0  # how long to wait silently for the end of a finished job's processes
REFRESH_SECONDS = 0.25
MAX_FAILED_PASSES = 6  # about six seconds with the engine's back-off
TIMED_OUT = 124  # the exit status of timeout(1)
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a run.

    Attributes
    ----------
    view : JobView
        The final state of the job and its replicas.
    logs : Path
        The folder of the replicas' logs.
    wall_seconds : float
        The time from the start of the run until all of its processes have ended.
    stopped_by : int, optional
        The exit status if the run was stopped before the job had finished.
    problem : str, optional
        Why the run itself, not the job, could not continue.
    """

    view: JobView
    logs: Path
    wall_seconds: float
    stopped_by: int | None = None
    problem: str | None = None

    @property
    def failing(self) -> ReplicaView | None:
        """The replica whose failure ended the job."""
        status = self.view.status
        failure = status.last_failure if status.state is JobState.FAILED else None
        replicas = self.view.replicas.values()
        of_pod = (each for each in replicas if failure and each.pod and each.pod.name == failure.pod)
        return next(of_pod, None)

    @property
    def state(self) -> str:
        """The job's state in one word: Stopped if the run was stopped before the job finished."""
        if self.problem is not None and not self.view.status.finished:
            return JobState.FAILED.value
        return self.view.state if self.view.status.finished or not self.stopped_by else "Stopped"

    @property
    def reason(self) -> str | None:
        """The reason for the state, as a single word for programs."""
        return self._told()[0]

    @property
    def message(self) -> str | None:
        """A sentence that explains the state."""
        return self._told()[1]

    def _told(self) -> tuple[str | None, str | None]:
        if self.view.status.finished:
            condition = self.view.status.explanation
            return (None, None) if condition is None else (condition.reason, condition.message)
        if self.problem is not None:
            return "RunFailed", self.problem
        if not self.stopped_by:
            return None, None
        if self.stopped_by == TIMED_OUT:
            return "Timeout", "the run was stopped after --timeout, before the job had finished"
        name = signal.Signals(self.stopped_by - 128).name
        return name, f"the run was stopped by {name}, before the job had finished"

    @property
    def exit_status(self) -> int:
        """The exit status of the command: 0 only if the job has succeeded."""
        if self.view.status.state is JobState.SUCCEEDED:
            return 0
        return self.stopped_by or 1


async def run_job(job: FleetJob, options: RunOptions, display: Display) -> RunResult:
    """Run a job adapted to this machine until it has finished.

    Raises
    ------
    AddressError
        No loopback addresses could be claimed.
    """
    claims: list[Claim] = []
    try:
        job = claim_port(job, options, display, claims)
        ports = job_ports(job)
        addresses = claim_addresses(list(ports.values()), start=os.getpid(), environ=options.environ)
        claims.append(addresses)
        if left_out := not_applied(job.to_manifest(), options.workdirs.values(), options.given):
            display.say(f"not applied on this machine: {', '.join(left_out)}")
        job = without_cluster(job)
        options.logs.mkdir(parents=True, exist_ok=True)
        display.say(f"logs: {options.logs}")
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="fleetjob-"))
            settings = local_settings(job, options, Path(scratch))
            if missing := too_few(settings.gpus, job):
                display.say(missing)
            record = stack.enter_context(
                contextlib.closing(RunRecord(options.logs, job, display.say, runs=options.runs))
            )

            def say(line: str) -> None:
                record.note(line)
                display.say(line)

            view = JobView(job, say)
            hosts = LocalHosts(dict(zip(ports, addresses.hosts, strict=True)))
            hold = tuple(descriptor for claim in claims for descriptor in claim.descriptors)
            cluster = ProcessCluster(job, hosts=hosts, settings=settings, now=now, listener=view, hold=hold)
            result = await Run(cluster, view, display, options, record).run()
            record.finish(view, result.state, result.message or "")
            return result
    finally:
        for claim in claims:
            claim.release()


class Stuck(Observer):
    """Detects repeatedly failing passes, from which a local run does not recover on its own.

    Parameters
    ----------
    tell : callable
        Called once `MAX_FAILED_PASSES` consecutive passes have failed.
    """

    def __init__(self, tell: Callable[[], None]) -> None:
        self._tell = tell
        self._failed = 0

    def passed(self, key: Key, result: Result, seconds: float) -> None:  # noqa: ARG002  one job, any time
        """Record the result of a pass, counting consecutive failures."""
        self._failed = self._failed + 1 if result is Result.FAILED else 0
        if self._failed == MAX_FAILED_PASSES:
            self._tell()


class Run:
    """A run of one job: the engine and the tasks that accompany it.

    Parameters
    ----------
    cluster : ProcessCluster
        The cluster, which has not been started yet.
    view : JobView
        The cluster's listener.
    display : Display
        Shows the view.
    options : RunOptions
        The time-out, the folder of the logs, whether to follow one, and the receiver of scalars.
    record : RunRecord
        Records the states of the view for `fleetjob ui`.
    """

    def __init__(
        self,
        cluster: ProcessCluster,
        view: JobView,
        display: Display,
        options: RunOptions,
        record: RunRecord,
    ) -> None:
        self._cluster = cluster
        self._view = view
        self._display = display
        self._logs = options.logs
        self._timeout_seconds = options.timeout_seconds
        self._scalars = options.scalars
        self._record = record
        self._follower: Follower | None = None
        if options.follow:
            self._follower = Follower(options.logs / "trainer-0.log", "trainer-0", display.say)
        self._key = Key(view.job.metadata.namespace, view.job.metadata.name)
        self._stopped_by: int | None = None
        self._problem: str | None = None
        self._stop = asyncio.Event()
        self._changed = asyncio.Event()

    async def run(self) -> RunResult:
        """Run until the job has finished or the run is stopped."""
        loop = asyncio.get_running_loop()
        started = loop.time()
        handled = [signum for signum in SIGNALS if not _is_ignored(signum)]
        for signum in handled:
            loop.add_signal_handler(signum, self._interrupt, signum)
        try:
            with self._display.showing(self._view):
                await self._cluster.kubelet.start()
                try:
                    await self._drive()
                finally:
                    await self._cluster.kubelet.close()
                    if self._follower is not None:
                        self._follower.finish()
                    self._take_scalars()
                    self._view.tell_failures()
        finally:
            for signum in handled:
                loop.remove_signal_handler(signum)
        return RunResult(self._view, self._logs, loop.time() - started, self._stopped_by, self._problem)

    async def _drive(self) -> None:
        """Run the engine and the accompanying tasks until one of them ends, then stop the others."""
        engine = Engine(self._cluster, workers=1, observer=Stuck(self._give_up))

        def changed(key: Key) -> None:
            engine.enqueue(key)
            self._changed.set()

        self._cluster.changed = changed
        changed(self._key)
        running = asyncio.create_task(engine.run(), name="engine")
        shown = asyncio.create_task(self._show(), name="display")
        watchers = [
            asyncio.create_task(self._finished(), name="end of the job"),
            asyncio.create_task(self._stop.wait(), name="stop"),
            asyncio.create_task(self._cluster.kubelet.supervisor_lost(), name="supervisor"),
            asyncio.create_task(self._poll(), name="progress"),
        ]
        try:
            done, _ = await asyncio.wait(
                [running, shown, *watchers],
                timeout=self._timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                self._stopped_by = TIMED_OUT
                self._display.say(f"not finished within {self._timeout_seconds:g} s: stopping the job")
            for task in done:
                task.result()
        except SupervisorLostError as error:
            self._problem = str(error)
        finally:
            self._view.interrupted = True
            # The engine ends before the pods are stopped, because it would start them again.
            engine.stop()
            await asyncio.gather(running, return_exceptions=True)
            await self._stop_pods()
            for task in (shown, *watchers):
                task.cancel()
            await asyncio.gather(shown, *watchers, return_exceptions=True)

    async def _finished(self) -> None:
        """Wait until the job has finished and its processes have ended or run out of time."""
        while (job := self._cluster.job(self._key)) is not None and not job.status.finished:
            self._changed.clear()
            await self._changed.wait()
        patience = self._clean_up_seconds()
        for seconds in (min(SILENT_SECONDS, patience), patience):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._cluster.kubelet.none_alive()
                return
            if seconds < patience:
                self._display.say(f"waiting for {self._alive()} to end")

    def _alive(self) -> str:
        return ", ".join(pod.replica for pod in self._cluster.kubelet.pods if not pod.ended)

    def _clean_up_seconds(self) -> float:
        if self._view.job.spec.run_policy.clean_pod_policy is CleanPodPolicy.NONE:
            # On a cluster they would continue. Here they end with the run, servers by themselves if possible.
            return SERVERS_END_SECONDS if self._view.status.state is JobState.SUCCEEDED else 0.0
        return CLEAN_UP_SECONDS + max((pod.grace_seconds for pod in self._cluster.kubelet.pods), default=0)

    async def _stop_pods(self) -> None:
        """Stop the processes that are still running, and wait for their end for a limited time."""
        alive = [pod.grace_seconds for pod in self._cluster.kubelet.pods if not pod.ended]
        grace = min(max(alive, default=0), STOP_GRACE_SECONDS)
        self._cluster.kubelet.stop_all(grace_seconds=grace)
        try:
            async with asyncio.timeout(grace + LATE_SECONDS):
                await self._cluster.kubelet.none_alive()
        except TimeoutError:
            waited = grace + LATE_SECONDS
            self._display.say(f"{self._alive()} did not end within {waited:g} s and will be killed")

    def _interrupt(self, signum: int) -> None:
        if self._stopped_by is None:
            name = signal.Signals(signum).name
            self._display.say(f"{name}: stopping all replicas; once more kills them")
            self._stopped_by = 128 + signum
            self._stop.set()
        else:
            self._cluster.kubelet.stop_all(grace_seconds=0)

    def _give_up(self) -> None:
        self._problem = f"{MAX_FAILED_PASSES} consecutive passes have failed, see above"
        self._stop.set()

    async def _poll(self) -> None:
        """Poll the progress of the running replicas until cancelled."""
        while True:
            asked = [
                (replica, replica.pod)
                for replica in self._view.replicas.values()
                if replica.pod is not None and replica.pod.phase is PodPhase.RUNNING
            ]
            answers = await asyncio.gather(*(fetch_progress(pod.host, METRICS_PORT) for _, pod in asked))
            for (replica, pod), progress in zip(asked, answers, strict=True):
                if progress is not None:
                    self._view.progressed(replica, pod.uid, progress, now())
            self._take_scalars()
            self._record.update(self._view)
            await asyncio.sleep(POLL_SECONDS)

    def _take_scalars(self) -> None:
        """Write new values for TensorBoard; a full disk does not end the run."""
        if self._scalars is None:
            return
        try:
            self._scalars.take(self._view.replicas.values())
        except OSError as error:
            self._display.say(f"no more scalars for TensorBoard: {error}")
            self._scalars = None

    async def _show(self) -> None:
        """Update the display until cancelled."""
        while True:
            self._view.tell_failures(older_than=now() - timedelta(seconds=TELL_FAILURE_SECONDS))
            if self._follower is not None:
                self._follower.read()
            self._display.refresh()
            await asyncio.sleep(REFRESH_SECONDS)


def _is_ignored(signum: int) -> bool:
    """Return whether this process ignores a signal, as under nohup."""
    return signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN
