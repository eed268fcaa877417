"""``fleetjob status`` and ``fleetjob events``: the state of jobs, and the events of one job."""

from __future__ import annotations

import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fleet_operator.api import JobState
from fleet_operator.api.names import API_VERSION, PLURAL
from fleet_operator.cli.lines import now
from fleet_operator.cli.table import STYLES
from fleet_operator.client.session import ClusterRefusal, last_time
from fleet_operator.client.summary import ABSENT, Summary, age, details
from fleet_operator.local.log import printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from fleet_operator.client.session import Session, Watched


REDRAW_SECONDS = 1.0
PIPE_COLUMNS = 4096  # programs that read the table need whole sentences


async def show_status(
    session: Session, name: str | None, *, everywhere: bool, as_json: bool, say: Callable[[str], None]
) -> int:
    """Show one job in full, or all jobs in a table; return the exit status."""
    if name is not None:
        job = await session.job(name)
        lines = map(printable, details(Summary.of(job), now()))
        say(json.dumps(job, indent=2) if as_json else "\n".join(lines))
        return 0
    jobs = await session.jobs(everywhere=everywhere)
    if as_json:
        say(json.dumps({"apiVersion": API_VERSION, "kind": "FleetJobList", "items": jobs}, indent=2))
    elif jobs:
        console = Console()
        if not console.is_terminal:
            console.width = PIPE_COLUMNS
        console.print(table_of(map(Summary.of, jobs), now(), everywhere=everywhere))
    else:
        where = "any namespace" if everywhere else f"namespace {session.namespace}"
        say(f"no FleetJob in {where}")
    return 0


async def watch_status(
    session: Session, name: str | None, *, everywhere: bool, say: Callable[[str], None]
) -> int:
    """Show all jobs until interrupted, or one job until it finishes; return 0 on success, 1 on failure."""
    if name is not None:
        await session.job(name)  # an unknown name is a mistake, not a job to wait for
    console = Console()
    async with session.watching(PLURAL, job=name, everywhere=everywhere) as watched:
        if console.is_terminal:
            return await _table(watched, name, everywhere=everywhere, console=console)
        return await _lines(watched, name, everywhere=everywhere, say=say)


async def _table(watched: Watched, name: str | None, *, everywhere: bool, console: Console) -> int:
    def render() -> Table:
        return table_of(map(Summary.of, watched.all()), now(), everywhere=everywhere)

    with Live(get_renderable=render, console=console, auto_refresh=False) as live:
        while True:
            live.refresh()
            if (ended := _end(watched, name)) is not None:
                return ended
            await watched.change(REDRAW_SECONDS)  # the displayed ages change even without events


async def _lines(watched: Watched, name: str | None, *, everywhere: bool, say: Callable[[str], None]) -> int:
    said: dict[tuple[str, str], str] = {}
    while True:
        jobs = {(job.namespace, job.name): job for job in map(Summary.of, watched.all())}
        for key, job in jobs.items():
            if said.get(key) != (line := job.line()):
                said[key] = line
                say(printable(f"{job.namespace}/{line}" if everywhere else line))
        for key in said.keys() - jobs.keys():
            del said[key]
            say(f"{key[1]} is gone")
        if (ended := _end(watched, name)) is not None:
            return ended
        await watched.change()


def _end(watched: Watched, name: str | None) -> int | None:
    """Return the exit status if the single watched job has finished, else None."""
    if name is None:
        return None
    jobs = watched.all()
    if not jobs:
        raise ClusterRefusal(f"FleetJob {name} has been deleted")
    job = Summary.of(jobs[0])
    if not job.status.finished:
        return None
    return 0 if job.status.state is JobState.SUCCEEDED else 1


def table_of(jobs: Iterable[Summary], moment: datetime, *, everywhere: bool) -> Table:
    """Return a table of the given jobs."""
    table = Table(box=None, pad_edge=False, header_style="", padding=(0, 3, 0, 0))
    for heading in (*(("NAMESPACE",) if everywhere else ()), "NAME", "STATE"):
        table.add_column(heading, no_wrap=True)
    for heading in ("PSERVERS", "TRAINERS", "PROGRESS", "LOSS", "ETA", "RESTARTS", "AGE"):
        table.add_column(heading, no_wrap=True, justify="left")
    table.add_column("WHY")  # the column that is truncated on a narrow terminal
    for job in jobs:
        first = (Text(job.namespace),) if everywhere else ()
        state = Text(job.state, style=STYLES.get(job.state, ""))
        # A sentence quotes what the script printed last, and whoever looks is not always its author.
        why = Text(printable(job.sentence), no_wrap=True, overflow="ellipsis")
        table.add_row(*first, Text(job.name), state, *_numbers(job), job.age(moment), why)
    return table


def _numbers(job: Summary) -> Sequence[str]:
    status, progress = job.status, job.status.progress
    loss: Any = progress.loss if progress is not None else None
    eta = progress.eta_seconds if progress is not None else None
    return (
        status.columns.pservers or ABSENT,
        status.columns.trainers or ABSENT,
        job.progress,
        ABSENT if loss is None else f"{loss:.4g}",
        ABSENT if eta is None else age(eta),
        str(status.restarts),
    )


async def show_events(session: Session, name: str, *, as_json: bool, say: Callable[[str], None]) -> int:
    """Show the events of a job; the API server keeps them for an hour."""
    events = await session.events(name)
    if not events:
        await session.job(name)  # an unknown name is a mistake
    if as_json:
        say(json.dumps({"apiVersion": "v1", "kind": "EventList", "items": events}, indent=2))
        return 0
    if not events:
        say(f"no events of FleetJob {name}; they are kept for an hour")
    width = max((len(_word(event, "reason")) for event in events), default=0)
    for event in events:
        times = f" (x{event['count']})" if event.get("count", 1) > 1 else ""
        ago = age((now() - datetime.fromisoformat(last_time(event))).total_seconds())
        kind, reason = _word(event, "type"), _word(event, "reason")
        say(printable(f"{ago:>4}  {kind:7}  {reason:{width}}  {event.get('message', '')}{times}"))
    return 0


def _word(event: Mapping[str, Any], field: str) -> str:
    """Return an optional field of an event as text."""
    return str(event.get(field) or ABSENT)
