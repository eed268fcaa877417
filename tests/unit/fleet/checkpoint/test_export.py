"""Tables of a checkpoint as files for what serves: all rows, or what has changed."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from fleet.checkpoint import (
    FileRecord,
    Manifest,
    RowsRecord,
    commit,
    export,
    export_tables,
    files,
    reader,
    write_rows,
)
from fleet.checkpoint import __main__ as command
from fleet.checkpoint.table_files import read_rows
from fleet.errors import CheckpointError, ConfigurationError
from fleet.tables import Table, TableConfig
from fleet.tables.export import apply_delta
from fleet.tables.rules import SGD
from fleet.tables.shards import SHARDS, shard_of
from tests.support.saved_tables import saved, two_checkpoints


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Table]:
    return tmp_path, two_checkpoints(tmp_path)


def test_a_file_has_all_rows_whether_the_checkpoint_has_them_or_its_base(folder):
    path, table = folder
    (file,) = export_tables(path / "checkpoint-1", path / "served").values()
    rows, removed = read_rows(file)
    assert np.array_equal(rows.ids, table.rows().ids)
    assert torch.equal(rows.values, table.rows().values)
    assert removed.tolist() == []


def test_each_file_is_checked_once_however_often_it_is_read(folder, monkeypatch):
    path, checked = folder[0], Mock(wraps=files.sha256_of)
    monkeypatch.setattr(reader, "sha256_of", checked)
    export_tables(path / "checkpoint-1", path / "served")
    assert [call.args[0].parent.name for call in checked.call_args_list] == ["checkpoint-0", "checkpoint-1"]


@pytest.mark.parametrize("base", [True, False], ids=["of-changes", "of-all-rows"])
def test_a_delta_makes_the_later_table_of_the_earlier(base, folder):
    path, table = folder
    if not base:
        saved(table, path / "checkpoint-1", 19)
    earlier, _ = read_rows(export_tables(path / "checkpoint-0", path / "served")["t"])
    changed, removed = read_rows(
        export_tables(path / "checkpoint-1", path / "delta", since=path / "checkpoint-0", dtype="float32")[
            "t"
        ]
    )
    assert np.array_equal(changed.ids, np.arange(300, 900))
    assert removed.numel() > 3000
    later = apply_delta(earlier, changed, removed)
    assert np.array_equal(later.ids, table.rows().ids)
    assert torch.equal(later.values, table.rows().values)


def test_a_delta_has_what_came_late_to_a_server_whose_part_of_the_earlier_one_lags(tmp_path):
    shards = [tuple(range(half, SHARDS, 2)) for half in range(2)]
    tables = [Table(TableConfig("t", 3, SGD())) for _ in shards]
    ids = [np.array([each for each in range(100) if shard_of(np.array([each]))[0] in of]) for of in shards]

    def save(path: Path, *updates: int) -> None:
        for half, (table, number) in enumerate(zip(tables, updates, strict=True)):
            copy, record = table.snapshot(), RowsRecord("t", shards[half], number)
            written.append(write_rows(path, path.name, f"{half}-of-2-table-0", record, copy, copy.parts()))
        commit(path, Manifest(path.name, max(updates), {}, tuple(written[-2:])).to_json())

    def update(half: int, step: int) -> None:
        tables[half].update(ids[half], torch.ones(len(ids[half]), 3), step)

    written = list[FileRecord]()
    for half, step in ((0, 1), (1, 1), (0, 2)):
        update(half, step)
    save(tmp_path / "earlier", 2, 1)  # without a barrier one server may have had more
    update(1, 2)
    save(tmp_path / "later", 2, 2)
    (file,) = export_tables(tmp_path / "later", tmp_path, since=tmp_path / "earlier").values()
    changed, _ = read_rows(file)
    assert set(ids[1]) <= set(changed.ids)


def test_the_command_writes_files_and_says_which(folder, capsys):
    path, table = folder
    served = path / "served"
    assert command.main([str(path / "checkpoint-1"), str(served), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"t: {served}/t.safetensors\n"
    rows, _ = read_rows(served / "t.safetensors")
    assert torch.equal(rows.values, table.rows().values.bfloat16().float())
    assert command.main([str(served), str(served)]) == 1
    assert "is no checkpoint" in capsys.readouterr().err


def test_an_earlier_checkpoint_of_another_model_is_refused_with_what_differs(folder):
    path, _ = folder
    manifest = Manifest.read(path / "checkpoint-0")
    other = replace(manifest, facts={"table t": "of 10**9 ids", "state of the optimizer": "anywhere"})
    commit(path / "checkpoint-0", other.to_json())
    with pytest.raises(
        CheckpointError,
        match=r"-0 \(here\).*-1 \(there\).*: table t: of 10\*\*9 ids here, [^;]*; expected an earlier",
    ):
        export_tables(path / "checkpoint-1", path, since=path / "checkpoint-0")


@pytest.mark.parametrize(("after", "known"), [(["aa", "save2"], True), (["aa", "bb"], False), ([], False)])
def test_an_earlier_checkpoint_is_one_of_those_that_the_later_one_names(folder, after, known):
    path, _ = folder
    found = Manifest.read(path / "checkpoint-1")
    commit(path / "checkpoint-1", replace(found, after=tuple(after)).to_json())
    if known:
        export_tables(path / "checkpoint-1", path, since=path / "checkpoint-0")
    else:
        with pytest.raises(
            CheckpointError,
            match=f"is the save save2, which is none of the {len(after)} before .*another training",
        ):
            export_tables(path / "checkpoint-1", path, since=path / "checkpoint-0")
    export_tables(path / "checkpoint-1", path, since=path / "checkpoint-1")


def test_a_checkpoint_that_may_be_older_than_those_named_is_taken(folder, monkeypatch):
    path, _ = folder
    found = Manifest.read(path / "checkpoint-1")
    commit(path / "checkpoint-1", replace(found, after=("aa", "bb")).to_json())
    monkeypatch.setattr(export, "MOST_BEFORE", 2)
    export_tables(path / "checkpoint-1", path, since=path / "checkpoint-0")


def test_what_cannot_be_written_is_refused(folder):
    path, _ = folder
    with pytest.raises(CheckpointError, match=r"checkpoint-1 is of step 19, and .* expected an earlier"):
        export_tables(path / "checkpoint-0", path, since=path / "checkpoint-1")
    with pytest.raises(ConfigurationError, match="has no table 'u'; expected some of t"):
        export_tables(path / "checkpoint-0", path, tables=["u"])
    with pytest.raises(ConfigurationError, match="rows as 'int8', expected float32 or bfloat16"):
        export_tables(path / "checkpoint-0", path, dtype="int8")
