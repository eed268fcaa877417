"""Kueue's messages about the groups of pods that it holds back.

Pods only show that they are gated. Kueue creates a Workload with the name of the group, and its conditions
give the reason. Workloads of groups do not have our labels, so a watch would deliver all Workloads of the
cluster. Instead, each Workload is looked up while its pods are gated.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fleet_operator.kubernetes.client import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleet_operator.cluster import Key
    from fleet_operator.kubernetes.client import ApiClient

logger = logging.getLogger(__name__)

WORKLOADS = "/apis/kueue.x-k8s.io/v1beta2"
LOOK_SECONDS = 10.0
"""How often the Workload of a group that Kueue holds back is looked up."""

TICK_SECONDS = 0.5
"""How often the loop looks for groups that are due."""


@dataclass(slots=True)
class _Group:
    name: str
    due: float = 0.0
    message: str | None = None


class Admissions:
    """Kueue's messages about the groups that it holds back.

    Parameters
    ----------
    client : ApiClient
        The API server.
    on_change : callable
        Called with a job when Kueue's message about its group has changed.
    """

    def __init__(self, client: ApiClient, on_change: Callable[[Key], None]) -> None:
        self._client = client
        self._on_change = on_change
        self._groups: dict[Key, _Group] = {}

    def of(self, key: Key, group: str) -> str | None:
        """Return Kueue's last message about a job's group, and keep looking it up until `forget`."""
        known = self._groups.get(key)
        if known is None or known.name != group:
            known = self._groups[key] = _Group(group)
        return known.message

    def forget(self, key: Key) -> None:
        """Stop looking up a job's group, because its pods are not gated or the job is deleted."""
        self._groups.pop(key, None)

    async def look_forever(self) -> None:
        """Look up the groups that are due."""
        while True:
            await asyncio.sleep(TICK_SECONDS)
            for key, group in list(self._groups.items()):
                if group.due <= time.monotonic():
                    await self._look(key, group)

    async def _look(self, key: Key, group: _Group) -> None:
        group.due = time.monotonic() + LOOK_SECONDS
        try:
            found = await self._client.get(f"{WORKLOADS}/namespaces/{key.namespace}/workloads/{group.name}")
        except ApiError as error:
            if error.status != 404:  # Kueue has not made it yet
                logger.warning("looking at a Workload of Kueue: %s", error, extra={"job": str(key)})
            return
        message = why_not_admitted(found)
        if message != group.message and self._groups.get(key) is group:
            group.message = message
            self._on_change(key)


def why_not_admitted(workload: Mapping[str, Any]) -> str | None:
    """Return why Kueue has not admitted a Workload, or None if it has, or has given no reason yet."""
    if workload["spec"].get("active") is False:
        return "the Workload is deactivated (spec.active is false)"
    conditions = {each["type"]: each for each in (workload.get("status") or {}).get("conditions") or ()}
    for kind in ("QuotaReserved", "Admitted"):
        condition = conditions.get(kind)
        if condition is not None and condition["status"] == "False":
            return str(condition.get("message") or condition.get("reason"))
    checks = (workload.get("status") or {}).get("admissionChecks") or ()
    pending = [each["name"] for each in checks if each.get("state") != "Ready"]
    return f"admission checks are pending: {', '.join(pending)}" if pending else None
