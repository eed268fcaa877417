"""Files of ids and rows, as any reader of safetensors finds them."""

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fleet.checkpoint.table_files import read_rows, write_rows
from fleet.errors import FleetError
from fleet.tables import Normal, Table, TableConfig, TimeToLive
from fleet.tables.rules import Adagrad


def trained(dimension=5):
    table = Table(TableConfig("t", dimension, Adagrad(), None, Normal(), eviction=(TimeToLive(8),)))
    table.update(np.arange(-3000, 3000), torch.ones(6000, dimension), 1)
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dimension", [1, 5])
def test_a_file_has_every_row(dtype, dimension, tmp_path):
    table, path = trained(dimension), tmp_path / "t.safetensors"
    write_rows(path, table.snapshot(), dtype)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "1", "since": ""}
        assert file.get_tensor("rows").dtype == dtype
        assert file.get_tensor("ids").shape == (6000,)
    rows, removed = read_rows(path)
    assert np.array_equal(rows.ids, np.arange(-3000, 3000))
    assert torch.equal(rows.values, table.rows().values.to(dtype).float())
    assert removed.tolist() == []
    assert [each.name for each in tmp_path.iterdir()] == ["t.safetensors"]


def test_a_delta_has_what_changed_and_what_went(tmp_path):
    table = trained()
    table.snapshot().close()
    table.update(np.arange(1000), torch.ones(1000, 5), 20)
    path = tmp_path / "delta.safetensors"
    write_rows(path, table.snapshot(1))
    rows, removed = read_rows(path)
    assert np.array_equal(rows.ids, np.arange(1000))
    assert removed.numel() > 4000
    assert np.array_equal(np.sort(np.append(removed, table.rows().ids)), np.arange(-3000, 3000))
    with safe_open(path, "pt") as file:
        assert file.metadata()["since"] == "1"


def test_an_empty_table_has_a_file(tmp_path):
    table = Table(TableConfig("t", 3, Adagrad()))
    write_rows(tmp_path / "t", table.snapshot())
    rows, _ = read_rows(tmp_path / "t")
    assert rows.values.shape == (0, 3)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FleetError, match=r"file/t could not be written"):
        write_rows(tmp_path / "file" / "t", trained().snapshot())
