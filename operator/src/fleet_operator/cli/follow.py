"""``fleetjob run --follow``: what a replica prints, while it prints it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from fleet_operator.local.log import printable, split_time

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

READ_BYTES = 1 << 18
"""How much is read at once: a replica that prints faster is shown a little later."""


class Follower:
    """Shows the lines that are added to the log of a replica.

    Parameters
    ----------
    log : Path
        The log, which need not be there yet. What it holds already, of an earlier run, is not shown.
    replica : str
        The replica's name, which leads each line.
    show : callable
        Called with each line.
    """

    def __init__(self, log: Path, replica: str, show: Callable[[str], None]) -> None:
        self._log = log
        self._replica = replica
        self._show = show
        self._rest = b""
        self._position = 0
        with contextlib.suppress(FileNotFoundError):
            self._position = log.stat().st_size

    def read(self) -> bool:
        """Show what one read brings; return False if there is no more now."""
        try:
            with self._log.open("rb") as file:
                file.seek(self._position)
                data = file.read(READ_BYTES)
        except FileNotFoundError:
            return False
        self._position += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._show_line(line)
        return len(data) == READ_BYTES

    def finish(self) -> None:
        """Show all that is left, a line without an end as well."""
        while self.read():
            pass
        if self._rest:
            self._show_line(self._rest)
            self._rest = b""

    def _show_line(self, line: bytes) -> None:
        moment, text = split_time(line.decode(errors="replace"))
        clock = "" if moment is None else f"{moment.astimezone():%H:%M:%S} "
        self._show(f"[{self._replica}] {clock}{printable(text)}")
