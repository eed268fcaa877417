"""Rows of one server: changed by update records alone, each with a higher number, and counted once."""

import threading

import numpy as np
import pytest
import torch

from fleet.errors import FleetError
from fleet.parameter_server.modes import Async
from fleet.parameter_server.store import FailedStep
from fleet.parameter_server.table_store import RowPut, RowUpdate, TableStore
from fleet.plan.tables import TablePlan
from fleet.tables import Constant, LocalDisk, Memory, RowGradients, Table, TableConfig, TableRows, storage
from fleet.tables.rules import SGD
from tests.support.full_disk import no_room_beyond
from tests.support.row_modes import RATE_OF_ONE, Tables, gradient


def updates_of(store: TableStore) -> int:
    (copy,) = store.snapshot()
    copy.close()
    return copy.updates


def test_updates_that_come_at_once_are_counted_one_by_one():
    store = Tables(Async()).store
    updates = [RowUpdate(0, gradient({3: 1.0}), RATE_OF_ONE, ()) for _ in range(40)]
    threads = [threading.Thread(target=store.apply, args=(update,)) for update in updates]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(update.sequence for update in updates) == list(range(1, 41))
    assert store.read(0, np.array([3])).item() == -40.0
    assert updates_of(store) == 40


def test_an_update_without_rows_counts_as_well():
    store = Tables(Async()).store
    store.apply(RowUpdate(0, gradient({}), RATE_OF_ONE, ()))
    assert updates_of(store) == 1


def test_a_checkpoints_rows_take_the_place_of_all_rows():
    store = Tables(Async()).store
    store.apply(RowUpdate(0, gradient({3: 1.0}), RATE_OF_ONE, ()))
    loaded = Table(TableConfig("clicks", 1, SGD(), 10, first_values=Constant()), 9)
    loaded.load(TableRows(np.array([5]), torch.tensor([[7.0]]), {}))
    store.apply(RowPut(0, loaded, updates=9))
    assert store.read(0, np.array([3, 5]))[:, 0].tolist() == [0.0, 7.0]
    assert updates_of(store) == 9


def test_rows_that_lie_on_a_disk_are_told_apart(monkeypatch):
    monkeypatch.setattr(storage, "_MIN_ROWS", 40)
    configs = [
        TableConfig(name, 1, SGD(), storage=kind) for name, kind in (("m", Memory()), ("d", LocalDisk(1)))
    ]
    plans = [TablePlan(number, config, 0) for number, config in enumerate(configs)]
    store = TableStore(plans, FailedStep("a:1"))
    for number in range(2):
        store.apply(RowUpdate(number, RowGradients(np.arange(100), torch.ones(100, 1)), RATE_OF_ONE, ()))
    told = [(table["name"], table["rows"], table["rowsOnDisk"]) for table in store.statistics()]
    assert told == [("m", 100, 0), ("d", 100, 60)]


def test_a_disk_without_room_ends_the_server_and_rows_are_stepped_no_more(tmp_path):
    disk = LocalDisk(1, str(tmp_path))
    config = TableConfig("clicks", 1, SGD(), first_values=Constant(), storage=disk)
    store = TableStore([TablePlan(0, config, 0)], FailedStep("a:1"))
    update = RowUpdate(0, RowGradients(np.arange(3000), torch.ones(3000, 1)), RATE_OF_ONE, ())
    refused = (
        rf"parameter server a:1 could not be stepped: rows of a table .* written to {tmp_path}: .*; expected"
    )
    with no_room_beyond(1 << 20), pytest.raises(FleetError, match=refused):
        store.apply(update)
    with pytest.raises(FleetError, match=refused):
        store.apply(RowUpdate(0, gradient({3: 1.0}), RATE_OF_ONE, ()))
    with pytest.raises(FleetError, match=refused):
        store.failed.check()
