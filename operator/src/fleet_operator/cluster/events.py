"""Events on a job: what ``kubectl describe`` shows below it."""

from __future__ import annotations

import logging
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from fleet_operator.api.names import API_VERSION, KIND, MANAGED_BY
from fleet_operator.cluster.client import ApiError
from fleet_operator.cluster.interface import ClusterError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.cluster.client import ApiClient
    from fleet_operator.plan.model import Event

logger = logging.getLogger(__name__)

MESSAGE_CHARACTERS = 1024
"""The API server refuses longer messages."""

REMEMBERED = 1000
"""How many events are remembered, to count one that happens again instead of posting it again."""


class Subject(NamedTuple):
    """The job that an event is about."""

    namespace: str
    name: str
    uid: str


class _Told(NamedTuple):
    path: str
    times: int


class EventRecorder:
    """Posts events; one that repeats is counted on the event that is there already."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._told: dict[tuple[str, Event], _Told] = {}

    async def record(self, job: Subject, event: Event) -> None:
        """Tell people. A failure to tell is logged, never raised."""
        same = (job.uid, event)
        try:
            told = self._told.pop(same, None)
            if told is None or not await self._repeat(told):
                told = await self._post(job, event)
            self._told[same] = told._replace(times=told.times + 1)
        except ClusterError as error:
            shown = f"{job.namespace}/{job.name}"
            logger.warning("could not record the event %s: %s", event.reason, error, extra={"job": shown})
        while len(self._told) > REMEMBERED:
            del self._told[next(iter(self._told))]

    async def _repeat(self, told: _Told) -> bool:
        """Count an event once more; False if it is no longer there (the server keeps events for an hour)."""
        try:
            await self._client.merge_patch(told.path, {"count": told.times + 1, "lastTimestamp": _now()})
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _post(self, job: Subject, event: Event) -> _Told:
        path = f"/api/v1/namespaces/{job.namespace}/events"
        answer = await self._client.create(path, _manifest(job, event))
        return _Told(f"{path}/{answer['metadata']['name']}", 0)


def _manifest(job: Subject, event: Event) -> Mapping[str, Any]:
    now = _now()
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"generateName": f"{job.name}.", "namespace": job.namespace},
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": KIND,
            "namespace": job.namespace,
            "name": job.name,
            "uid": job.uid,
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:MESSAGE_CHARACTERS],
        "source": {"component": MANAGED_BY},
        "reportingComponent": MANAGED_BY,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
