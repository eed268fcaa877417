"""The commands that change a job on a cluster: ``submit``, ``suspend``, ``resume``, ``scale``, ``delete``."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

from fleet_operator.api import JobState
from fleet_operator.api.names import PLURAL
from fleet_operator.cli.session import MANAGER, ClusterRefusal
from fleet_operator.cli.summary import Summary
from fleet_operator.kubernetes.client import ApiError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from fleet_operator.cli.session import Session

TIMED_OUT = 124  # the exit status of timeout(1)
SHOWN_NAMES = 3


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
    own = manifest["metadata"].get("namespace") or session.namespace
    if own != session.namespace:
        raise ClusterRefusal(
            f"the manifest is for namespace {own}, and {session.namespace} was asked for; give -n {own}"
        )
    before: Mapping[str, Any] | None = None
    with session.explained(name):
        try:
            before = await session.client.get(session.path(name))
        except ApiError as error:
            if error.status != 404:
                raise
    document = {**manifest, "metadata": {**manifest["metadata"], "namespace": session.namespace}}
    with session.explained():
        try:
            after = await session.client.apply(session.path(name), document, manager=MANAGER, force=force)
        except ApiError as error:
            if error.status != 409:
                raise
            said = " ".join(str(error).split())
            raise ClusterRefusal(
                f"{said}; to take over what others have set, add --force-conflicts"
            ) from error
    show(json.dumps(after, indent=2) if as_json else f"FleetJob {name} {_what_happened(before, after)}")
    if not wait:
        return 0
    return await wait_for_end(session, name, timeout_seconds=timeout_seconds, say=say)


def _what_happened(before: Mapping[str, Any] | None, after: Mapping[str, Any]) -> str:
    if before is None:
        return f"created in namespace {after['metadata']['namespace']}"
    changed = before["metadata"].get("generation") != after["metadata"].get("generation")
    state = Summary.of(after).status.state
    if state is not None and state.final:
        again = "delete it, or give the new one another name, to run it again"
        return f"{'changed' if changed else 'unchanged'}; it has {state.value.lower()} already: {again}"
    return "changed" if changed else "unchanged"


async def wait_for_end(
    session: Session, name: str, *, timeout_seconds: float | None, say: Callable[[str], None]
) -> int:
    """Report changes until the job has finished; return 0 if it succeeded, 1 if not, 124 on a time-out."""
    said = ""
    try:
        async with asyncio.timeout(timeout_seconds), session.watching(PLURAL, job=name) as watched:
            while True:
                jobs = watched.all()
                if not jobs:
                    raise ClusterRefusal(f"FleetJob {name} was deleted before it had finished")
                job = Summary.of(jobs[0])
                if (line := job.line()) != said:
                    say(said := line)
                if job.status.finished:
                    return 0 if job.status.state is JobState.SUCCEEDED else 1
                await watched.change()
    except TimeoutError:
        say(f"FleetJob {name} has not finished after {timeout_seconds:g} s; it goes on, and was last: {said}")
        return TIMED_OUT


async def suspend(session: Session, name: str, *, suspended: bool, say: Callable[[str], None]) -> int:
    """Suspend or resume a job."""
    job = await session.job(name)
    now = bool(((job.get("spec") or {}).get("runPolicy") or {}).get("suspend"))
    verb, done = ("suspend", "suspended") if suspended else ("resume", "resumed")
    if now == suspended:
        say(f"FleetJob {name} {'is suspended' if suspended else 'is not suspended'} already")
        return 0
    if Summary.of(job).status.finished:
        raise ClusterRefusal(f"FleetJob {name} has finished: there is nothing to {verb}")
    patch = {"spec": {"runPolicy": {"suspend": suspended}}}
    with session.explained(name):
        await session.client.merge_patch(session.path(name), patch, manager=MANAGER)
    then = "; its pods end, and it starts anew when it is resumed" if suspended else "; it starts anew"
    say(f"FleetJob {name} {done}{then}")
    return 0


async def scale(session: Session, name: str, *, trainers: int, say: Callable[[str], None]) -> int:
    """Change the number of trainers."""
    await session.job(name)
    path, patch = session.path(name, "scale"), {"spec": {"replicas": trainers}}
    with session.explained(name):
        before = await session.client.get(path)
        await session.client.merge_patch(path, patch, manager=MANAGER)
    say(f"FleetJob {name} scaled from {before['spec'].get('replicas', 0)} to {trainers} trainers")
    return 0


async def delete(
    session: Session, name: str, *, wait: bool, timeout_seconds: float, say: Callable[[str], None]
) -> int:
    """Delete a job; with `wait`, return once its pods are gone."""
    with session.explained(name):
        await session.client.delete(session.path(name), {"propagationPolicy": "Background"})
    if not wait:
        say(f"FleetJob {name} is being deleted")
        return 0
    left: list[str] = []
    try:
        async with asyncio.timeout(timeout_seconds), session.watching("pods", job=name) as watched:
            while left := [pod["metadata"]["name"] for pod in watched.all()]:
                await watched.change()
    except TimeoutError:
        more = f" and {len(left) - SHOWN_NAMES} more" if len(left) > SHOWN_NAMES else ""
        shown = ", ".join(left[:SHOWN_NAMES])
        say(f"FleetJob {name} is deleted, but after {timeout_seconds:g} s there still is {shown}{more}")
        return TIMED_OUT
    say(f"FleetJob {name} deleted")
    return 0
