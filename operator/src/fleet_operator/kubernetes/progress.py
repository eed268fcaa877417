"""Reads the progress of running jobs in the background, so that passes never wait for it.

Neither the training pods nor the operator need additional permissions: the operator reads ``/progress`` at
the pod's address. Because the job's own code responds, redirects are not followed, long responses are cut
off, and numbers are checked (`fleet_operator.plan.observe.progress`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from fleet_operator.api import JobState, Role
from fleet_operator.api.names import pod_name
from fleet_operator.build import replica_ports
from fleet_operator.cluster import Key
from fleet_operator.plan.model import PodPhase
from fleet_operator.plan.observe.progress import Progress, job_progress, parse_progress

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Iterator
    from datetime import datetime

    from fleet_operator.api import JobProgress
    from fleet_operator.kubernetes.informer_cache import ClusterView

    IsDue = Callable[[Key, str], bool]

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 1.0

MAX_BYTES = 1 << 16
"""The maximum size of a response; the runtime's longest one, with 512 curve points, has a third of it."""

BUFFER_BYTES = 1 << 14
"""The size of a response's read buffer; a stream reader holds up to twice as much."""

INTERVAL_SECONDS = 15.0
"""The interval between requests for a job's progress, and so the minimum between status writes for it."""

SILENT_SECONDS = 30.0
"""The maximum interval for a job that has reported no step yet, because most such jobs never will."""

FIRST_AGAIN_SECONDS = 4.0
"""The first interval for a job that has reported no step yet; it doubles with each request."""

YOUNG = timedelta(seconds=4)
"""How long after a trainer's start its progress is not read, because it imports PyTorch first."""

TICK_SECONDS = 1.0
"""How often the loop checks which jobs are due for a request."""

CONCURRENT = 32
"""The number of concurrent requests, with which 1000 unresponsive jobs take 32 s instead of 17 min.

Their longest responses take 3 MiB together.
"""

PACE_READINGS = 8
"""The number of readings from which the pace is estimated, which cover about two minutes."""


async def fetch_progress(host: str, port: int) -> Progress | None:
    """Request a replica's progress; return None if the replica has none or does not respond in time."""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=BUFFER_BYTES)
            try:
                shown = f"[{host}]" if ":" in host else host
                # With HTTP/1.0, the end of the connection is the end of the response, and no part is chunked.
                writer.write(f"GET /progress HTTP/1.0\r\nHost: {shown}\r\n\r\n".encode())
                answer = await _read(reader)
            finally:
                writer.close()
    except OSError:  # OSError includes TimeoutError
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    return parse_progress(body.decode(errors="replace")) if b" 200 " in head.split(b"\r\n")[0] else None


async def _read(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while len(data) < MAX_BYTES and (more := await reader.read(MAX_BYTES - len(data))):
        data += more
    return data


class Target(NamedTuple):
    """The replica whose progress counts as its job's progress."""

    job: Key
    pod_uid: str
    host: str
    port: int


def targets(view: ClusterView, now: datetime, is_due: IsDue = lambda *_: True) -> Iterator[Target]:
    """Yield the target of each running job: trainer 0, with its pod's address.

    The start time comes from the node's clock, so a pod that starts in the future by our clock is also read.

    Parameters
    ----------
    view : ClusterView
    now : datetime
    is_due : callable, optional
        Whether the given job's trainer 0, by its uid, is due now. It avoids inspecting most jobs, because
        each of them is due at most every 15 s.
    """
    for job in view.jobs:
        if job.status.state not in (JobState.RUNNING, JobState.RESTARTING):
            continue
        key = Key.of(job)
        entry = view.owned.pods.get(Key(key.namespace, pod_name(key.name, Role.TRAINER, 0)))
        if entry is None or not is_due(key, entry.uid):
            continue
        if entry.owner is None or entry.owner.uid != job.metadata.uid or job.managed_elsewhere:
            continue
        pod = entry.value
        young = pod.started_at is not None and timedelta() <= now - pod.started_at < YOUNG
        if pod.ip is not None and pod.phase is PodPhase.RUNNING and pod.deleted_at is None and not young:
            port = pod.metrics_port or replica_ports(job, Role.TRAINER, 0).metrics
            yield Target(key, pod.uid, pod.ip, port)


@dataclass(slots=True)
class _Heard:
    """The latest progress of one pod, and when to request it again."""

    pod_uid: str
    asked_at: float
    told: JobProgress | None = None
    unanswered: int = 0
    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_READINGS))

    def interval_seconds(self) -> float:
        """Return the seconds until the next request, which depend on whether a step has been reported."""
        if self.told is not None:
            return INTERVAL_SECONDS
        return min(SILENT_SECONDS, FIRST_AGAIN_SECONDS * 2.0 ** (self.unanswered - 1))

    def pace(self) -> float | None:
        """Return the steps per second over the recent readings, or None if unknown."""
        (earlier, step), (later, now_at) = self.steps[0], self.steps[-1]
        return (now_at - step) / (later - earlier) if later > earlier and now_at > step else None


class ProgressReader:
    """Polls and caches the progress of each running job.

    Parameters
    ----------
    find : callable
        Returns the replicas to read now, given which are due; see `targets`.
    notify : callable
        Called with each job whose progress has changed.
    now : callable
        The time of day.
    fetch : callable
        Reads one replica, within a time limit.
    on_read : callable, optional
        Called after each reading, with whether it succeeded.
    """

    def __init__(
        self,
        find: Callable[[IsDue], Iterable[Target]],
        notify: Callable[[Key], None],
        *,
        now: Callable[[], datetime],
        fetch: Callable[[str, int], Awaitable[Progress | None]] = fetch_progress,
        on_read: Callable[[bool], None] | None = None,
    ) -> None:
        self._find = find
        self._notify = notify
        self._now = now
        self._fetch = fetch
        self._on_read = on_read
        self._heard: dict[Key, _Heard] = {}

    def of(self, job: Key, pod_uid: str) -> JobProgress | None:
        """Return the latest known progress of a job's pod."""
        heard = self._heard.get(job)
        return heard.told if heard is not None and heard.pod_uid == pod_uid else None

    async def run(self) -> None:
        """Poll the progress of running jobs until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(TICK_SECONDS)

    async def ask(self) -> None:
        """Request the progress of all replicas that are due, at most `CONCURRENT` at a time."""
        loop = asyncio.get_running_loop()
        now, spared = loop.time(), set[Key]()

        def is_due(job: Key, pod_uid: str) -> bool:
            heard = self._heard.get(job)
            if heard is None or heard.pod_uid != pod_uid or now - heard.asked_at >= heard.interval_seconds():
                return True
            spared.add(job)
            return False

        due = {target.job: target for target in self._find(is_due)}
        self._heard = {key: heard for key, heard in self._heard.items() if key in due or key in spared}
        waiting = iter(due.values())

        async def work() -> None:
            for target in waiting:  # all workers share one iterator
                await self._ask(target, loop)

        async with asyncio.TaskGroup() as group:
            for _ in range(min(CONCURRENT, len(due))):
                group.create_task(work())

    async def _ask(self, target: Target, loop: asyncio.AbstractEventLoop) -> None:
        heard = self._heard.get(target.job)
        if heard is None or heard.pod_uid != target.pod_uid:
            heard = self._heard[target.job] = _Heard(target.pod_uid, loop.time())
        progress = None
        try:
            progress = await self._fetch(target.host, target.port)
        except Exception:  # user code responded: an invalid response must not affect other jobs
            logger.exception("reading the progress", extra={"job": str(target.job)})
        heard.asked_at = loop.time()
        if self._on_read is not None:
            self._on_read(progress is not None)
        if progress is None or progress.step is None:
            heard.unanswered = min(heard.unanswered + 1, 10)
            return
        heard.steps.append((heard.asked_at, progress.step))
        told = job_progress(progress, steps_per_second=heard.pace(), moment=self._now())
        if told is not None and _moved(heard.told, told):
            heard.told = told
            self._notify(target.job)


def _moved(before: JobProgress | None, after: JobProgress) -> bool:
    """Return whether the step, the total number of steps or the loss has changed."""
    if before is None:
        return True
    return (before.step, before.total_steps, before.loss) != (after.step, after.total_steps, after.loss)
