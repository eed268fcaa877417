"""The jobs of a cluster, as its API server shows them: status, conditions, events, pods and their logs."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import aiohttp

from fleet_operator.api.names import LABEL_ATTEMPT
from fleet_operator.cli.ui.series import Series
from fleet_operator.client.logs import LogLine, Position, lines_of, replica_of, stamp_of
from fleet_operator.client.session import ClusterRefusal, Session, last_time, open_session
from fleet_operator.client.summary import Summary
from fleet_operator.kubernetes.client import ApiError, collection
from fleet_operator.kubernetes.observation import main_container
from fleet_operator.local.log import printable
from fleet_operator.plan.model import Attempt
from fleet_operator.plan.observe.progress import parse_progress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.client.session import Where

Document = dict[str, Any]

FIRST_LINES = 400
"""The number of lines of a log in the first answer."""

SILENCE_SECONDS = 10.0


class ClusterJobs:
    """The jobs of a cluster, to which it connects at the first request.

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
        self._series: dict[str, Series] = {}  # by a job's uid: the losses in the statuses seen so far

    async def close(self) -> None:
        """Close the connections."""
        await self._stack.aclose()

    async def rows(self) -> tuple[str, list[Document]]:
        """Return the cluster's name for the page, and a row for each job.

        Raises
        ------
        OperatorError
            There is no usable kubeconfig, or the API server refused or did not answer.
        """
        session = await self._connected()
        where = "all namespaces" if self._everywhere else f"namespace {session.namespace}"
        jobs = await session.jobs(everywhere=self._everywhere)
        for uid in self._series.keys() - {job["metadata"]["uid"] for job in jobs}:
            del self._series[uid]
        rows = [self._row(Summary.of(job)) for job in jobs]
        return f"{session.server}, {where}", sorted(rows, key=lambda row: row["started"] or "", reverse=True)

    async def detail(self, namespace: str, name: str) -> Document:
        """Return everything about a job except its logs.

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
        for pod in pods:
            self._add_last_report(job["metadata"]["uid"], pod)
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
            "series": self._series[job["metadata"]["uid"]].thinned(),
            "folder": None,
        }

    async def log(self, namespace: str, job: str, replica: str, cursor: str) -> Document:
        """Return the lines of a replica's log after a cursor, and the next cursor.

        Parameters
        ----------
        namespace, job, replica : str
            The replica, such as ``trainer-0``.
        cursor : str
            That of an earlier answer, or empty for the end of the log.

        Raises
        ------
        OperatorError
            The API server refused or did not answer.
        """
        session = await self._in(namespace)
        pod = next((each for each in await session.pods(job) if replica_of(each) == replica), None)
        if pod is None:
            return {"lines": [], "next": cursor, "note": "this replica has no pod at present"}
        lines, position = list[str](), Position.parse(cursor)
        since = position.since_time
        begin = {"tailLines": str(FIRST_LINES)} if since is None else {"sinceTime": since}
        params = {"container": main_container(pod), "timestamps": "true", **begin}
        path = f"{collection('pods', namespace)}/{pod['metadata']['name']}/log"
        try:
            async with session.client.chunks(path, params, silence_seconds=SILENCE_SECONDS) as chunks:
                async for line in lines_of(chunks):
                    if unseen := position.unseen(line):
                        stamp, text = stamp_of(unseen), printable(LogLine(replica, unseen).text)
                        lines.append(f"{stamp[:23]}Z {text}" if stamp else text)
        except ApiError as error:
            return {"lines": lines, "next": str(position), "note": str(error)}
        except (aiohttp.ClientError, TimeoutError) as error:
            return {"lines": lines, "next": str(position), "note": str(error) or type(error).__name__}
        return {"lines": lines, "next": str(position)}

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
        series = self._series.setdefault(job.raw["metadata"]["uid"], Series())
        if progress is not None and progress.step is not None and progress.loss is not None:
            series.drop("trainer-0", progress.step)
            series.add("trainer-0", progress.step, {"loss": progress.loss})
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

    def _add_last_report(self, uid: str, pod: Mapping[str, Any]) -> None:
        """Add the curve that an ended trainer has left in its termination message."""
        ended = _ended(pod)
        progress = parse_progress(str((ended or {}).get("message") or ""))
        if progress is None or progress.step is None:
            return
        series, replica = self._series[uid], replica_of(pod)
        series.drop(replica, min(progress.history, default=progress.step))
        for step, loss in sorted(progress.history.items()):
            series.add(replica, step, {"loss": loss})
        series.add(replica, progress.step, progress.metrics)


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
