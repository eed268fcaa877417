"""Rows of tables are float32, whatever `torch.set_default_dtype` says."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.checkpoint import BaseRecord, Checkpoint, export_tables
from fleet.checkpoint.rows import read_rows
from fleet.checkpoint.table_files import read_rows as read_exported
from fleet.tables import LocalDisk, Memory, Table, TableConfig
from fleet.tables.export import dense
from fleet.tables.rules import Adam
from fleet.tables.shards import SHARDS
from tests.support.saved_tables import saved

ROWS = 3000


def trained(folder: Path, storage: Memory | LocalDisk) -> Iterator[Tensor]:
    """Yield a table's rows as they are looked up, read from checkpoints, and exported."""
    config = TableConfig("t", 3, Adam(), num_embeddings=ROWS, storage=storage)
    table = Table(config)
    gradient = torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3)
    ids = np.arange(ROWS)
    for step in (1, 2):
        table.update(ids[: ROWS // 2], gradient[: ROWS // 2], step)
    saved(table, folder / "whole", 2)
    table.update(ids[100:200], gradient[100:200], 3)
    saved(table, folder / "changed", 3, BaseRecord("whole", "save2"), 2)
    yield table.look_up(ids)
    for name in ("whole", "changed"):
        read, _ = read_rows(Checkpoint(folder / name), config, tuple(range(SHARDS)))
        rows = read.rows()
        yield from (rows.values, *rows.state.values(), *rows.marks.values())
    yield dense(config, table.rows())
    (path,) = export_tables(folder / "changed", folder, since=folder / "whole").values()
    exported, _ = read_exported(path)
    yield exported.values


@pytest.mark.parametrize("storage", [Memory(), LocalDisk(1)], ids=["in-memory", "on-disk"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_table_is_the_same_to_the_bit(tmp_path, storage, dtype):
    expected = list(trained(tmp_path / "float32", storage))
    torch.set_default_dtype(dtype)
    try:
        found = list(trained(tmp_path / "other", storage))
    finally:
        torch.set_default_dtype(torch.float32)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
