"""Rows of tables in files of a checkpoint."""

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from fleet.checkpoint.manifest import RowsRecord
from fleet.checkpoint.rows import read_rows, write_rows
from fleet.tables import Table, TableConfig, TimeToLive
from fleet.tables.admission import CountFilter
from fleet.tables.rules import Adam
from fleet.tables.shards import SHARDS
from tests.support.tables import assert_equal


@pytest.mark.parametrize("updates", [0, 1, 2], ids=["untouched", "counted-only", "with-rows"])
def test_a_file_has_all_of_a_table_whether_it_has_rows_or_none(updates, tmp_path):
    table = Table(TableConfig("t", 3, Adam(), admission=CountFilter(2), eviction=(TimeToLive(8),)))
    for step in range(updates):
        table.update(np.arange(50), torch.ones(50, 3), step + 1)
    record = RowsRecord("t", tuple(range(SHARDS)), updates)
    file = write_rows(tmp_path, "save", "0-of-1-table-0", record, table.rows())
    checkpoint = SimpleNamespace(
        directory=tmp_path,
        manifest=SimpleNamespace(files=(file,)),
        checked=lambda wanted: tmp_path / wanted.name,
    )
    found, made = read_rows(cast("Any", checkpoint), "t", range(SHARDS))
    assert_equal(found, table.rows())
    assert (found.ids.size, made) == (50 if updates == 2 else 0, updates)
