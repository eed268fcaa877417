"""The events of a job, as other programs write them too."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from fleet_operator.cli.status import show_events
from fleet_operator.client.session import Session

if TYPE_CHECKING:
    from fleet_operator.kubernetes.client import ApiClient


class Events:
    """An API server that has events alone."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = list(events)

    async def get(self, path: str, params: dict[str, str]) -> dict[str, Any]:
        return {"items": self.events}


async def test_an_event_with_nothing_but_a_date_is_shown():
    bare = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}}
    whole = {
        "metadata": {"creationTimestamp": "2026-01-01T00:00:01Z"},
        "type": "Normal",
        "reason": "Resumed",
        "message": "it goes on",
    }
    said: list[str] = []
    session = Session(cast("ApiClient", Events(bare, whole)), "https://fake", "default")
    assert await show_events(session, "digits", as_json=False, say=said.append) == 0
    assert [line.split()[1:] for line in said] == [["-", "-"], ["Normal", "Resumed", "it", "goes", "on"]]
