"""The merged logs of a job's replicas, across their restarts.

While logs are followed, one task reads the log of each pod, including pods that replace others. The lines
pass through one short queue. When replicas write faster than the caller takes lines, the queue applies
back-pressure to their connections, so memory use is bounded. Every line is requested with its timestamp, so
that a log whose connection breaks is continued from the last line. A log is requested once the selected
container has started, which may be long after another container of the same pod.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import aiohttp

from fleet_operator.api.names import LABEL_ATTEMPT, LABEL_INDEX, LABEL_ROLE, PLURAL
from fleet_operator.client.summary import Summary
from fleet_operator.kubernetes.client import REQUEST_SECONDS, ApiError, collection
from fleet_operator.kubernetes.observation import main_container

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
    from typing import Any

    from fleet_operator.api import Role
    from fleet_operator.client.session import Session, Watched

LINE_BYTES = 64 * 1024
"""The maximum length of a line; longer lines are shown in pieces."""

STAMP_BYTES = 64
"""The number of bytes at the beginning of a line that always contain its timestamp."""

QUEUED_LINES = 256
RETRY_SECONDS = 1.0
LAST_SECONDS = 3.0
"""How long to wait for further lines of an ended pod's log, which a lost node would never close."""

LAST_TRIES = 3
"""The number of failed requests after which an ended pod's log counts as unreadable."""

_STAMP = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?")

_LENGTH = re.compile(r"\d{1,18}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line of a replica's log.

    Attributes
    ----------
    replica : str
        The replica, such as ``trainer-1``.
    stamped : bytes
        The line after its timestamp, as sent; a later piece of a long line has no timestamp.
    """

    replica: str
    stamped: bytes

    @property
    def text(self) -> str:
        """The line without its timestamp; bytes that are not valid UTF-8 are replaced."""
        return _STAMP.sub(b"", self.stamped, count=1).decode(errors="replace")

    @property
    def time(self) -> datetime | None:
        """The time when the line was written, to the microsecond; None for later pieces of a long line."""
        found = _STAMP.match(self.stamped)
        if found is None:
            return None
        fraction = (found[2] or b"0")[:6]
        return datetime.fromisoformat((found[1] + b"." + fraction + found[3]).decode())


@dataclass(frozen=True, slots=True)
class Wanted:
    """The selected replicas, container and range of log lines."""

    role: Role | None = None
    index: int | None = None
    tail: int | None = None
    since_seconds: int | None = None
    container: str | None = None

    def takes(self, pod: Mapping[str, Any]) -> bool:
        """Return whether a pod belongs to one of the selected replicas."""
        labels = pod["metadata"].get("labels") or {}
        return (self.role is None or labels.get(LABEL_ROLE) == self.role.value) and (
            self.index is None or labels.get(LABEL_INDEX) == str(self.index)
        )

    def container_of(self, pod: Mapping[str, Any]) -> str:
        """Return the name of the selected container, which the pod may not have."""
        return self.container or main_container(pod)

    def params(self, pod: Mapping[str, Any]) -> dict[str, str]:
        """Return the query parameters of a request for the pod's log."""
        params = {"container": self.container_of(pod), "timestamps": "true"}
        if self.tail is not None:
            params["tailLines"] = str(self.tail)
        if self.since_seconds is not None:
            params["sinceSeconds"] = str(self.since_seconds)
        return params


@dataclass(slots=True, eq=False)
class _Reading:
    """The state of a task that reads one pod's log."""

    pod: Mapping[str, Any]
    reader: asyncio.Task[None]
    lines: int = 0  # the number of lines read so far
    release: asyncio.Task[None] | None = None  # stops the reader after the pod has ended


class Logs:
    """Reads the logs of one job's replicas.

    Parameters
    ----------
    session : Session
        The API server.
    job : str
        The job's name.
    wanted : Wanted
        The selection of replicas and lines.
    note : callable
        Called with remarks about the job and its pods, such as why a log cannot be read.

    Attributes
    ----------
    failed : bool
        After the last line: whether no log could be read. The last note gives the reason.
    """

    def __init__(
        self,
        session: Session,
        job: str,
        wanted: Wanted,
        *,
        note: Callable[[str], None],
    ) -> None:
        self._session = session
        self._job = job
        self._wanted = wanted
        self._note = note
        self.failed = False
        self._lines: asyncio.Queue[LogLine | None] = asyncio.Queue(QUEUED_LINES)  # None: the end
        self._readings: dict[str, _Reading] = {}  # by the pod's uid
        self._seen: set[str] = set()  # replicas with at least one pod whose log was followed
        self._opened: set[str] = set()  # the uids of pods whose log could be opened
        self._told_why_not = False

    async def existing(self) -> AsyncGenerator[LogLine]:
        """Yield the existing lines of all replicas, one replica after another."""
        await self._session.job(self._job)
        pods = [pod for pod in await self._session.pods(self._job) if self._wanted.takes(pod)]
        started = [pod for pod in pods if has_started(pod, self._wanted.container_of(pod))]
        if not started:
            self._note(self._nothing(pods))
        unread = 0
        for pod in sorted(started, key=_order):
            try:
                params = self._wanted.params(pod)
                async for line in self._read(pod, params, silence_seconds=REQUEST_SECONDS):
                    yield LogLine(replica_of(pod), line)
            except (ApiError, aiohttp.ClientError, TimeoutError) as error:
                unread += 1
                self._tell_unread(pod, error)
        self.failed = unread == len(started)

    async def follow(self) -> AsyncGenerator[LogLine]:
        """Yield existing and new lines until the job and its replicas have finished."""
        await self._session.job(self._job)
        async with (
            self._session.watching(PLURAL, job=self._job) as jobs,
            self._session.watching("pods", job=self._job) as pods,
        ):
            minding = asyncio.create_task(self._mind(jobs, pods), name="mind the pods")
            try:
                while (line := await self._lines.get()) is not None:
                    yield line
                await minding
            finally:
                readings = self._readings.values()
                releases = (each.release for each in readings if each.release is not None)
                tasks = [minding, *(each.reader for each in readings), *releases]
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            self.failed = not self._opened
            if self.failed and not self._told_why_not:
                self._note(self._nothing([pod for pod in pods.all() if self._wanted.takes(pod)]))

    def _tell_unread(self, pod: Mapping[str, Any], error: Exception) -> None:
        self._told_why_not = True
        self._note(f"the log of {replica_of(pod)} cannot be read: {str(error) or type(error).__name__}")

    def _nothing(self, pods: Sequence[Mapping[str, Any]]) -> str:
        if lacking := self._lacking(pods):
            return lacking
        if pods:
            return (
                f"no replica of FleetJob {self._job} has started yet; `fleetjob status {self._job}` shows why"
            )
        if self._wanted.role is not None or self._wanted.index is not None:
            return f"FleetJob {self._job} has no pod of this role and index"
        return f"FleetJob {self._job} has no pods; `fleetjob status {self._job}` shows why"

    def _lacking(self, pods: Sequence[Mapping[str, Any]]) -> str | None:
        """Return a message if pods exist but do not have the selected container."""
        containers = dict.fromkeys(name for pod in pods for name in containers_of(pod))
        wanted = self._wanted.container
        if wanted is None or not pods or wanted in containers:
            return None
        there = ", ".join(containers)
        return f"no replica of FleetJob {self._job} has a container {wanted}; there are {there}"

    async def _mind(self, jobs: Watched, pods: Watched) -> None:
        """Run the readers until they finish, then put the end marker in the queue, even after an error."""
        try:
            await self._read_all(jobs, pods)
        except Exception:
            await self._lines.put(None)
            raise
        await self._lines.put(None)

    async def _read_all(self, jobs: Watched, pods: Watched) -> None:
        """Start a reader for each pod; return when the job has finished and all readers have ended."""
        said, first = "", True
        while True:
            present = [pod for pod in pods.all() if self._wanted.takes(pod)]
            for pod in present:
                started = has_started(pod, self._wanted.container_of(pod))
                if started and pod["metadata"]["uid"] not in self._readings:
                    self._start(pod, at_first=first)
            first = False
            self._release({pod["metadata"]["uid"] for pod in present if has_not_ended(pod)})
            known = [Summary.of(job) for job in jobs.all()]
            if not self._told_why_not and (lacking := self._lacking(present)):
                self._told_why_not = True  # continue, because an ephemeral container may still be added
                self._note(lacking)
            if known and (line := f"{known[0].state}: {known[0].sentence}") != said:
                said = line
                self._note(f"{self._job} is {line}")
            over = not known or known[0].status.finished
            if over and not any(has_not_ended(pod) for pod in present):
                readers = [each.reader for each in self._readings.values()]
                await asyncio.gather(*readers, return_exceptions=True)
                if not known:
                    self._told_why_not = True
                    self._note(f"FleetJob {self._job} has been deleted")
                return
            await _first(jobs.changed, pods.changed)

    def _start(self, pod: Mapping[str, Any], *, at_first: bool) -> None:
        replica, uid = replica_of(pod), pod["metadata"]["uid"]
        if replica in self._seen:
            attempt = (pod["metadata"].get("labels") or {}).get(LABEL_ATTEMPT, "")
            self._note(f"{replica} has started again (attempt {attempt})")
        self._seen.add(replica)
        params = self._wanted.params(pod)
        if not at_first:  # show the whole log of a pod that starts later
            params.pop("tailLines", None)
            params.pop("sinceSeconds", None)
        following = self._follow_pod(pod, {**params, "follow": "true"})
        self._readings[uid] = _Reading(pod, asyncio.create_task(following, name=f"read {replica}"))

    def _release(self, running: set[str]) -> None:
        """Let readers of ended pods finish, and stop those that receive no more data."""
        for uid, reading in self._readings.items():
            if uid not in running and reading.release is None:
                reading.release = asyncio.create_task(self._let_go(reading), name=f"let go of {uid}")

    async def _let_go(self, reading: _Reading) -> None:
        reader = reading.reader
        while not reader.done():
            before = reading.lines
            _, pending = await asyncio.wait({reader}, timeout=LAST_SECONDS)
            # A full queue means that whoever takes the lines is slow, and not the node.
            if pending and reading.lines == before and not self._lines.full():
                reader.cancel()
                if reading.pod["metadata"]["uid"] not in self._opened:
                    self._tell_unread(reading.pod, TimeoutError("its node does not answer"))
                return

    async def _follow_pod(self, pod: Mapping[str, Any], params: dict[str, str]) -> None:
        """Read one pod's log to the end, reconnecting after errors."""
        reading, position = self._readings[pod["metadata"]["uid"]], Position()
        tries_left, reopens = LAST_TRIES, False
        while True:
            # Pods have the same name in each life, and a log is requested by name only.
            if reopens and await self._is_gone(pod):
                return
            reopens = True
            problem: Exception | None = None
            position.reopen()
            try:
                begin = await after(position, self._session, pod, params)
                async for line in self._read(pod, begin):
                    if unseen := position.unseen(line):
                        reading.lines += 1
                        await self._lines.put(LogLine(replica_of(pod), unseen))
            except ApiError as error:
                if error.status == 404:
                    return  # the pod was deleted, and its log with it
                if error.status in (401, 403):
                    self._tell_unread(pod, error)
                    return
                problem = error  # even a 400: the kubelet may lag behind the pod's status
            except (aiohttp.ClientError, TimeoutError) as error:
                problem = error
            if not await self._lives_on(pod):
                if problem is None:
                    return
                tries_left -= 1
                if tries_left == 0:
                    self._tell_unread(pod, problem)
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _lives_on(self, pod: Mapping[str, Any]) -> bool:
        """Return whether the pod with this uid may write more lines: True unless known to have ended."""
        try:
            found = await self._current(pod)
        except ApiError:
            return True
        return found is not None and has_not_ended(found)

    async def _is_gone(self, pod: Mapping[str, Any]) -> bool:
        """Return whether the pod with this uid is known not to exist any more."""
        try:
            return await self._current(pod) is None
        except ApiError:
            return False

    async def _current(self, pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """Return the current state of the pod with this uid, or None if it does not exist any more."""
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        try:
            found = await self._session.client.get(f"{collection('pods', self._session.namespace)}/{name}")
        except ApiError as error:
            if error.status != 404:
                raise
            return None
        return found if found["metadata"]["uid"] == uid else None

    async def _read(
        self, pod: Mapping[str, Any], params: Mapping[str, str], *, silence_seconds: float | None = None
    ) -> AsyncIterator[bytes]:
        path = log_path(self._session, pod)
        opened = self._session.client.chunks(path, params, silence_seconds=silence_seconds)
        async with opened as chunks:
            self._opened.add(pod["metadata"]["uid"])
            async for line in lines_of(chunks):
                yield line


async def lines_of(chunks: AsyncIterator[bytes], limit: int = LINE_BYTES) -> AsyncIterator[bytes]:
    """Split a byte stream into lines, and lines longer than `limit` into pieces."""
    held = b""
    async for chunk in chunks:
        held += chunk
        *lines, held = held.split(b"\n")
        for line in lines:
            for at in range(0, max(1, len(line)), limit):
                yield line[at : at + limit]
        while len(held) >= limit:
            yield held[:limit]
            held = held[limit:]
    if held:
        yield held


@dataclass(slots=True)
class Position:
    """The position up to which a log has been read, used to skip known lines after reconnecting.

    The API server ignores fractions of a second in sinceTime, so the next response begins with known lines. A
    long line comes in pieces, and only the first piece has the timestamp. Timestamps may decrease, because a
    node's clock may be set back, and because a runtime reads stdout and stderr side by side.

    Attributes
    ----------
    stamp : str
        The timestamp of the last line, as `stamp_of` returns it; empty before the first.
    length : int
        The number of bytes known of the lines with this timestamp.
    peaks : tuple of str
        The later timestamps of earlier lines, each of the last line before a decrease.
    """

    stamp: str = ""
    length: int = 0
    peaks: tuple[str, ...] = ()
    _line: str = ""  # the timestamp of the line that this reading has reached
    _read: int = 0  # the number of bytes that it has read of lines with this timestamp
    _ahead: list[str] = field(default_factory=list)  # the peaks, then the stamp, that it has yet to pass

    @classmethod
    def parse(cls, text: str) -> Position:
        """Parse the output of ``str`` for a position; if `text` is invalid, return the start of the log."""
        stamp, length, *peaks = text.split(" ") if " " in text else ("", "")
        if not _LENGTH.fullmatch(length):
            return cls()
        stamp, *peaks = (stamp_of(each.encode()) for each in (stamp, *peaks))
        position = cls(stamp, int(length), tuple(peaks))
        position.reopen()
        return position

    def __str__(self) -> str:
        return " ".join((self.stamp, str(self.length), *self.peaks)) if self.stamp else ""

    @property
    def since_time(self) -> str | None:
        """The sinceTime for the next request; None at the start of the log."""
        return f"{self.stamp[:19]}Z" if self.stamp else None

    def reopen(self) -> None:
        """Prepare for a new response, which starts at `since_time` or earlier."""
        self._line, self._read = "", 0
        self._ahead = [*self.peaks, self.stamp] if self.stamp else []

    def unseen(self, piece: bytes) -> bytes:
        """Return the part of a line, or of a piece of a line, that has not been read before."""
        if (stamp := stamp_of(piece)) and stamp != self._line:
            self._go_to(stamp)
        if len(self._ahead) > 1 or (self._ahead and self._line != self.stamp):
            return b""
        if self._line != self.stamp:
            higher = (*self.peaks, self.stamp) if self._line < self.stamp else self.peaks
            self.peaks = tuple(each for each in higher if each > self._line)
            self.stamp, self.length = self._line, 0
        known = max(0, self.length - self._read)
        self._read += len(piece)
        self.length = max(self.length, self._read)
        return piece[known:]

    def _go_to(self, stamp: str) -> None:
        ahead = self._ahead
        if ahead and self._line == ahead[0]:
            del ahead[0]
        if stamp in ahead:
            del ahead[: ahead.index(stamp)]  # the lines before may have been rotated away
        elif ahead and stamp > ahead[0]:
            ahead.clear()  # so have those at the position
        self._line, self._read = stamp, 0


async def after(
    position: Position, session: Session, pod: Mapping[str, Any], params: Mapping[str, str]
) -> dict[str, str]:
    """Return the query parameters for requesting a pod's log after a position.

    The node leaves out all lines before sinceTime. If its clock has been set back while nobody read the log,
    the whole log is requested instead.

    Parameters
    ----------
    position : Position
        How far the log has been read; before the first line, `params` apply as they are.
    session : Session
        The API server.
    pod : Mapping
        The pod.
    params : Mapping
        The parameters for reading the log from its beginning.
    """
    if position.since_time is None:
        return dict(params)
    resumed = {key: params[key] for key in params.keys() - {"tailLines", "sinceSeconds"}}
    latest = {key: resumed[key] for key in resumed.keys() - {"follow"}}
    latest |= {"tailLines": "1", "limitBytes": str(STAMP_BYTES)}
    asked = session.client.chunks(log_path(session, pod), latest, silence_seconds=REQUEST_SECONDS)
    async with asked as chunks:
        stamp = stamp_of(b"".join([chunk async for chunk in chunks]))
    return resumed if "" < stamp < position.stamp else {**resumed, "sinceTime": position.since_time}


def log_path(session: Session, pod: Mapping[str, Any]) -> str:
    """Return the path of a pod's log."""
    return f"{collection('pods', session.namespace)}/{pod['metadata']['name']}/log"


def replica_of(pod: Mapping[str, Any]) -> str:
    """Return the name of a pod's replica, such as ``trainer-1``."""
    labels = pod["metadata"].get("labels") or {}
    return f"{labels.get(LABEL_ROLE, '?')}-{labels.get(LABEL_INDEX, '?')}"


def has_started(pod: Mapping[str, Any], container: str) -> bool:
    """Return whether a container of a pod has started and therefore has a log."""
    status = pod.get("status", {})
    for kind in ("containerStatuses", "initContainerStatuses", "ephemeralContainerStatuses"):
        for each in status.get(kind) or ():
            if each.get("name") == container:
                state, last = each.get("state") or {}, each.get("lastState") or {}
                return "running" in state or "terminated" in state or "terminated" in last
    return False


def containers_of(pod: Mapping[str, Any]) -> list[str]:
    """Return the names of a pod's containers, followed by its init and ephemeral containers."""
    kinds = ("containers", "initContainers", "ephemeralContainers")
    return [each["name"] for kind in kinds for each in pod["spec"].get(kind) or ()]


def has_not_ended(pod: Mapping[str, Any]) -> bool:
    """Return whether a pod is still pending or running."""
    return pod.get("status", {}).get("phase") not in ("Succeeded", "Failed")


def _order(pod: Mapping[str, Any]) -> tuple[str, int]:
    labels = pod["metadata"].get("labels") or {}
    return labels.get(LABEL_ROLE, ""), int(labels.get(LABEL_INDEX, "0"))


def stamp_of(line: bytes) -> str:
    """Return a line's timestamp in UTC, as text that sorts by time, or "" if there is none."""
    found = _STAMP.match(line)
    if found is None:
        return ""
    second = found[1].decode()
    if found[3] != b"Z":  # the time zone of the node
        try:
            moment = datetime.fromisoformat(second + found[3].decode()).astimezone(UTC)
        except (ValueError, OverflowError):  # a date of the script, in the rest of a long line
            return ""
        second = f"{moment:%Y-%m-%dT%H:%M:%S}"
    return f"{second}.{(found[2] or b'').decode():0<9}Z"


async def _first(*events: asyncio.Event) -> None:
    """Wait until one of the events is set, then clear all of them."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    for event in events:
        event.clear()
