"""The live table of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from fleet_operator.cli.lines import ABSENT, duration

if TYPE_CHECKING:
    from datetime import datetime

    from fleet_operator.cli.replica import ReplicaView
    from fleet_operator.cli.view import JobView

STYLES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Restarting": "yellow",
    "Stopping": "yellow",
    "Failed": "bold red",
}


def render(view: JobView, now: datetime) -> Table:
    """Return the table of the job's replicas at this moment."""
    state = view.status.state
    table = Table(title=f"{view.job.name}: {state.value if state else 'Pending'}", title_justify="left")
    for heading in ("replica", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in ("step", "loss", "samples/s", "elapsed"):
        table.add_column(heading, justify="right", no_wrap=True)
    for replica in view.replicas.values():
        style = STYLES.get(replica.state.split(" ")[0], "")
        state_cell = f"[{style}]{replica.state}[/]" if style else replica.state
        table.add_row(replica.name, state_cell, *_numbers(replica, now))
    return table


def _numbers(replica: ReplicaView, now: datetime) -> tuple[str, str, str, str]:
    progress = replica.progress
    elapsed = replica.elapsed_seconds(now)
    shown = ABSENT if elapsed is None else duration(elapsed)
    if progress is None:
        return ABSENT, ABSENT, ABSENT, shown
    total = "" if progress.total_steps is None else f"/{progress.total_steps}"
    return (
        ABSENT if progress.step is None else f"{progress.step}{total}",
        ABSENT if progress.loss is None else f"{progress.loss:.4f}",
        ABSENT if progress.samples_per_second is None else f"{progress.samples_per_second:,.0f}",
        shown,
    )
