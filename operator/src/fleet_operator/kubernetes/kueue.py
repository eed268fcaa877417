"""Reads the Workloads in which Kueue reports why it holds back or has stopped a job's pods.

Pods show only that they are gated, and deleted pods show nothing. Kueue creates a Workload with the name of
the group; its conditions give the reason. Workloads of groups have neither our labels nor an owner of ours,
and a watch would deliver all Workloads of the cluster for good. Instead, a namespace's Workloads are listed
while a job in it needs the state of its group. The garbage collector removes a Workload after its pods; the
event about its deactivation remains for the API server's --event-ttl, an hour by default.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleet_operator.kubernetes.client import ApiError, collection
from fleet_operator.kubernetes.reflector import ExpiredError, list_pages

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleet_operator.cluster import Key
    from fleet_operator.kubernetes.client import ApiClient

logger = logging.getLogger(__name__)

WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2"
LOOK_SECONDS = 10.0
"""How often a namespace's Workloads are listed while a job needs the admission state of its group."""

DEACTIVATED = "EvictedDueToDeactivated"
"""The beginning of the reason in Kueue's event about a deactivation; a cause may follow."""

TICK_SECONDS = 0.5
"""How often the loop checks for namespaces whose Workloads are due to be listed."""


@dataclass(frozen=True, slots=True)
class Admission:
    """The admission state of a group of pods, as reported in the group's Workload.

    Attributes
    ----------
    message : str, optional
        Why Kueue has not admitted the group; None if it is admitted, or Kueue has given no reason yet.
    active : bool
        False if the Workload is, or was when it was deleted, deactivated.
    """

    message: str | None = None
    active: bool = True


NOTHING_SAID = Admission()


@dataclass(slots=True)
class _Group:
    name: str
    due: float = 0.0
    said: Admission | None = None  # None before the first list


class Admissions:
    """The admission states of groups; each is refreshed from the first call of `of` until `forget`.

    Parameters
    ----------
    client : ApiClient
        The API server.
    on_change : callable
        Called with a job's key when the admission state of its group becomes known or changes.
    """

    def __init__(self, client: ApiClient, on_change: Callable[[Key], None]) -> None:
        self._client = client
        self._on_change = on_change
        self._groups: dict[Key, _Group] = {}

    def of(self, key: Key, group: str) -> Admission | None:
        """Return the last known admission state of a job's group, or None before the first answer."""
        known = self._groups.get(key)
        if known is None or known.name != group:
            known = self._groups[key] = _Group(group)
        return known.said

    def forget(self, key: Key) -> None:
        """Stop refreshing the state of a job's group."""
        self._groups.pop(key, None)

    async def look_forever(self) -> None:
        """Periodically list the Workloads of each namespace with a group to refresh."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.monotonic()
            due = {key.namespace for key, group in self._groups.items() if group.due <= now}
            for namespace in sorted(due):
                await self._look(namespace)

    async def _look(self, namespace: str) -> None:
        groups = {key: group for key, group in self._groups.items() if key.namespace == namespace}
        for group in groups.values():
            group.due = time.monotonic() + LOOK_SECONDS
        names, said = {group.name for group in groups.values()}, dict[str, Admission]()
        try:
            async for page in list_pages(self._client, f"{WORKLOADS}/namespaces/{namespace}/workloads"):
                for each in page["items"]:
                    if (name := each["metadata"]["name"]) in names:
                        active = each["spec"].get("active") is not False
                        said[name] = Admission(why_not_admitted(each), active)
            for name in names - said.keys():
                said[name] = Admission(active=not await self._was_deactivated(namespace, name))
        except (ApiError, ExpiredError) as error:
            logger.warning("looking at the Workloads of Kueue in namespace %s: %s", namespace, error)
            # A job is not kept waiting for an answer that may never be given.
            said = {group.name: group.said or NOTHING_SAID for group in groups.values()} | said
        for key, group in groups.items():
            before, group.said = group.said, said[group.name]
            if group.said != before and self._groups.get(key) is group:
                self._on_change(key)

    async def _was_deactivated(self, namespace: str, group: str) -> bool:
        """Return whether a group's Workload was deactivated before it was deleted."""
        about = {"fieldSelector": f"involvedObject.kind=Workload,involvedObject.name={group}"}
        events = await self._client.get(collection("events", namespace), about)
        return any((each.get("reason") or "").startswith(DEACTIVATED) for each in events["items"])


def why_not_admitted(workload: Mapping[str, Any]) -> str | None:
    """Return why Kueue has not admitted a Workload; None if it is admitted or no reason is known."""
    if workload["spec"].get("active") is False:
        return "the Workload is deactivated (spec.active is false)"
    status = workload.get("status") or {}
    conditions = {each["type"]: each for each in status.get("conditions") or ()}
    if (said := _why_not(conditions.get("QuotaReserved"))) is not None:
        return said
    # The message of the condition Admitted does not name the pending checks.
    pending = [each["name"] for each in status.get("admissionChecks") or () if each.get("state") != "Ready"]
    if pending:
        return f"admission checks are pending: {', '.join(pending)}"
    return _why_not(conditions.get("Admitted"))


def _why_not(condition: Mapping[str, Any] | None) -> str | None:
    """Return the message of a condition whose status is False, else None."""
    if condition is None or condition["status"] != "False":
        return None
    return str(condition.get("message") or condition.get("reason"))
