"""The commands that change jobs on a cluster: ``submit``, ``suspend``, ``resume``, ``scale``, ``delete``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fleet_operator.api import JobState
from fleet_operator.client.summary import Summary
from fleet_operator.local.log import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from fleet_operator.client.session import Session


async def submit(
    session: Session,
    manifest: Mapping[str, Any],
    *,
    wait: bool,
    timeout_seconds: float | None,
    as_json: bool,
    force: bool,
    show: Callable[[str], None],
    say: Callable[[str], None],
) -> int:
    """Create a job, or apply its changed manifest.

    Parameters
    ----------
    session : Session
        The API server.
    manifest : mapping
        A valid FleetJob.
    wait : bool
        Whether to wait until the job has finished, and return its result.
    timeout_seconds : float, optional
        The maximum time to wait.
    as_json : bool
        Whether to show the API server's object as JSON instead of a sentence.
    force : bool
        Whether to take over fields that other field managers have set differently.
    show, say : callable
        Called with the result, and with messages while waiting.
    """
    name = manifest["metadata"]["name"]
    before, after = await session.submit(manifest, force=force)
    show(json.dumps(after, indent=2) if as_json else f"FleetJob {name} {_what_happened(before, after)}")
    if not wait:
        return 0
    job = await session.wait(name, timeout_seconds=timeout_seconds, say=lambda line: say(printable(line)))
    return 0 if job.status.state is JobState.SUCCEEDED else 1


def _what_happened(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> str:
    if before is None:
        return f"created in namespace {after['metadata']['namespace']}"
    changed = before["metadata"].get("generation") != after["metadata"].get("generation")
    state = Summary.of(after).status.state
    if state is not None and state.final:
        again = "to run it again, delete it or use another name"
        return f"{'changed' if changed else 'unchanged'}; it has already {state.value.lower()}: {again}"
    return "changed" if changed else "unchanged"


async def suspend(session: Session, name: str, *, suspended: bool, say: Callable[[str], None]) -> int:
    """Suspend or resume a job."""
    before, after = await session.suspend(name, suspended=suspended)
    if before is after:
        say(f"FleetJob {name} {'is already suspended' if suspended else 'is not suspended'}")
        return 0
    then = "; its pods end, and it starts again when it is resumed" if suspended else "; it starts again"
    say(f"FleetJob {name} {'suspended' if suspended else 'resumed'}{then}")
    return 0


async def scale(session: Session, name: str, *, trainers: int, say: Callable[[str], None]) -> int:
    """Change the number of trainers."""
    before = await session.scale(name, trainers)
    say(f"FleetJob {name} scaled from {before} to {trainers} trainers")
    return 0


async def delete(
    session: Session, name: str, *, wait: bool, timeout_seconds: float, say: Callable[[str], None]
) -> int:
    """Delete a job; with `wait`, return only when its pods are gone."""
    await session.delete(name, wait_seconds=timeout_seconds if wait else None)
    say(f"FleetJob {name} {'deleted' if wait else 'is being deleted'}")
    return 0
