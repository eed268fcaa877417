"""Which checkpoint has all rows of a table, so that the next ones need only have what has changed since."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fleet.checkpoint import CHECKPOINT_PREFIX, BaseRecord, Manifest
from fleet.errors import CheckpointError
from fleet.parameter_server.table_store import RowCopy

__all__ = ["Bases"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Base:
    directory: Path
    save: str
    updates: int
    """How many the table has had."""


class Bases:
    """The newest checkpoints of all rows that this server has written, by table; not for two threads at once.

    One counts once its manifest is on the disk, and while it is there.
    """

    def __init__(self) -> None:
        self._whole: dict[int, _Base] = {}
        self._written: dict[int, _Base] = {}
        """What is being written, and is no checkpoint yet."""

    def since(self, directory: Path) -> Mapping[int, int]:
        """Return after which of its updates the rows of each table must have changed to be in a checkpoint.

        Parameters
        ----------
        directory : Path
            Of the checkpoint. A table without a base in the same folder is left out.
        """
        found = {
            table: base.updates
            for table, base in self._whole.items()
            if base.directory.parent == directory.parent and _is_there(base)
        }
        if not found:
            _log.info("%s gets all rows: there is no checkpoint of all rows beside it yet", directory)
        return found

    def begin(self, directory: Path, save: str, copies: Iterable[RowCopy]) -> Mapping[int, BaseRecord | None]:
        """Take note of what a save is about to write; return by table whose rows its file goes with.

        A table of which all rows are written has no base until that is a checkpoint.
        """
        self._written = {}
        records: dict[int, BaseRecord | None] = {}
        for copy in copies:
            records[copy.table] = None
            if copy.snapshot.since is not None:
                base = self._whole[copy.table]
                records[copy.table] = BaseRecord(base.directory.name, base.save)
                continue
            self._whole.pop(copy.table, None)
            if directory.name.startswith(CHECKPOINT_PREFIX):  # another one may be replaced in its place
                self._written[copy.table] = _Base(directory, save, copy.updates)
        return records

    def committed(self, save: str) -> None:
        """Build on a save from now on, which is a checkpoint."""
        self._whole |= {table: base for table, base in self._written.items() if base.save == save}


def _is_there(base: _Base) -> bool:
    try:
        return Manifest.read(base.directory).save == base.save
    except CheckpointError:
        return False
