"""Export: a model for one process, and tables as files of ids and rows."""

import io
import logging
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fleet.checkpoint import (
    FileRecord,
    Manifest,
    RowsRecord,
    commit,
    export,
    export_tables,
    files,
    named_state,
    read_table_file,
    reader,
    write_rows,
    write_table_file,
)
from fleet.checkpoint import __main__ as command
from fleet.checkpoint.export import write_model
from fleet.errors import CheckpointError, ConfigurationError, FleetError
from fleet.fluid import Program
from fleet.tables import Normal, Table, TableConfig, TimeToLive
from fleet.tables.export import apply_delta
from fleet.tables.ids import SHARDS, shard_of
from fleet.tables.rules import SGD, Adagrad
from tests.support.saved_tables import saved, two_checkpoints


def test_a_model_is_what_load_state_dict_takes_even_with_tied_weights(tmp_path):
    weight = torch.randn(2, 2)
    path = write_model(tmp_path, {"a.weight": weight, "b.weight": weight}, {"step": 3})
    assert path == tmp_path / "model.safetensors"
    assert torch.equal(load_file(path)["b.weight"], weight)


class Scaled(torch.nn.Linear):
    """Keeps something beside its parameters and buffers, as quantized and FP8 layers do."""

    def __init__(self, extra: object) -> None:
        super().__init__(2, 1)
        self._extra = extra

    def get_extra_state(self) -> object:
        return self._extra

    def set_extra_state(self, state: object) -> None:
        self._extra = state


@pytest.mark.parametrize("extra", [{"amax": 3.0}, io.BytesIO(b"bytes")])
def test_what_is_no_tensor_is_left_out_and_named_once(extra, caplog):
    caplog.set_level(logging.INFO)
    name = type(extra).__name__
    model = torch.nn.ModuleDict({name: Scaled(extra), "other": Scaled(torch.ones(3))})
    source = Program.from_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).source
    assert source is not None
    values = {each: torch.full_like(value, 7.0) for each, value in source.parameters.items()}
    for _ in range(2):
        state = named_state(source, values)
    assert set(state) == {*values, "other._extra_state"}
    assert (state[f"{name}.weight"] == 7).all()
    assert state["other._extra_state"].tolist() == [1, 1, 1]
    (said,) = caplog.messages
    assert f"exported state dict leaves out {name}._extra_state" in said
    model.load_state_dict(state, strict=False)


def trained(dimension=5):
    table = Table(TableConfig("t", dimension, Adagrad(), None, Normal(), eviction=(TimeToLive(8),)))
    table.update(np.arange(-3000, 3000), torch.ones(6000, dimension), 1)
    return table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dimension", [1, 5])
def test_a_file_has_every_row(dtype, dimension, tmp_path):
    table, path = trained(dimension), tmp_path / "t.safetensors"
    write_table_file(path, table.snapshot(), dtype)
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "step": "1", "since": ""}
        assert file.get_tensor("rows").dtype == dtype
        assert file.get_tensor("ids").shape == (6000,)
    rows, removed = read_table_file(path)
    assert np.array_equal(rows.ids, np.arange(-3000, 3000))
    assert torch.equal(rows.values, table.rows().values.to(dtype).float())
    assert removed.tolist() == []
    assert [each.name for each in tmp_path.iterdir()] == ["t.safetensors"]


def test_a_delta_has_what_changed_and_what_went(tmp_path):
    table = trained()
    table.snapshot().close()
    table.update(np.arange(1000), torch.ones(1000, 5), 20)
    path = tmp_path / "delta.safetensors"
    write_table_file(path, table.snapshot(1))
    rows, removed = read_table_file(path)
    assert np.array_equal(rows.ids, np.arange(1000))
    assert removed.numel() > 4000
    assert np.array_equal(np.sort(np.append(removed, table.rows().ids)), np.arange(-3000, 3000))
    with safe_open(path, "pt") as file:
        assert file.metadata()["since"] == "1"


def test_an_empty_table_has_a_file(tmp_path):
    table = Table(TableConfig("t", 3, Adagrad()))
    write_table_file(tmp_path / "t", table.snapshot())
    rows, _ = read_table_file(tmp_path / "t")
    assert rows.values.shape == (0, 3)


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(FleetError, match=r"file/t could not be written"):
        write_table_file(tmp_path / "file" / "t", trained().snapshot())


@pytest.fixture
def folder(tmp_path: Path) -> tuple[Path, Table]:
    return tmp_path, two_checkpoints(tmp_path)


def test_a_file_has_all_rows_whether_the_checkpoint_has_them_or_its_base(folder):
    path, table = folder
    (file,) = export_tables(path / "checkpoint-1", path / "served").values()
    rows, removed = read_table_file(file)
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
    earlier, _ = read_table_file(export_tables(path / "checkpoint-0", path / "served")["t"])
    changed, removed = read_table_file(
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
    changed, _ = read_table_file(file)
    assert set(ids[1]) <= set(changed.ids)


def test_the_command_writes_files_and_says_which(folder, capsys):
    path, table = folder
    served = path / "served"
    assert command.main([str(path / "checkpoint-1"), str(served), "--dtype", "bfloat16"]) == 0
    assert capsys.readouterr().out == f"t: {served}/t.safetensors\n"
    rows, _ = read_table_file(served / "t.safetensors")
    assert torch.equal(rows.values, table.rows().values.bfloat16().float())
    assert command.main([str(served), str(served)]) == 1
    assert "is not a checkpoint" in capsys.readouterr().err


def test_an_earlier_checkpoint_of_another_model_is_refused_with_what_differs(folder):
    path, _ = folder
    manifest = Manifest.read(path / "checkpoint-0")
    other = replace(manifest, facts={"table t": "of 10**9 ids", "state of the optimizer": "anywhere"})
    commit(path / "checkpoint-0", other.to_json())
    with pytest.raises(
        CheckpointError,
        match=r"-0 \(here\).*-1 \(there\).*: table t: of 10\*\*9 ids here, [^;]*; expected `since` to be",
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
            match=f"is the save save2, which is not one of the {len(after)} saves before .*another training",
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
    with pytest.raises(CheckpointError, match=r"checkpoint-1 is of step 19, and .* expected `since` to be"):
        export_tables(path / "checkpoint-0", path, since=path / "checkpoint-1")
    with pytest.raises(ConfigurationError, match="has no table 'u'; expected some of t"):
        export_tables(path / "checkpoint-0", path, tables=["u"])
    with pytest.raises(ConfigurationError, match="rows as 'int8', expected float32 or bfloat16"):
        export_tables(path / "checkpoint-0", path, dtype="int8")
