"""Tables in checkpoints that are written while training goes on, whole or as what has changed."""

import threading
from itertools import chain
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import fleet
from fleet.checkpoint import Manifest, TrainStatus, write_rows
from fleet.errors import CheckpointError, ConfigurationError, FleetError
from fleet.parameter_server.server import shard_checkpointer
from fleet.plan import DistributeTranspilerConfig
from fleet.tables import TimeToLive, snapshot
from tests.support.checkpoints import flip_a_bit
from tests.support.clicks import ADAGRAD, ADAM, Clicks, alone, on_servers, one_step
from tests.support.clicks import ROWS as NUM_CLICKS
from tests.support.joined import joined

ROWS, DIM = 40, 4


def model() -> Any:
    torch.manual_seed(0)
    table = fleet.nn.DistributedTable("t", DIM, ROWS, seed=3, eviction=(TimeToLive(4),))
    return fleet.nn.DistributedEmbedding(ROWS, DIM, table=table)


def job(servers: int = 2, directory: Path | None = None) -> Any:
    return joined(
        1,
        servers=servers,
        model=model,
        optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        directory=directory,
    )


def train(made: Any, steps: range) -> None:
    _, embedding, optimizer = made
    for step in steps:
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        embedding(
            torch.randint(ROWS // 2 if step > 3 else ROWS, (12,), generator=generator)
        ).square().sum().backward()
        optimizer.step()


def rows_of(made: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = made[1](torch.arange(ROWS)).clone()
        return found


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have servers write the first part of a table's rows, and the rest when `go_on` is set."""
    monkeypatch.setattr(snapshot, "PART_BYTES", 200)
    begun, go_on = threading.Semaphore(0), threading.Event()

    def slowly(*arguments: Any) -> Any:
        directory, name, shard, record, copied, parts = arguments
        first = next(parts)
        begun.release()
        assert go_on.wait(60)
        return write_rows(directory, name, shard, record, copied, chain([first], parts))

    monkeypatch.setattr(shard_checkpointer, "write_rows", slowly)
    return begun, go_on


def test_training_goes_on_while_rows_are_written_and_a_file_is_of_one_step(tmp_path, writes):
    begun, go_on = writes
    with job() as (made,):
        train(made, range(3))
        expected = rows_of(made)
        made[0].save_numbered(str(tmp_path), TrainStatus(), keep=0)
        assert all(begun.acquire(timeout=10) for _ in range(2))
        train(made, range(3, 12))  # the disk has not moved yet
        assert not torch.equal(rows_of(made), expected)
        go_on.set()
        made[0].checkpoints.wait()
    with job(3, tmp_path) as (made,):
        assert made[0].current_step == 3
        assert torch.equal(rows_of(made), expected)


def ids_in(directory: Path) -> set[int]:
    found: set[int] = set()
    for path in directory.glob("shard-*-table-0-*.safetensors"):
        with safe_open(path, "pt") as file:
            found.update(file.get_tensor("ids").tolist())
    return found


def save(made: Any, folder: Path, **options: Any) -> None:
    made[0].save_numbered(str(folder), TrainStatus(), **({"keep": 0} | options))
    made[0].checkpoints.wait()


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def test_what_has_changed_is_saved_kept_with_its_base_and_gone_on_with(tmp_path):
    with job() as (made,):
        train(made, range(4))
        save(made, tmp_path, incremental=True)  # there is nothing to build on yet
        train(made, range(4, 6))
        save(made, tmp_path, incremental=True)
        train(made, range(6, 10))
        save(made, tmp_path, incremental=True, keep=1)
        assert names_in(tmp_path) == ["checkpoint-0", "checkpoint-2"]
        assert ids_in(tmp_path / "checkpoint-0") - ids_in(tmp_path / "checkpoint-2")
        assert {base.directory for base in Manifest.read(tmp_path / "checkpoint-2").bases} == {"checkpoint-0"}
        at_ten = rows_of(made)
        train(made, range(10, 12))
        expected = rows_of(made)
    with job(3, tmp_path) as (made,):
        assert made[0].current_step == 10
        assert torch.equal(rows_of(made), at_ten)
        train(made, range(10, 12))
        assert torch.equal(rows_of(made), expected)
        save(made, tmp_path, incremental=True, keep=1)  # another life knows of no rows that went: all of them
        assert names_in(tmp_path) == ["checkpoint-3"]
        assert not Manifest.read(tmp_path / "checkpoint-3").bases


def test_one_that_is_cut_short_or_has_lost_its_base_is_passed_over(tmp_path, monkeypatch):
    with job() as (made,):
        train(made, range(4))
        save(made, tmp_path)
        expected = rows_of(made)
        train(made, range(4, 6))
        monkeypatch.setattr(shard_checkpointer, "commit", Mock(side_effect=FleetError("killed")))
        with pytest.raises(FleetError, match="killed"):
            save(made, tmp_path, incremental=True)
        monkeypatch.undo()
        (tmp_path / "checkpoint-0").rename(tmp_path / "elsewhere")
        save(made, tmp_path, incremental=True)  # it notices
        assert not Manifest.read(tmp_path / "checkpoint-0").bases
        train(made, range(6, 8))
        save(made, tmp_path, incremental=True)
    for path in (tmp_path / "checkpoint-0").iterdir():
        path.unlink()
    (tmp_path / "elsewhere").rename(tmp_path / "checkpoint-00")
    with job(1, tmp_path / "checkpoint-00") as (made,):
        assert torch.equal(rows_of(made), expected)
    with (
        pytest.raises(CheckpointError, match="which cannot be used"),
        job(1, tmp_path / "checkpoint-1"),
    ):
        pass


@pytest.mark.parametrize("server", [0, 1])
def test_a_bit_in_a_tables_rows_or_in_those_that_they_build_on_costs_the_saves_that_have_it(
    tmp_path, server, caplog
):
    with job() as (made,):
        train(made, range(2))
        save(made, tmp_path)
        expected = rows_of(made)
        train(made, range(2, 4))
        save(made, tmp_path)
        train(made, range(4, 6))
        save(made, tmp_path, incremental=True)
    (path,) = (tmp_path / "checkpoint-1").glob(f"shard-{server}-of-2-table-0-*.safetensors")
    digest = flip_a_bit(path)  # of all rows; checkpoint-2 has only those that have changed since
    with job(2, tmp_path) as (made,):
        assert made[0].current_step == 2
        assert torch.equal(rows_of(made), expected)
        train(made, range(2, 3))
    (warning,) = [text for record in caplog.records if str(path) in (text := record.getMessage())]
    assert f"{path} has the SHA-256 {digest}, expected " in warning
    assert warning.endswith(f"Training continues from {tmp_path}/checkpoint-0")


def test_an_exported_model_has_the_rows_of_given_ids():
    with job() as (made,):
        train(made, range(2))
        exported = made[0].export({"t": torch.tensor([7, 3, 7, 39])})
        assert exported["t.ids"].tolist() == [3, 7, 39]
        assert torch.equal(exported["t.rows"], rows_of(made)[[3, 7, 39]])
        assert set(exported) == {"t.ids", "t.rows"}  # there is nothing else in this model
        with pytest.raises(ConfigurationError, match="the rows of table t are on the parameter servers"):
            made[0].export()
        with pytest.raises(
            ConfigurationError, match="table_ids names 'u', which is not a table on the servers; expected t"
        ):
            made[0].export({"t": [1], "u": [1]})
        with pytest.raises(ConfigurationError, match="table t: id 40 at position"):
            made[0].export({"t": [40]})


GEO = DistributeTranspilerConfig(sync_mode=False, geo_sgd_mode=True, geo_sgd_need_push_nums=2)


def rows_of_clicks(of: Clicks) -> Tensor:
    with torch.no_grad():
        found: Tensor = of.embedding(torch.arange(NUM_CLICKS)).clone()
        return found


def geo_job(made_of: Any, optimizer: Any, trainers: int, servers: int, directory: Path | None = None) -> Any:
    return joined(
        trainers, servers=servers, model=made_of, optimizer=optimizer[0], config=GEO, directory=directory
    )


@pytest.mark.parametrize("made_of", [on_servers, alone], ids=["on-servers", "held-by-trainers"])
@pytest.mark.parametrize("optimizer", [ADAM, ADAGRAD], ids=["adam", "adagrad"])
def test_in_geo_rows_go_on_with_the_state_that_trainer_0_had_on_every_trainer(tmp_path, made_of, optimizer):
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    with geo_job(made_of, optimizer, 1, 2) as (made,):
        for step in range(4):
            one_step(made, step, 0)
        made[0].save(first, TrainStatus())
        for step in range(4, 8):
            one_step(made, step, 0)
        expected = rows_of_clicks(made[1])
    with geo_job(made_of, optimizer, 1, 3, Path(first)) as (made,):
        one_step(made, 4, 0)  # most rows are not stepped in this life
        made[0].save(second, TrainStatus())
    with geo_job(made_of, optimizer, 2, 2, Path(second)) as (_, made):
        assert made[0].current_step == 5
        for step in range(5, 8):
            one_step(made, step, 0)
        torch.testing.assert_close(rows_of_clicks(made[1]), expected, rtol=0, atol=2e-6)


def test_the_state_of_rows_on_servers_is_not_dropped_where_trainers_step(tmp_path):
    def only_rows() -> Any:
        torch.manual_seed(0)
        return fleet.nn.DistributedEmbedding(ROWS, DIM, table=fleet.nn.DistributedTable("t", DIM, ROWS))

    made_of: Any = {"model": only_rows, "optimizer": lambda each: torch.optim.Adagrad(each, lr=0.1)}
    with joined(1, **made_of) as (made,):
        train(made, range(1))
        made[0].save(str(tmp_path), TrainStatus())
    with (
        joined(1, **made_of, config=GEO) as (made,),
        pytest.raises(ConfigurationError, match="state of optim"),
    ):
        made[0].load(str(tmp_path))
    with joined(1, **made_of, config=GEO) as (made,):
        train(made, range(1))
        made[0].save(str(tmp_path), TrainStatus())
    with (
        joined(1, **made_of) as (made,),
        pytest.raises(ConfigurationError, match="in the trainer's part there"),
    ):
        made[0].load(str(tmp_path))


def test_what_a_trainer_adds_to_a_save_may_be_larger_than_a_message(tmp_path, monkeypatch):
    monkeypatch.setattr("fleet.parameter_server.server.server._MESSAGE_BYTES", 2 << 20)

    def with_buffer() -> Any:
        made_of = model()
        made_of.register_buffer("statistics", torch.arange(1 << 20, dtype=torch.float32) * scale)
        return made_of

    def buffered(directory: Path | None = None) -> Any:
        return joined(
            1,
            model=with_buffer,
            optimizer=lambda each: torch.optim.SGD(each, lr=0.1),
            directory=directory,
        )

    scale = 1.0
    with buffered() as (made,):
        train(made, range(1))
        made[0].save(str(tmp_path), TrainStatus())
        saved = made[1].statistics.clone()
    scale = 2.0
    with buffered(tmp_path) as (made,):
        assert torch.equal(made[1].statistics, saved)
