"""The display of a run on standard error: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Protocol

from rich.live import Live
from rich.markup import escape

from fleet_operator.cli.lines import describe_progress
from fleet_operator.cli.table import render

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from datetime import datetime

    from rich.console import Console, Group

    from fleet_operator.cli.view import JobView

PROGRESS_SECONDS = 5.0


class Display(Protocol):
    """Shows the events and the progress of a run."""

    def say(self, line: str) -> None:
        """Print a line immediately."""

    def showing(self, view: JobView) -> contextlib.AbstractContextManager[None]:
        """Show a job's state within the ``with`` block."""

    def refresh(self) -> None:
        """Update the display; called several times a second."""


class LineDisplay:
    """Shows one line per event, and one line about progress every few seconds."""

    def __init__(self, console: Console, now: Callable[[], datetime]) -> None:
        self._console = console
        self._now = now
        self._waiting: list[str] = []
        self._started = time.monotonic()
        self._view: JobView | None = None
        self._next_progress = 0.0
        self._last = ""

    def say(self, line: str) -> None:
        """Print a line, preceded by the number of seconds since the run began.

        A full disk or a closed pipe does not end the training.
        """
        elapsed = time.monotonic() - self._started
        with contextlib.suppress(OSError):
            self._console.file.write(f"{elapsed:7.1f} s  {line}\n")
            self._console.file.flush()

    @contextlib.contextmanager
    def showing(self, view: JobView) -> Iterator[None]:
        """Print a job's progress within the ``with`` block."""
        self._view = view
        try:
            yield
        finally:
            self._view = None

    def refresh(self) -> None:
        """Every few seconds, print changed progress and what replicas are waiting for."""
        moment = time.monotonic()
        if self._view is None or moment < self._next_progress:
            return
        waiting = self._view.waiting(self._now())
        line = describe_progress(self._view.replicas.values())
        lines = [each for each in waiting if each not in self._waiting]
        lines += [line] if line and line != self._last else []
        self._waiting, self._last = waiting, line
        if lines:
            self._next_progress = moment + PROGRESS_SECONDS
        for each in lines:
            self.say(each)


class TableDisplay:
    """Shows a table that is redrawn in place, below the printed lines."""

    def __init__(self, console: Console, now: Callable[[], datetime]) -> None:
        self._console = console
        self._now = now
        self._live: Live | None = None

    def say(self, line: str) -> None:
        """Print a line above the table."""
        with self._tolerant():
            self._console.print(escape(line), highlight=False, soft_wrap=True)  # so that paths can be copied

    @contextlib.contextmanager
    def showing(self, view: JobView) -> Iterator[None]:
        """Draw a job's table within the ``with`` block, and leave its final state on the screen."""

        def rendered() -> Group:
            size = self._console.size
            return render(view, self._now(), width=size.width, height=size.height)

        live = Live(get_renderable=rendered, console=self._console, auto_refresh=False)
        with self._tolerant():
            live.start()
            self._live = live
        try:
            yield
        finally:
            if self._live is not None:
                self._live = None
                with self._tolerant():
                    live.stop()

    def refresh(self) -> None:
        """Redraw the table."""
        if self._live is not None and not self._console.quiet:
            with self._tolerant():
                self._live.refresh()

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        # A terminal that was closed gives EIO before SIGHUP has stopped the run. The console keeps what it
        # could not write and would try it again each time, so nothing more is given to it.
        try:
            yield
        except OSError:
            self._console.quiet = True


class DisplayHandler(logging.Handler):
    """A logging handler that shows the operator's log without breaking the table."""

    def __init__(self, display: Display) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record's message without its traceback, which would help only the runner's developers."""
        error = record.exc_info[1] if record.exc_info else None
        why = f": {type(error).__name__}: {error}" if error is not None else ""
        self._display.say(f"{record.levelname.lower()}: {record.getMessage()}{why}")
