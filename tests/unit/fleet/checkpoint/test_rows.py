"""Rows of tables in files of a checkpoint."""

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from fleet.checkpoint import (
    BaseRecord,
    Checkpoint,
    Manifest,
    RowsRecord,
    commit,
    export_tables,
    read_rows,
    read_table_file,
    rows,
    write_rows,
)
from fleet.errors import CheckpointError
from fleet.tables import Constant, LocalDisk, Memory, Table, TableConfig, TableRows, snapshot
from fleet.tables.export import dense
from fleet.tables.ids import SHARDS
from fleet.tables.rules import SGD, Adam
from tests.support.saved_tables import CONFIG, saved, two_checkpoints
from tests.support.tables import assert_equal

ALL = tuple(range(SHARDS))


@pytest.fixture
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (rows, snapshot):
        monkeypatch.setattr(module, "PART_BYTES", 600)


@pytest.mark.parametrize("updates", [0, 1, 2], ids=["untouched", "counted-only", "with-rows"])
@pytest.mark.usefixtures("_small_parts")
def test_a_file_has_all_of_a_table_whether_it_has_rows_or_none(updates, tmp_path):
    table = Table(CONFIG)
    for step in range(updates):
        table.update(np.arange(50), torch.ones(50, 3), step + 1)
    saved(table, tmp_path, updates)
    found, made = read_rows(Checkpoint(tmp_path), CONFIG, ALL)
    assert_equal(found.rows(), table.rows())
    assert (len(found), made) == (50 if updates == 2 else 0, updates)


@pytest.fixture
def folder(tmp_path: Path, _small_parts: None) -> tuple[Path, Table]:
    return tmp_path, two_checkpoints(tmp_path)


def test_what_has_changed_and_what_has_gone_is_read_on_top_of_all_rows(folder):
    path, table = folder
    found, made = read_rows(Checkpoint(path / "checkpoint-1"), CONFIG, ALL)
    assert_equal(found.rows(), table.rows())
    assert made == 19


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda base: (base / "manifest.json").unlink(), "which cannot be used: .* is not a checkpoint"),
        (
            lambda base: saved(Table(CONFIG), base, 7),
            "which cannot be used: it has the save 'save7'",
        ),
        (lambda base: next(base.glob("*.safetensors")).unlink(), "cannot be read .No such file"),
    ],
    ids=["gone", "replaced", "without-its-file"],
)
def test_a_base_that_is_not_there_any_more_is_named(harm, said, folder):
    path, _ = folder
    harm(path / "checkpoint-0")
    with pytest.raises(CheckpointError, match=said):
        read_rows(Checkpoint(path / "checkpoint-1"), CONFIG, ALL)


def test_a_base_that_is_not_whole_itself_is_refused(folder):
    path, table = folder
    saved(table, path / "checkpoint-2", 20, BaseRecord("checkpoint-1", "save19"), 2)
    with pytest.raises(CheckpointError, match="needs the rows of checkpoint-1, which is itself incremental"):
        read_rows(Checkpoint(path / "checkpoint-2"), CONFIG, ALL)


NUM_ROWS = 3000


def trained(folder: Path, storage: Memory | LocalDisk) -> Iterator[Tensor]:
    """Yield a table's rows as they are looked up, read from checkpoints, and exported."""
    config = TableConfig("t", 3, Adam(), num_embeddings=NUM_ROWS, storage=storage)
    table = Table(config)
    gradient = torch.arange(NUM_ROWS * 3, dtype=torch.float32).view(NUM_ROWS, 3)
    ids = np.arange(NUM_ROWS)
    for step in (1, 2):
        table.update(ids[: NUM_ROWS // 2], gradient[: NUM_ROWS // 2], step)
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
    exported, _ = read_table_file(path)
    yield exported.values


@pytest.mark.parametrize("storage", [Memory(), LocalDisk(1)], ids=["in-memory", "on-disk"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_are_float32_whatever_the_default_dtype_is(tmp_path, storage, dtype):
    expected = list(trained(tmp_path / "float32", storage))
    torch.set_default_dtype(dtype)
    try:
        found = list(trained(tmp_path / "other", storage))
    finally:
        torch.set_default_dtype(torch.float32)
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


parts_of = rows.parts_of


def memory(field: str) -> int:
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_a_save_under_training_and_a_load_take_the_memory_of_parts_and_of_what_changes(tmp_path, monkeypatch):
    config = TableConfig("t", 64, SGD(), first_values=Constant(0.0), options={"lr": 1.0})
    table, at_once = Table(config), 50_000
    for begin in range(0, 500_000, at_once):
        table.load(TableRows(np.arange(begin, begin + at_once), torch.zeros(at_once, 64), {}))
    copy, step = table.snapshot(), 0

    def while_trained():
        nonlocal step
        for part in copy.parts():
            yield part
            step += 1
            table.update(np.arange(499_000, 500_000), torch.ones(1000, 64), step)

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = memory("VmRSS")
    file = write_rows(tmp_path, "save", "0-of-1-table-0", RowsRecord("t", ALL, 0), copy, while_trained())
    assert step > 20
    assert memory("VmHWM") - before < table.nbytes / 4
    commit(tmp_path, Manifest("save", 0, {}, (file,)).to_json())
    before, most = memory("RssAnon"), 0

    def watched(*arguments, **options):
        nonlocal most
        for each in parts_of(*arguments, **options):
            most = max(most, memory("RssAnon"))
            yield each

    monkeypatch.setattr(rows, "parts_of", watched)
    found, _ = read_rows(Checkpoint(tmp_path), config, ALL)
    assert most - before < 1.35 * table.nbytes
    assert len(found) == 500_000
    assert not found.look_up(np.arange(500_000)).any()  # as of the beginning
    assert table.look_up(np.arange(499_000, 500_000)).max() < -20.0
