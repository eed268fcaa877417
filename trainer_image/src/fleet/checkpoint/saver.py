"""Saving during training: the values are copied, and a background thread writes the copy.

The trainers of both runtimes save through this flow. A full disk never ends the training run: the save is
skipped with a warning, the previous checkpoint stays, and the next save tries again.
"""

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

from fleet.checkpoint.folders import CHECKPOINT_PREFIX
from fleet.checkpoint.trainer_part import TrainStatus
from fleet.errors import FleetError, no_room
from fleet.process.resources import for_saves

__all__ = ["Saver"]

_log = logging.getLogger(__name__)
_LONG_SECONDS = 1.0


class Saver(ABC):
    """Saves checkpoints of one training run, one at a time.

    A subclass makes the copy, and lists and removes the checkpoints of a folder. Its methods may raise a
    FleetError. The save raises it; if the error occurs in the background, the next call raises it.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        # The two threads share these without a lock: every save first joins the thread of the previous one.
        self._failure: BaseException | None = None
        self._skipped = ""
        """The directory of the last save, if the disk had no room for it."""

    @property
    @abstractmethod
    def current_step(self) -> int:
        """The number of steps since the start of the job."""

    @abstractmethod
    def _copy(self, directory: str, status: TrainStatus, *, incremental: bool = False) -> Callable[[], None]:
        """Copy the checkpoint's content; return the function that writes and commits it."""

    @abstractmethod
    def _list_numbers(self, folder: str) -> list[int]:
        """Return the numbers of the checkpoints in a folder."""

    @abstractmethod
    def _remove(self, folder: str, number: int) -> None:
        """Remove a numbered checkpoint whose save failed."""

    @abstractmethod
    def _keep_newest(self, folder: str, keep: int) -> None:
        """Remove all checkpoints in a folder except the newest `keep` complete ones."""

    def save(self, directory: str, status: TrainStatus) -> None:
        """Save a checkpoint; unless the disk is full, it is durable when the call returns.

        Parameters
        ----------
        directory : str
            The path as the writing process sees it.
        status : TrainStatus
            The script's status. The save fills in the step.

        Raises
        ------
        ConfigurationError
            The status holds a value that a checkpoint cannot hold.
        FleetError
            The write fails for another reason, and the message names the file; or the previous save failed.
        """
        began = self._wait_for_previous(directory)
        self._start(directory, began, lambda: self._copy(directory, status))
        self.wait()

    def save_numbered(self, folder: str, status: TrainStatus, *, keep: int, incremental: bool = False) -> int:
        """Save a checkpoint under the next number in a folder, in the background.

        Parameters
        ----------
        folder : str
            The path as the writing process sees it.
        status : TrainStatus
        keep : int
            How many complete checkpoints to keep; 0 for all.
        incremental : bool
            Whether to save only the changed rows of tables.

        Returns
        -------
        int
            The number; -1 if the disk is full, which is logged.

        Raises
        ------
        FleetError
            As `save`; a failure of the write is raised by the next call.
        """
        began, number = self._wait_for_previous(folder), -1
        with self._skip_if_full(folder):
            number = max(self._list_numbers(folder), default=-1) + 1
        if number < 0:
            return number
        directory = f"{folder}/{CHECKPOINT_PREFIX}{number}"

        def copy() -> Callable[[], None]:
            write = self._copy(directory, status, incremental=incremental)

            def write_and_clean() -> None:
                try:
                    write()
                except FleetError:
                    with contextlib.suppress(FleetError):  # the first error is the one to report
                        self._remove(folder, number)
                    raise
                if keep:
                    self._keep_newest(folder, keep)

            return write_and_clean

        self._start(directory, began, copy)
        return number

    def clean(self, folder: str, keep: int) -> None:
        """Remove all checkpoints in a folder except the newest `keep` complete ones."""
        self.wait()
        self._keep_newest(folder, keep)

    def wait(self) -> None:
        """Wait until the last save has been written; if it failed, raise its error."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def finish(self) -> None:
        """Wait for the last save; if the disk was full, log an error instead of raising it."""
        self.wait()
        if self._skipped:
            _log.error("training ends without its last checkpoint: there was no room for %s", self._skipped)

    def _wait_for_previous(self, directory: str) -> float:
        """Wait for the previous save; return the time when the wait started."""
        began = time.monotonic()
        self.wait()
        waited = time.monotonic() - began
        if waited > _LONG_SECONDS:
            _log.warning("training waited %.1f s for the save before %s to be written", waited, directory)
        return began

    def _start(self, directory: str, began: float, copy: Callable[[], Callable[[], None]]) -> None:
        """Copy the checkpoint's content, then write the copy in a background thread."""
        step = self.current_step
        write: Callable[[], None] | None = None
        with self._skip_if_full(directory):
            write = copy()
        if write is None:
            return
        stalled = time.monotonic() - began

        def run() -> None:
            try:
                with self._skip_if_full(directory):
                    write()
                    if self._skipped:
                        _log.warning("there is room for checkpoints again")
                        self._skipped = ""
                    took = time.monotonic() - began
                    _log.info(
                        "%s holds step %d: training waited %.2f s, and it was durable after %.2f s",
                        directory,
                        step,
                        stalled,
                        took,
                    )
            except BaseException as error:  # noqa: BLE001 - the next call raises it
                self._failure = error
                _log.warning("%s was not saved: %s", directory, error)

        # Not a daemon: a script that ends without stop_worker() still gets its last checkpoint.
        self._thread = threading.Thread(target=run, name="fleet-checkpoint")
        self._thread.start()

    @contextlib.contextmanager
    def _skip_if_full(self, directory: str) -> Iterator[None]:
        """Skip a save in the `with` block, with a warning, if disk space or file descriptors run out."""
        try:
            # A save must be able to open its files even if the script has used up all other descriptors.
            with for_saves.lent():
                yield
        except (FleetError, OSError) as error:
            if not no_room(error):
                raise
            self._skipped = directory
            _log.warning(
                "there is no room for a checkpoint: %s. Training continues without it, the previous one "
                "stays, and the next save tries again",
                error,
            )
