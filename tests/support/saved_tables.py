"""Tables in checkpoints: one with all rows, and one with later changes."""

from pathlib import Path

import numpy as np
import torch

from fleet.checkpoint import BaseRecord, FileRecord, Manifest, RowsRecord, commit, write_rows
from fleet.tables import CountFilter, Table, TableConfig, TimeToLive
from fleet.tables.ids import SHARDS
from fleet.tables.rules import Adam

__all__ = ["CONFIG", "saved", "two_checkpoints"]

CONFIG = TableConfig("t", 3, Adam(), admission=CountFilter(2), eviction=(TimeToLive(8),))


def saved(
    table: Table, directory: Path, updates: int, base: BaseRecord | None = None, since: int | None = None
) -> FileRecord:
    """Save a table as a separate checkpoint; return the record of its file."""
    copy = table.snapshot(since)
    record = RowsRecord(table.config.name, tuple(range(SHARDS)), updates, base)
    file = write_rows(directory, f"save{updates}", "0-of-1-table-0", record, copy, copy.parts())
    commit(directory, Manifest(f"save{updates}", updates, {}, (file,)).to_json())
    return file


def two_checkpoints(folder: Path) -> Table:
    """Save all rows of a table, then the rows changed and removed since then; return the table."""
    table = Table(CONFIG)
    for step in (1, 2):
        table.update(np.arange(5000), torch.ones(5000, 3), step)
    whole = saved(table, folder / "checkpoint-0", 2)
    for step in range(3, 20):
        table.update(np.arange(300, 900), torch.ones(600, 3), step)  # the other rows expire
    assert 600 < len(table) < 5000
    changed = saved(table, folder / "checkpoint-1", 19, BaseRecord("checkpoint-0", "save2"), 2)
    assert changed.bytes < whole.bytes / 2
    return table
