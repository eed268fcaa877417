"""Pure functions that render the live table of a run to fit the terminal.

Servers and trainers have a table each, below a bar with the progress of trainer 0. Columns that do not fit
are left out one by one, but never a replica's name, state and step. If there are more replicas than rows,
failed replicas are shown first, then as many of the others as fit; the last row counts the rest.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Group
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fleet_operator.api import Role
from fleet_operator.cli.lines import clock
from fleet_operator.client.summary import ABSENT, size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from datetime import datetime

    from rich.console import RenderableType

    from fleet_operator.cli.replica import ReplicaView
    from fleet_operator.cli.view import JobView

STYLES = {
    "Running": "green",
    "Succeeded": "bold green",
    "Restarting": "yellow",
    "Starting": "yellow",
    "Stopping": "yellow",
    "Stopped": "cyan",
    "Failed": "bold red",
}
TROUBLE = ("Failed", "Restarting", "Stopping", "Starting", "Waiting")
"""The states that are shown first if there are more replicas than rows, ordered by severity."""

GAP = 2  # columns of the terminal between two cells
LEAST_ROWS = 2  # the minimum for each table, even on a small terminal
BAR_COLUMNS = 40  # the maximum
MOST_WAITING = 4  # the maximum number of lines about what replicas are waiting for


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of the table."""

    heading: str
    rank: int  # if not all columns fit, those of the highest rank are left out first; rank 0 stays
    cell: Callable[[ReplicaView, datetime], str]
    stays_empty: bool = True  # whether the column is shown even if it is empty


def _step(replica: ReplicaView, _: datetime) -> str:
    progress = replica.progress
    if progress is None or progress.step is None:
        return ABSENT
    return f"{progress.step}" + ("" if progress.total_steps is None else f"/{progress.total_steps}")


def _loss(replica: ReplicaView, _: datetime) -> str:
    progress = replica.progress
    return ABSENT if progress is None or progress.loss is None else f"{progress.loss:.4f}"


def _rate(replica: ReplicaView, _: datetime) -> str:
    rate = replica.progress.samples_per_second if replica.progress is not None else None
    return ABSENT if rate is None else f"{rate:,.0f}"


def _memory(replica: ReplicaView, _: datetime) -> str:
    held = replica.progress.memory_bytes if replica.progress is not None else None
    return ABSENT if held is None else size(held)


def _rows(replica: ReplicaView, _: datetime) -> str:
    tables = replica.progress.tables if replica.progress is not None else ()
    return f"{sum(table.rows for table in tables):,}" if tables else ABSENT


def _bytes(replica: ReplicaView, _: datetime) -> str:
    """Return the size of a server's parameters and tables."""
    progress = replica.progress
    if progress is None or (progress.parameter_bytes is None and not progress.tables):
        return ABSENT
    return size((progress.parameter_bytes or 0) + sum(table.bytes for table in progress.tables))


def _elapsed(replica: ReplicaView, now: datetime) -> str:
    elapsed = replica.elapsed_seconds(now)
    return ABSENT if elapsed is None else clock(elapsed)


COLUMNS = {
    Role.PSERVER: (
        _Column("memory", 0, _memory),
        _Column("rows", 1, _rows, stays_empty=False),
        _Column("bytes", 2, _bytes, stays_empty=False),
        _Column("elapsed", 3, _elapsed),
    ),
    Role.TRAINER: (
        _Column("step", 0, _step),
        _Column("loss", 1, _loss),
        _Column("samples/s", 2, _rate),
        _Column("elapsed", 3, _elapsed),
    ),
}


def render(view: JobView, now: datetime, *, width: int, height: int) -> Group:
    """Return the display of a job for a terminal of `width` columns and `height` rows."""
    width = max(1, width)  # the environment variable COLUMNS may be 0
    title = Text(f"{view.job.name}: {view.state}", style=f"bold {STYLES.get(view.state, '')}".strip())
    bar = _bar(view, width)
    head = [title] if bar is None else [title, bar]
    told = view.waiting(now)
    if len(told) > MOST_WAITING:
        told = [*told[: MOST_WAITING - 1], f"and {len(told) - MOST_WAITING + 1} more are waiting"]
    waiting = [Text(line, style="yellow") for line in told]
    roles = [
        [replica for replica in view.replicas.values() if replica.role is role] for role in view.job.roles
    ]
    lines = len(head) + sum(math.ceil(len(line) / width) for line in waiting) + len(roles)
    tables = [
        _table(replicas, rows, now, width)
        for replicas, rows in zip(roles, _shared(height - 1 - lines, [*map(len, roles)]), strict=True)
    ]
    return Group(*head, *tables, *waiting)


def _shared(rows: int, wanted: Sequence[int]) -> list[int]:
    """Divide the terminal's rows among tables; larger tables get the rows that small ones leave over."""
    shares = dict[int, int]()
    for place, number in sorted(enumerate(wanted), key=lambda each: each[1]):
        fair = max(LEAST_ROWS, rows // (len(wanted) - len(shares)))
        shares[place] = min(number, fair)
        rows -= shares[place]
    return [shares[place] for place in range(len(wanted))]


def _bar(view: JobView, width: int) -> RenderableType | None:
    """Return a progress bar for the first trainer with a known number of steps, or None."""
    replica = next((each for each in view.replicas.values() if each.percentage is not None), None)
    if replica is None or replica.percentage is None:
        return None
    eta = replica.eta_seconds
    words = f"{replica.percentage}%" + ("" if eta is None else f"  ETA {clock(eta)}")
    columns = min(BAR_COLUMNS, width - GAP - len(words))
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_row(ProgressBar(total=100, completed=replica.percentage, width=max(1, columns)), words)
    return grid


def _table(replicas: Sequence[ReplicaView], rows: int, now: datetime, width: int) -> RenderableType:
    """Return a table with at most `rows` rows below its headings."""
    shown = _chosen(replicas, rows) if rows < len(replicas) else replicas
    columns = [
        (column, [column.cell(replica, now) for replica in shown]) for column in COLUMNS[replicas[0].role]
    ]
    columns = [(each, cells) for each, cells in columns if each.stays_empty or {*cells} != {ABSENT}]
    names, states = [replica.name for replica in shown], [_state(replica) for replica in shown]
    heading = replicas[0].role.value

    def widths() -> int:
        headed = [(heading, names), ("state", states), *((each.heading, cells) for each, cells in columns)]
        return sum(max(map(len, (head, *cells))) + GAP for head, cells in headed) - GAP

    while widths() > width and (last := max(columns, key=lambda each: each[0].rank))[0].rank:
        columns.remove(last)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for head in (heading, "state"):
        table.add_column(head, no_wrap=True)
    for column, _ in columns:
        table.add_column(column.heading, justify="right", no_wrap=True)
    for row, replica in enumerate(shown):
        state = Text(states[row], style=STYLES.get(replica.state, ""))
        table.add_row(names[row], state, *(cells[row] for _, cells in columns))
    if len(shown) == len(replicas):
        return table
    kept = {replica.index for replica in shown}
    counts = Counter(replica.state for replica in replicas if replica.index not in kept)
    told = ", ".join(f"{count} {state}" for state, count in counts.most_common())
    more = Text(f"and {counts.total()} more: {told}", style="dim", no_wrap=True, overflow="ellipsis")
    return Group(table, more)


def _chosen(replicas: Sequence[ReplicaView], rows: int) -> list[ReplicaView]:
    """Return the replicas to show when the last row counts the rest; failed replicas come first."""
    rank = {state: position for position, state in enumerate(TROUBLE)}
    ranked = sorted(replicas, key=lambda replica: rank.get(replica.state, len(TROUBLE)))
    kept = {replica.index for replica in ranked[: max(1, rows - 1)]}
    return [replica for replica in replicas if replica.index in kept]


def _state(replica: ReplicaView) -> str:
    failed = replica.state == "Failed" and replica.pod is not None
    return f"Failed ({replica.pod.exit_code})" if failed and replica.pod else replica.state
