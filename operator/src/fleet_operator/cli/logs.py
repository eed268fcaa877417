"""``fleetjob logs``: prints the merged logs of a job's replicas."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

    from fleet_operator.client.logs import LogLine, Logs

COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")


async def print_logs(logs: Logs, *, follow: bool, show: Callable[[LogLine], None]) -> int:
    """Print existing lines and, with `follow`, new ones; return exit status 1 if no log could be read."""
    async with aclosing(logs.follow() if follow else logs.existing()) as lines:
        async for line in lines:
            show(line)
    return 1 if logs.failed else 0


def print_with(
    *, prefixes: bool, colour: bool, write: Callable[[str], None], timestamps: bool = False
) -> Callable[[LogLine], None]:
    """Return a function that prints a line prefixed with its replica's name, in the replica's colour."""
    chosen: dict[str, str] = {}

    def show(line: LogLine) -> None:
        text = line.stamped.decode(errors="replace") if timestamps else line.text
        if not prefixes:
            write(text)
            return
        prefix = f"[{line.replica}]"
        if colour:
            own = chosen.setdefault(line.replica, COLOURS[len(chosen) % len(COLOURS)])
            prefix = typer.style(prefix, fg=own)
        write(f"{prefix} {text}")

    return show
