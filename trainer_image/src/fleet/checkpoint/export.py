"""Tables of a checkpoint as files of ids and rows, for what serves or trains elsewhere.

All rows, or what has changed since an earlier checkpoint and the ids whose rows have gone. Nothing is read
whole but ids: a table may be larger than memory.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Final
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray

from fleet.checkpoint.manifest import MOST_BEFORE
from fleet.checkpoint.reader import TRAINERS_STATE, Checkpoint
from fleet.checkpoint.rows import files_of, parts_of
from fleet.checkpoint.table_files import write_rows
from fleet.errors import CheckpointError, ConfigurationError
from fleet.plan import describe_difference
from fleet.tables.index import find_among
from fleet.tables.rows import TableRows, rows_at
from fleet.tables.shards import SHARDS

__all__ = ["export_tables"]

_TYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def export_tables(
    checkpoint: str | PathLike[str],
    directory: str | PathLike[str],
    *,
    since: str | PathLike[str] | None = None,
    tables: Sequence[str] = (),
    dtype: str = "float32",
) -> dict[str, Path]:
    """Write tables of a checkpoint as safetensors files of ``ids``, ``rows`` and ``removed``.

    Parameters
    ----------
    checkpoint : path
        A directory that `save_check_point` or `save_persistables` wrote, whichever rows it has.
    directory : path
        Gets a file ``{table}.safetensors`` for each table; made where it is missing.
    since : path, optional
        An earlier checkpoint of the same training. Files then have only the rows that have changed since,
        and in ``removed`` the ids that had a row and have none now.
    tables : sequence of str
        Which; all of the checkpoint's otherwise.
    dtype : str
        What rows are written as: ``float32`` or ``bfloat16``.

    Returns
    -------
    dict of str to Path
        The files, by table.

    Raises
    ------
    CheckpointError
        One of the checkpoints is not whole, or the earlier one is later, of another model or optimizer, or
        of another training.
    ConfigurationError
        There is no such table or type.
    FleetError
        The disk refuses; the message names the file.
    """
    if dtype not in _TYPES:
        raise ConfigurationError(f"rows as {dtype!r}, expected {' or '.join(_TYPES)}")
    found = Checkpoint(Path(checkpoint))
    earlier = None if since is None else Checkpoint(Path(since))
    if earlier is not None:
        _check_earlier(earlier, found)
    known = sorted({file.rows.table for file in found.manifest.files if file.rows is not None})
    if unknown := sorted(set(tables).difference(known)):
        raise ConfigurationError(
            f"{found.directory} has no table {unknown[0]!r}; expected some of {', '.join(known) or 'none'}"
        )
    written = {}
    for table in tables or known:
        path = Path(directory) / f"{quote(table, safe='')}.safetensors"
        write_rows(path, _SavedTable(found, table, earlier), _TYPES[dtype])
        written[table] = path
    return written


def _check_earlier(earlier: Checkpoint, found: Checkpoint) -> None:
    """Refuse a checkpoint that is no earlier one of the same training, as far as the manifests tell."""
    if earlier.manifest.step > found.manifest.step:
        raise CheckpointError(
            f"{earlier.directory} is of step {earlier.manifest.step}, and {found.directory} of step "
            f"{found.manifest.step}; expected an earlier checkpoint of the same training as since"
        )
    after = found.manifest.after
    before = None if after is None or len(after) >= MOST_BEFORE else (*after, found.manifest.save)
    if before is not None and earlier.manifest.save not in before:  # else nobody knows them all
        raise CheckpointError(
            f"{earlier.directory} is the save {earlier.manifest.save}, which is none of the "
            f"{len(before) - 1} before {found.directory}: another training has made it, or this one has gone "
            "back to a checkpoint before it; expected an earlier checkpoint of the same training as since"
        )
    here, there = dict(earlier.manifest.facts), dict(found.manifest.facts)
    for facts in (here, there):
        facts.pop(TRAINERS_STATE, None)  # before its first step a trainer has none
    if difference := describe_difference(here, there):
        raise CheckpointError(
            f"{earlier.directory} (here) and {found.directory} (there) are of two trainings: {difference}; "
            "expected an earlier checkpoint of the same training as since"
        )


class _SavedTable:
    """What of a table is to be written; see `fleet.checkpoint.table_files.Source`."""

    def __init__(self, checkpoint: Checkpoint, table: str, earlier: Checkpoint | None = None) -> None:
        self._checkpoint = checkpoint
        self._table = table
        self._files = files_of(checkpoint, table, range(SHARDS))
        self.step = checkpoint.manifest.step
        self.since: int | None = None
        self.removed = np.zeros(0, dtype=np.int64)
        self._after = -1
        """Rows whose last update came later are written."""
        if earlier is not None:
            before = _SavedTable(earlier, table)
            self.since, self._after = before.step, before.updates()
            self.removed = np.setdiff1d(before.ids(), self.ids())

    def ids(self) -> NDArray[np.int64]:
        """Return the ids that have a row."""
        return np.concatenate([part.ids for part in self._read("ids")])

    def updates(self) -> int:
        """Return how many updates every server's part has had: without barriers some have had more."""
        return min(record.updates for found, _, record in self._files if found is self._checkpoint)

    @cached_property
    def none(self) -> TableRows:
        """No rows."""
        return rows_at(next(self._read("ids", "values")), np.zeros(0, dtype=np.int64))

    @cached_property
    def num_rows(self) -> int:
        """How many rows are to be written."""
        return sum(part.ids.size for part in self._wanted("ids", "marks.last"))

    def parts(self) -> Iterator[TableRows]:
        """Yield the rows that are to be written."""
        return self._wanted("ids", "values", "marks.last")

    def _wanted(self, *columns: str) -> Iterator[TableRows]:
        for part in self._read(*columns):
            yield rows_at(part, np.flatnonzero(part.marks["last"].numpy() > self._after))

    def _read(self, *columns: str) -> Iterator[TableRows]:
        """Yield all rows, each once, with some of their columns."""
        for found, file, _ in self._files:
            for _, part in parts_of(found, file, self._table, columns):
                if found is not self._checkpoint:
                    part = rows_at(part, np.flatnonzero(~find_among(part.ids, self._newer)[0]))
                yield part

    @cached_property
    def _newer(self) -> NDArray[np.int64]:
        """Ids of rows of a base that have changed or gone since, ascending; none without a base."""
        changed = [np.zeros(0, dtype=np.int64)]
        for found, file, record in self._files:
            if found is self._checkpoint and record.base is not None:
                for removed, rows in parts_of(found, file, self._table, ["ids"]):
                    changed += [removed, rows.ids]
        return np.unique(np.concatenate(changed))
