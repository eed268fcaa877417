"""What kopf calls. Handlers only pass on what they hear; nothing is decided here, and nothing is written.

There are no create, update or resume handlers, no timers and no daemons: with those kopf would write
annotations and finalizers on the user's objects, and would tell of changes only, never of what is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import kopf

from fleet_operator.api.names import API_VERSION, PLURAL
from fleet_operator.kubernetes import reflector
from fleet_operator.kubernetes.client import open_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from kopf import BodyEssence

    from fleet_operator.kubernetes.client import OnRequest
    from fleet_operator.kubernetes.login import Connection


def registry_for(
    connection: Connection,
    take_job: Callable[[str | None, Mapping[str, Any]], None],
    *,
    on_listed: Callable[[], None],
    on_watched: Callable[[str | None, bool], None],
    on_request: OnRequest | None = None,
) -> kopf.OperatorRegistry:
    """Return kopf's handlers.

    Parameters
    ----------
    connection : Connection
        Where the API server is.
    take_job : callable
        Told of each event of a FleetJob: its type (None for what was there at the start) and its manifest.
    on_listed : callable
        Called when kopf has listed FleetJobs, at the start or because its watch had lost its place. It tells
        of what is there, but not of what was deleted meanwhile.
    on_watched : callable
        Told whether kopf could watch FleetJobs, at each try, and where: a namespace, or None for all of them.
    on_request : callable, optional
        Told of each request of kopf's, as `ApiClient` tells of its own.
    """
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    async def log_in(**_: Any) -> kopf.AiohttpSession:
        return kopf.AiohttpSession(
            aiohttp_session=open_session(connection, on_answer=notice_answer, on_request=on_request),
            server=connection.server,
            default_namespace=connection.namespace,
        )

    def notice_answer(path: str, parameters: Mapping[str, str], status: int) -> None:
        if not path.endswith(f"/{PLURAL}"):
            return
        refused, watching = status >= 400, "watch" in parameters
        if refused or watching:
            *_, before, namespace, _ = path.split("/")
            on_watched(namespace if before == "namespaces" else None, not refused)
        else:
            on_listed()

    @kopf.on.event(API_VERSION, PLURAL, registry=registry)
    async def notice(event: kopf.RawEvent, **_: Any) -> None:
        take_job(event["type"], event["object"])

    return registry


class NoEssence(kopf.DiffBaseStorage):
    """Keeps nothing of an object to compare it with later: only handlers of changes would ask for that.

    kopf copies every object twice for it, with each event, whether there are such handlers or not.
    """

    def build(self, *, body: object, extra_fields: object = None) -> BodyEssence:  # noqa: ARG002 as the base
        """Return nothing."""
        return {}

    def fetch(self, *, body: object) -> None:
        """Know nothing."""

    def store(self, *, body: object, patch: object, essence: object) -> None:
        """Write nothing."""


class Backoffs:
    """How long kopf waits between its tries, without end, as the watches of our own do.

    At the end of these kopf itself would end, and with it the term: for a namespace that is gone, for
    example, of which the API server refuses to speak.
    """

    def __iter__(self) -> Iterator[float]:
        """Return what each request begins anew."""
        return reflector.backoff()


def kopf_settings() -> kopf.OperatorSettings:
    """Return how kopf behaves: it never gives up, posts no events of its own, and ends quickly."""
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = NoEssence()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # the CRD is there before the operator starts: `startup` waits for it
    settings.watching.chunk_size = reflector.PAGE
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = reflector.SILENCE_SECONDS
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = Backoffs()
    settings.queueing.exit_timeout = 0.5
    settings.process.ultimate_exiting_timeout = None  # the process lives on when kopf has ended by itself
    return settings
