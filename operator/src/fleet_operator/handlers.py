"""The kopf handlers, which only forward watch events to the engine.

There are no create, update or resume handlers, timers or daemons. With these, kopf would write annotations
and finalizers to the user's objects, and would report only changes, never the current state.
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
    """Return a kopf registry with the handlers.

    Parameters
    ----------
    connection : Connection
        The connection to the API server.
    take_job : callable
        Called with each event of a FleetJob: its type (None for a FleetJob that already existed) and its
        manifest.
    on_listed : callable
        Called when kopf has listed FleetJobs, at the start or because its watch had expired. kopf reports the
        existing ones, but not those deleted meanwhile.
    on_watched : callable
        Called after each attempt to watch FleetJobs, with its success and the namespace (None for all).
    on_request : callable, optional
        Called after each request of kopf, as by `ApiClient`.
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
    """Keeps kopf from storing the previous state of objects, which no handler of ours uses.

    By default kopf copies every object twice per event to store it, even without such handlers.
    """

    def build(self, *, body: object, extra_fields: object = None) -> BodyEssence:  # noqa: ARG002 as the base
        """Return an empty state."""
        return {}

    def fetch(self, *, body: object) -> None:
        """Return nothing, because no state is stored."""

    def store(self, *, body: object, patch: object, essence: object) -> None:
        """Store nothing."""


class Backoffs:
    """An endless sequence of kopf's retry delays, equal to those of our own watches.

    After the last delay of a finite sequence, kopf and with it the term would end, for example for a deleted
    namespace, which the API server refuses to serve.
    """

    def __iter__(self) -> Iterator[float]:
        """Return a new iterator over the delays; kopf requests one for each API request."""
        return reflector.backoff()


def kopf_settings() -> kopf.OperatorSettings:
    """Return settings that make kopf retry without end, post no events, and exit quickly."""
    settings = kopf.OperatorSettings()
    settings.persistence.diffbase_storage = NoEssence()
    settings.posting.enabled = False
    settings.scanning.disabled = True  # the CRD exists before the operator starts: `startup` waits for it
    settings.watching.chunk_size = reflector.PAGE
    settings.watching.server_timeout = 300
    settings.watching.inactivity_timeout = reflector.SILENCE_SECONDS
    settings.networking.connect_timeout = 5
    settings.networking.request_timeout = 30
    settings.networking.error_backoffs = Backoffs()
    settings.queueing.exit_timeout = 0.5
    settings.process.ultimate_exiting_timeout = None  # the process must survive an unexpected end of kopf
    return settings
