"""``fleetjob events``: what has happened to a job, oldest first."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fleet_operator.api.names import KIND
from fleet_operator.cli.clock import now
from fleet_operator.cli.lines import ABSENT
from fleet_operator.cli.summary import age
from fleet_operator.kubernetes.resources import collection

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from fleet_operator.cli.session import Session


async def show_events(session: Session, name: str, *, as_json: bool, say: Callable[[str], None]) -> int:
    """Show the events of a job; the API server keeps them for an hour."""
    selector = {"fieldSelector": f"involvedObject.kind={KIND},involvedObject.name={name}"}
    with session.explained():
        found = await session.client.get(collection("events", session.namespace), selector)
    events = sorted(found["items"], key=lambda event: (_last(event), _version(event)))
    if not events:
        await session.job(name)  # a name that is not there is a mistake
    if as_json:
        say(json.dumps({"apiVersion": "v1", "kind": "EventList", "items": events}, indent=2))
        return 0
    if not events:
        say(f"no events of FleetJob {name}; they are kept for an hour")
    width = max((len(_word(event, "reason")) for event in events), default=0)
    for event in events:
        times = f" (x{event['count']})" if event.get("count", 1) > 1 else ""
        ago = age((now() - datetime.fromisoformat(_last(event))).total_seconds())
        kind, reason = _word(event, "type"), _word(event, "reason")
        say(f"{ago:>4}  {kind:7}  {reason:{width}}  {event.get('message', '')}{times}")
    return 0


def _word(event: Mapping[str, Any], field: str) -> str:
    """Return a field that whoever wrote the event may have left out."""
    return str(event.get(field) or ABSENT)


def _last(event: Mapping[str, Any]) -> str:
    return str(event.get("lastTimestamp") or event["metadata"]["creationTimestamp"])


def _version(event: Mapping[str, Any]) -> int:
    return int(event["metadata"].get("resourceVersion") or 0)
