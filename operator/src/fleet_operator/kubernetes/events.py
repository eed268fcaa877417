"""Records Kubernetes events about jobs, which ``kubectl describe`` shows.

An event is recorded once. If the API server is busy or unavailable, it is retried for half a minute in the
background, under the same name, so that a lost response causes no duplicate. An operator that ends before
it has recorded an event loses it; its successor finds the same information in the status.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple

from fleet_operator.api.names import API_VERSION, KIND, MANAGED_BY
from fleet_operator.cluster import ClusterError
from fleet_operator.kubernetes.client import ApiError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleet_operator.kubernetes.client import ApiClient
    from fleet_operator.plan.model import Event

logger = logging.getLogger(__name__)

MESSAGE_CHARACTERS = 1024
"""The maximum length of an event's message: the limit that events.k8s.io/v1 sets for a note.

The API server also accepts a longer message in an event without an eventTime, such as ours.
"""

REMEMBERED = 1000
"""How many events are remembered, so that a repetition increments a count instead of creating an event."""

AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""The delay before each retry of posting an event, in seconds."""


class Subject(NamedTuple):
    """The job that an event is about."""

    namespace: str
    name: str
    uid: str


class _News(NamedTuple):
    """An event to be posted, with a name and a time that retries keep."""

    job: Subject
    event: Event
    name: str
    at: str


class _Told(NamedTuple):
    path: str
    times: int


class EventRecorder:
    """Creates Kubernetes events about jobs, and increments the count of an event that repeats."""

    def __init__(self, client: ApiClient) -> None:
        self._client = client
        self._told: dict[tuple[str, Event], _Told] = {}
        self._trying: set[asyncio.Task[None]] = set()

    async def record(self, job: Subject, event: Event) -> None:
        """Post an event, retrying transient failures; log a failure instead of raising it."""
        news = _News(job, event, f"{job.name}.{secrets.token_hex(8)}", _now())
        error = await self._tell(news)
        if error is not None and error.transient and len(self._trying) < REMEMBERED:
            trying = asyncio.create_task(self._try_again(news, error), name=f"tell {news.name}")
            self._trying.add(trying)
            trying.add_done_callback(self._trying.discard)

    async def close(self) -> None:
        """Discard events that are waiting to be retried."""
        trying = list(self._trying)
        for task in trying:
            task.cancel()
        await asyncio.gather(*trying, return_exceptions=True)

    async def _try_again(self, news: _News, error: ClusterError) -> None:
        last: ClusterError | None = error
        for seconds in AGAIN_SECONDS:
            if last is None or not last.transient:
                return
            await asyncio.sleep(max(seconds, last.retry_after_seconds))
            last = await self._tell(news)

    async def _tell(self, news: _News) -> ClusterError | None:
        """Post an event, or increment the count of an equal event; return the error, if any."""
        same = (news.job.uid, news.event)
        # Removed during the request: if the same event came meanwhile, both would set the same count.
        # Inserted again at its end, so that the event that was not repeated for longest is first.
        told = self._told.pop(same, None)
        try:
            if told is None or not await self._repeat(told, news):
                told = await self._post(news)
        except ClusterError as error:
            if told is not None:
                self._told[same] = told
            shown = f"{news.job.namespace}/{news.job.name}"
            logger.warning(
                "could not record the event %s: %s", news.event.reason, error, extra={"job": shown}
            )
            return error
        self._told[same] = told._replace(times=told.times + 1)
        while len(self._told) > REMEMBERED:
            del self._told[next(iter(self._told))]
        return None

    async def _repeat(self, told: _Told, news: _News) -> bool:
        """Increment an event's count; return False if the event has expired on the server."""
        try:
            await self._client.merge_patch(told.path, {"count": told.times + 1, "lastTimestamp": news.at})
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return True

    async def _post(self, news: _News) -> _Told:
        path = f"/api/v1/namespaces/{news.job.namespace}/events"
        try:
            await self._client.create(path, _manifest(news))
        except ApiError as error:
            if error.reason != "AlreadyExists":  # the previous request succeeded, but its response was lost
                raise
        return _Told(f"{path}/{news.name}", 0)


def _manifest(news: _News) -> Mapping[str, Any]:
    job, event = news.job, news.event
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": news.name, "namespace": job.namespace},
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
        "firstTimestamp": news.at,
        "lastTimestamp": news.at,
        "count": 1,
    }


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
