"""The events of a job, as other programs write them too."""

from __future__ import annotations

from datetime import UTC, datetime
from io import StringIO
from typing import TYPE_CHECKING, Any, cast

from rich.console import Console

from fleet_operator.cli.status import show_events, show_status, table_of
from fleet_operator.client.session import Session
from fleet_operator.client.summary import Summary

if TYPE_CHECKING:
    from fleet_operator.kubernetes.client import ApiClient


class Events:
    """An API server that has events alone."""

    def __init__(self, *events: dict[str, Any]) -> None:
        self.events = list(events)

    async def get(self, path: str, params: dict[str, str]) -> dict[str, Any]:
        return {"items": self.events}


class OneJob:
    """An API server that has one job alone."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job

    async def get(self, path: str, params: dict[str, str] | None = None) -> dict[str, Any]:
        return self.job


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


async def test_what_a_script_printed_does_not_control_the_reader_s_terminal():
    hidden = "failed: \x1b]0;title\x07\x1b[2J\x1b[31mred"
    condition = {"type": "Failed", "status": "True", "reason": "Error", "message": hidden}
    job = {
        "metadata": {"name": "digits", "namespace": "default"},
        "spec": {},
        "status": {
            "state": "Failed",
            "conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"}],
        },
    }
    event = {"metadata": {"creationTimestamp": "2026-01-01T00:00:00Z"}, "message": hidden}
    said: list[str] = []
    session = Session(cast("ApiClient", Events(event)), "https://fake", "default")
    await show_events(session, "digits", as_json=False, say=said.append)
    session = Session(cast("ApiClient", OneJob(job)), "https://fake", "default")
    await show_status(session, "digits", everywhere=False, as_json=False, say=said.append)
    table = table_of([Summary.of(job)], datetime(2026, 1, 1, tzinfo=UTC), everywhere=False)
    Console(file=(file := StringIO()), width=200).print(table)
    for text in (*said, file.getvalue()):
        assert "failed: red" in text
        assert "\x1b" not in text
        assert "\x07" not in text
