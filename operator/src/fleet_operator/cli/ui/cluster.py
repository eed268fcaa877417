"""The jobs of a cluster, from its API server: status, conditions, events, pods and logs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp

from fleet_operator.api.names import LABEL_ATTEMPT, METRICS_PORT
from fleet_operator.cli.ui.series import Series
from fleet_operator.client.logs import (
    LogLine,
    Position,
    after,
    lines_of,
    log_path,
    replica_of,
    stamp_of,
)
from fleet_operator.client.session import ClusterRefusal, Session, last_time, open_session
from fleet_operator.client.summary import Summary
from fleet_operator.kubernetes.client import ApiError, collection
from fleet_operator.kubernetes.observation import main_container, observe_pod
from fleet_operator.kubernetes.progress import INTERVAL_SECONDS, MAX_BYTES
from fleet_operator.local.log import printable
from fleet_operator.plan.model import Attempt, PodPhase
from fleet_operator.plan.observe.progress import parse_progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.client.session import Where
    from fleet_operator.plan.observe.progress import Progress

Document = dict[str, Any]

FIRST_LINES = 400
"""How many of the last lines of a log the first response contains."""

MOST_LINES = 5000
"""The maximum number of lines of a log in one response."""

SILENCE_SECONDS = 10.0

FIRST_TRAINER = "trainer-0"
"""The replica whose progress the status of a job shows."""

HISTORY_SECONDS = 1.0
"""The time limit for reading a trainer's history through the API server."""

REFUSED_SECONDS = 60.0
"""The delay before a trainer's history is requested again after a failed request."""


@dataclass(slots=True, eq=False)
class _Curves:
    """The curves of a job, from its status, termination messages and trainer 0's history."""

    series: Series = field(default_factory=Series)
    step: int = 0  # the step in the last status
    lives: dict[str, str] = field(default_factory=dict)  # by replica: the uid of the pod that has reported
    due: float = 0.0  # when the history is read again
    problem: str | None = None  # why the history could not be read

    def add_status(self, step: int, loss: float) -> None:
        """Add the latest values, which come from the job's status."""
        if step < self.step:  # the job was restarted
            self.series.drop(FIRST_TRAINER, step)
        self.step = step
        self.series.add(FIRST_TRAINER, step, {"loss": loss})

    def add_report(self, pod: Mapping[str, Any], progress: Progress | None) -> None:
        """Add the history and the latest values that a pod has reported."""
        if progress is None or progress.step is None:
            return
        replica, uid = replica_of(pod), pod["metadata"]["uid"]
        if self.lives.get(replica) != uid:
            self.lives[replica] = uid
            self.series.drop(replica, min(progress.history, default=progress.step))
        for step, loss in sorted(progress.history.items()):
            self.series.add(replica, step, {"loss": loss})
        self.series.add(replica, progress.step, progress.metrics)


class ClusterJobs:
    """The jobs of a cluster; connects to the cluster at the first request.

    Parameters
    ----------
    where : Where
        The cluster and the namespace.
    everywhere : bool
        Whether to show the jobs of all namespaces.
    """

    def __init__(self, where: Where, *, everywhere: bool = False) -> None:
        self._where = where
        self._everywhere = everywhere
        self._session: Session | None = None
        self._connecting = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._curves: dict[str, _Curves] = {}  # by a job's uid

    async def close(self) -> None:
        """Close the connections."""
        await self._stack.aclose()

    async def rows(self) -> tuple[str, list[Document]]:
        """Return the cluster's display name, and a table row for each job.

        Raises
        ------
        OperatorError
            There is no usable kubeconfig, or the API server refused or did not answer.
        """
        session = await self._connected()
        where = "all namespaces" if self._everywhere else f"namespace {session.namespace}"
        jobs = await session.jobs(everywhere=self._everywhere)
        for uid in self._curves.keys() - {job["metadata"]["uid"] for job in jobs}:
            del self._curves[uid]
        rows = [self._row(Summary.of(job)) for job in jobs]
        return f"{session.server}, {where}", sorted(rows, key=lambda row: row["started"] or "", reverse=True)

    async def detail(self, namespace: str, name: str) -> Document:
        """Return all data of a job except its logs.

        Raises
        ------
        OperatorError
            There is no such job, or the API server refused or did not answer.
        """
        session = await self._in(namespace)
        job = await session.job(name)
        pods = await session.pods(name)
        events = await session.events(name)
        row = self._row(Summary.of(job))
        curves = self._curves[job["metadata"]["uid"]]
        for pod in pods:
            curves.add_report(pod, parse_progress(str((_ended(pod) or {}).get("message") or "")))
            if replica_of(pod) == FIRST_TRAINER:
                await _read_history(session, pod, curves)
        conditions = (job.get("status") or {}).get("conditions") or []
        return {
            **row,
            "replicas": [_replica(pod) for pod in sorted(pods, key=replica_of)],
            "events": [_event(each) for each in events],
            "conditions": [
                {key: str(each.get(key, "")) for key in ("type", "status", "reason", "message")}
                | {"time": each.get("lastTransitionTime")}
                for each in conditions
            ],
            "series": curves.series.thinned(),
            "curves_note": curves.problem,
            "folder": None,
        }

    async def log(self, namespace: str, job: str, replica: str, cursor: str) -> Document:
        """Return the lines of a replica's log from a cursor on, and the next cursor.

        Parameters
        ----------
        namespace, job, replica : str
            The replica, such as ``trainer-0``.
        cursor : str
            The cursor from an earlier response, or empty for the end of the log.

        Raises
        ------
        OperatorError
            The API server refused or did not answer.
        """
        session = await self._in(namespace)
        pod = next((each for each in await session.pods(job) if replica_of(each) == replica), None)
        if pod is None:
            return {"lines": [], "next": cursor, "note": "this replica has no pod at present"}
        lines, uid = list[str](), pod["metadata"]["uid"]
        known, _, seen = cursor.partition(" ")
        position = Position.parse(seen if known == uid else "")  # another pod's clock may be behind
        params = {"container": main_container(pod), "timestamps": "true"}
        if known in ("", uid):  # of a next life, all lines are new
            params["tailLines"] = str(FIRST_LINES)
        path = log_path(session, pod)
        try:
            params = await after(position, session, pod, params)
            async with session.client.chunks(path, params, silence_seconds=SILENCE_SECONDS) as chunks:
                async for line in lines_of(chunks):
                    if unseen := position.unseen(line):
                        stamp, text = stamp_of(unseen), printable(LogLine(replica, unseen).text)
                        lines.append(f"{stamp[:23]}Z {text}" if stamp else text)
                        # A page that slept, or a new life, may be far behind. The next request goes on here.
                        if len(lines) == MOST_LINES:
                            break
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:
            note = str(error) or type(error).__name__
            return {"lines": lines, "next": f"{uid} {position}", "note": note}
        return {"lines": lines, "next": f"{uid} {position}"}

    async def _connected(self) -> Session:
        async with self._connecting:
            if self._session is None:
                self._session = await self._stack.enter_async_context(open_session(self._where))
            return self._session

    async def _in(self, namespace: str) -> Session:
        session = await self._connected()
        if not self._everywhere and namespace != session.namespace:
            raise ClusterRefusal(
                f"this page shows namespace {session.namespace}, not {namespace}; start `fleetjob ui` with "
                f"-n {namespace} or --all-namespaces"
            )
        return Session(session.client, session.server, namespace)

    def _row(self, job: Summary) -> Document:
        status, progress = job.status, job.status.progress
        curves = self._curves.setdefault(job.raw["metadata"]["uid"], _Curves())
        if progress is not None and progress.step is not None and progress.loss is not None:
            curves.add_status(progress.step, progress.loss)
        return {
            "id": f"{job.namespace}/{job.name}",
            "place": "cluster",
            "namespace": job.namespace,
            "name": job.name,
            "label": f"{job.namespace}/{job.name}",
            "mode": job.mode,
            "state": job.state,
            "sentence": job.sentence,
            "started": None if job.created is None else job.created.isoformat(),
            "ended": None if status.completion_time is None else status.completion_time.isoformat(),
            "restarts": status.restarts,
            "step": progress and progress.step,
            "total_steps": progress and progress.total_steps,
            "percentage": progress and progress.percentage,
            "loss": progress and progress.loss,
            "eta_seconds": progress and progress.eta_seconds,
            "metrics": {},
        }


async def _read_history(session: Session, pod: Mapping[str, Any], curves: _Curves) -> None:
    """Request a running trainer's history if a request is due, and add it to the curves.

    The request goes through the API server, so it needs no network route to the pod, but requires the
    permission to ``get`` ``pods/proxy``.
    """
    now = asyncio.get_running_loop().time()
    if (pod.get("status") or {}).get("phase") != PodPhase.RUNNING:
        curves.problem = None
        return
    if now < curves.due or (observed := observe_pod(pod)) is None:
        return
    curves.due = now + REFUSED_SECONDS
    port = observed.metrics_port or METRICS_PORT
    path = f"{collection('pods', session.namespace)}/{observed.name}:{port}/proxy/progress"
    data = b""
    try:
        async with asyncio.timeout(HISTORY_SECONDS), session.client.chunks(path, {}) as chunks:
            async for chunk in chunks:
                data += chunk
                if len(data) > MAX_BYTES:
                    break
    except (ApiError, aiohttp.ClientError, TimeoutError) as error:
        why = str(error) or f"no answer within {HISTORY_SECONDS:g} s"
        curves.problem = (
            f"The curve has only what this page has seen in the job's status: {FIRST_TRAINER}'s own history "
            f"could not be read through the API server ({printable(why)})."
        )
        return
    curves.problem = None
    curves.due = now + INTERVAL_SECONDS
    curves.add_report(pod, parse_progress(data.decode(errors="replace")))


def _ended(pod: Mapping[str, Any]) -> Mapping[str, Any] | None:
    statuses = pod.get("status", {}).get("containerStatuses") or []
    main: Mapping[str, Any] = next((each for each in statuses if each.get("name") == main_container(pod)), {})
    ended: Mapping[str, Any] | None = (main.get("state") or {}).get("terminated")
    return ended


def _replica(pod: Mapping[str, Any]) -> Document:
    metadata, status, ended = pod["metadata"], pod.get("status", {}), _ended(pod) or {}
    progress = parse_progress(str(ended.get("message") or ""))
    attempt = Attempt.parse((metadata.get("labels") or {}).get(LABEL_ATTEMPT, ""))
    life = {
        "attempt": str(attempt),
        "started": ended.get("startedAt") or status.get("startTime"),
        "ended": ended.get("finishedAt"),
        "exit_code": ended.get("exitCode"),
    }
    return {
        "name": replica_of(pod),
        "state": str(status.get("phase") or "Unknown"),
        "restarts": attempt.restarts,
        "exit_codes": [] if ended.get("exitCode") is None else [ended["exitCode"]],
        "step": progress and progress.step,
        "total_steps": progress and progress.total_steps,
        "loss": progress and progress.loss,
        "samples_per_second": progress and progress.samples_per_second,
        "memory_bytes": progress and progress.memory_bytes,
        "waits_for": status.get("message"),
        "eta_seconds": None,
        "metrics": dict(progress.metrics) if progress else {},
        "lives": [life],
        "node": (pod.get("spec") or {}).get("nodeName"),
    }


def _event(event: Mapping[str, Any]) -> Document:
    count = event.get("count") or 1
    return {
        "time": last_time(event),
        "reason": event.get("reason") or "",
        "type": event.get("type") or "",
        "message": str(event.get("message") or "") + (f" (x{count})" if count > 1 else ""),
    }
