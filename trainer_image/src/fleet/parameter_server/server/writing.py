"""A copy of a server's blocks on its way to the disk, while training goes on."""

import threading
from collections.abc import Callable

from fleet.checkpoint import FileRecord
from fleet.errors import FleetError
from fleet.process.resources import for_saves

__all__ = ["Writing"]


class Writing:
    """What one save writes here, in a thread of its own.

    Parameters
    ----------
    save : str
        The random name of the save.
    write : callable
        Writes, and returns what it has written.
    """

    def __init__(self, save: str, write: Callable[[], list[FileRecord]]) -> None:
        self.save = save
        self._files: list[FileRecord] = []
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="fleet-writes", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until nothing is written any more, well or not."""
        self._thread.join()

    def result(self, seconds: float) -> list[FileRecord] | None:
        """Return what was written, or None if that takes longer; raise what has failed."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return None
        if self._failure is not None:
            # A new one each time, as each goes its own way with its own traceback.
            raise type(self._failure)(*self._failure.args) from self._failure
        return self._files

    def _run(self, write: Callable[[], list[FileRecord]]) -> None:
        try:
            with for_saves.lent():
                self._files = write()
        except (FleetError, OSError) as error:
            self._failure = error
        except BaseException as error:  # noqa: BLE001 - who asked for it must not wait in vain
            self._failure = FleetError(f"the save {self.save} failed: {error!r}")
