"""Writing while training goes on: one save at a time, and a disk without room is no reason to end."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator

from fleet.errors import FleetError, no_room
from fleet.process.resources import for_saves

__all__ = ["Background"]

_log = logging.getLogger(__name__)


class Background:
    """Finishes saves in a thread of its own; a save that comes meanwhile waits for the one before."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.full = ""
        """Which save found no room, if the last one did."""

    def begin(self, directory: str, step: int, copy: Callable[[], Callable[[], None]]) -> None:
        """Make a copy now, and write it in the background.

        Parameters
        ----------
        directory : str
            Where to, for messages.
        step : int
            After which step.
        copy : callable
            Makes the copy, and returns what writes it.

        Raises
        ------
        Exception
            What `copy` raises, but for a full disk; or what the save before this one has raised.
        """
        began = time.monotonic()
        self.wait()
        waited = time.monotonic() - began
        if waited > 1.0:
            _log.warning(
                "training waited %.1f s until the checkpoint before %s was written", waited, directory
            )
        write: Callable[[], None] | None = None
        with self.pausing(directory):
            write = copy()
        if write is None:
            return
        stalled = time.monotonic() - began

        def finish() -> None:
            try:
                with self.pausing(directory):
                    write()
                    self._note(directory, step, stalled, time.monotonic() - began)
            except BaseException as error:  # noqa: BLE001 - whoever waits raises it
                self._failure = error
                _log.warning("%s was not saved: %s", directory, error)

        # No daemon: a script that just ends has its last checkpoint written.
        self._thread = threading.Thread(target=finish, name="fleet-checkpoint")
        self._thread.start()

    def save(self, directory: str, step: int, copy: Callable[[], Callable[[], None]]) -> None:
        """Make a copy and write it; it is durable when this returns, unless a disk is full. See `begin`."""
        self.begin(directory, step, copy)
        self.wait()

    def wait(self) -> None:
        """Wait until nothing is being written any more, and raise what has failed."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def end(self) -> None:
        """Wait for the last save, as training is over, and say so if there was no room for it."""
        self.wait()
        if self.full:
            _log.error("training ends without its last checkpoint: there was no room for %s", self.full)

    @contextlib.contextmanager
    def pausing(self, directory: str) -> Iterator[None]:
        """Go on without what the block was to save where a disk, or the system, has no room for it."""
        try:
            with for_saves.lent():
                yield
        except (FleetError, OSError) as error:
            if not no_room(error):
                raise
            self.full = directory
            _log.warning(
                "there is no room for a checkpoint: %s. Training goes on without it, the one before stays, "
                "and the next save tries again",
                error,
            )

    def _note(self, directory: str, step: int, stalled: float, took: float) -> None:
        if self.full:
            _log.warning("there is room for checkpoints again")
            self.full = ""
        _log.info(
            "%s holds step %d: training waited %.2f s, and it was durable after %.2f s",
            directory,
            step,
            stalled,
            took,
        )
