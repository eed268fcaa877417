"""Asks replicas how far they are, beside everything else: no plan and no write ever waits for an answer.

A training pod needs no rights to be asked, and the operator none to its logs: it reads ``/progress`` on the
pod's own address. What answers there is the job's own code, so nothing is followed, an answer is cut off
where it grows too long, and its numbers are checked (`fleet_operator.plan.observe.progress`).
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
"""The longest answer; a trainer's own, with all 512 points of its curve, is a third of it."""

BUFFER_BYTES = 1 << 14
"""How much of an answer may wait unread; a stream reader holds up to twice as much."""

INTERVAL_SECONDS = 15.0
"""How often one job is asked, and so how often its status is written for its progress at most."""

SILENT_SECONDS = 30.0
"""How often one is asked at last that has told no step yet; most such jobs never do."""

FIRST_AGAIN_SECONDS = 4.0
"""How soon it is asked again at first, and twice as long later each time."""

YOUNG = timedelta(seconds=4)
"""For how long a trainer that has started is left alone: it imports PyTorch, and has nothing to tell."""

TICK_SECONDS = 1.0
"""How often somebody looks which jobs are to be asked."""

CONCURRENT = 32
"""How many are asked at once: a thousand jobs that all stay silent take 32 s, one after another 17 min.

The longest answers of all of them take 3 MiB together.
"""

PACE_READINGS = 8
"""Over how many readings the pace is measured that the estimate rests on: two minutes."""


async def fetch_progress(host: str, port: int) -> Progress | None:
    """Ask a replica; None if it does not answer in time or has nothing to tell."""
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            reader, writer = await asyncio.open_connection(host, port, limit=BUFFER_BYTES)
            try:
                shown = f"[{host}]" if ":" in host else host
                writer.write(f"GET /progress HTTP/1.0\r\nHost: {shown}\r\n\r\n".encode())
                answer = await _read(reader)
            finally:
                writer.close()
    except OSError:  # TimeoutError is one
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    return parse_progress(body.decode(errors="replace")) if b" 200 " in head.split(b"\r\n")[0] else None


async def _read(reader: asyncio.StreamReader) -> bytes:
    data = b""
    while len(data) < MAX_BYTES and (more := await reader.read(MAX_BYTES - len(data))):
        data += more
    return data


class Target(NamedTuple):
    """Whom to ask about a job."""

    job: Key
    pod_uid: str
    host: str
    port: int


def targets(view: ClusterView, now: datetime, is_due: IsDue = lambda *_: True) -> Iterator[Target]:
    """Return trainer 0 of each job that runs: its own pod, at the address that its kubelet has told.

    When it started is told by the clock of its node: what starts only later by ours is asked as well.

    Parameters
    ----------
    view : ClusterView
    now : datetime
    is_due : callable, optional
        Told a job and the uid of its trainer 0: whether that pod is to be asked now. It spares the closer
        look at most jobs, of which each is due every 15 s or less often.
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
    """What one pod has told."""

    pod_uid: str
    asked_at: float
    told: JobProgress | None = None
    unanswered: int = 0
    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_READINGS))

    def interval_seconds(self) -> float:
        """Return how long to leave it alone: a script that has just begun is soon about to answer."""
        if self.told is not None:
            return INTERVAL_SECONDS
        return min(SILENT_SECONDS, FIRST_AGAIN_SECONDS * 2.0 ** (self.unanswered - 1))

    def pace(self) -> float | None:
        """Return the steps per second of late."""
        (earlier, step), (later, now_at) = self.steps[0], self.steps[-1]
        return (now_at - step) / (later - earlier) if later > earlier and now_at > step else None


class ProgressReader:
    """Knows how far each running job was when it was last asked.

    Parameters
    ----------
    find : callable
        Whom there is to ask now, of those that it is told are due; see `targets`.
    notify : callable
        Told of each job whose progress has moved.
    now : callable
        The time of day.
    fetch : callable
        Asks one replica; must end by itself soon.
    on_read : callable, optional
        Told of each question whether it was answered.
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
        """Return what this pod of a job was last heard to say."""
        heard = self._heard.get(job)
        return heard.told if heard is not None and heard.pod_uid == pod_uid else None

    async def run(self) -> None:
        """Ask, for ever."""
        while True:
            await self.ask()
            await asyncio.sleep(TICK_SECONDS)

    async def ask(self) -> None:
        """Ask everyone who has been left alone for long enough, a bounded number of them at once."""
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
            for target in waiting:  # all workers share the one iterator
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
        except Exception:  # a user's code has answered: whatever it is, the other jobs go on
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
    """Whether the training is elsewhere; that time has passed alone is no news."""
    if before is None:
        return True
    return (before.step, before.total_steps, before.loss) != (after.step, after.total_steps, after.loss)
