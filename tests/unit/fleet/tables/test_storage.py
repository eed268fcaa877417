"""Rows on a disk read as rows in memory, and their file stays small."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from fleet.errors import ConfigurationError, DiskFullError
from fleet.tables import LocalDisk, Table, TableConfig, row_log, storage
from fleet.tables.row_log import RowLog
from fleet.tables.rules import SGD
from fleet.tables.storage import Memory, RecentReads
from tests.support.full_disk import no_room_beyond

WIDTH = 5


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "_MIN_ROWS", 40)
    monkeypatch.setattr(row_log, "_SEGMENT_BYTES", 100 * 4 * WIDTH)


def test_it_holds_what_memory_would_and_a_file_of_a_few_times_the_rows():
    disk, memory = LocalDisk(memory=1).rows(WIDTH), Memory().rows(WIDTH)
    random, size = np.random.default_rng(0), 0
    for turn in range(400):
        if turn % 40 == 0:
            size += 150
            disk.resize(size)
            memory.resize(size)
        numbers = random.choice(size, int(random.integers(0, 70)), replace=False)
        words = torch.from_numpy(random.normal(size=(numbers.size, WIDTH)).astype(np.float32))
        for each in (disk, memory):
            each.write(numbers, words)
        some = random.choice(size, 30)
        assert torch.equal(disk.read(some), memory.read(some))
        assert torch.equal(disk.read(some, 2), memory.read(some, 2))
    assert torch.equal(disk.read(np.arange(size)), memory.read(np.arange(size)))
    log = disk._log  # type: ignore[attr-defined]
    assert log.num_live == np.count_nonzero(disk._where.values <= -2)  # type: ignore[attr-defined]
    assert log.num_places <= 2 * log.num_live + 300
    assert disk._slots.values.size == 40  # type: ignore[attr-defined]


@pytest.mark.parametrize("writes_before", [0, (1 << 31) - 50], ids=["new", "as-many-as-are-told-apart"])
def test_rows_that_are_written_often_stay_in_memory_whatever_others_come(monkeypatch, writes_before):
    read: list[int] = []

    def read_too(log: RowLog, places: np.ndarray) -> np.ndarray:
        read.append(places.size)
        return of_log(log, places)

    of_log = RowLog.read
    monkeypatch.setattr(RowLog, "read", read_too)
    disk: Any = LocalDisk(memory=1).rows(WIDTH)
    disk.resize(10_000)
    disk._now = writes_before
    for turn in range(100):
        often, once = np.arange(30), np.arange(100) + 100 * (turn % 90) + 100
        disk.write(np.concatenate([often, once]), torch.full((130, WIDTH), float(turn)))
        if turn >= 10:
            read.clear()
            assert torch.equal(disk.read(often), torch.full((30, WIDTH), float(turn)))
            assert read == []


def test_ids_that_come_once_drive_out_none_that_come_often():
    config = TableConfig("t", WIDTH - 1, SGD(), None, storage=LocalDisk(memory=1), options={"lr": 0.1})
    table = Table(config)
    often = np.arange(30)
    for step in range(1, 60):
        once = np.arange(20) + 1000 * step
        ids = np.concatenate([often, once])
        table.update(ids, torch.ones(ids.size, WIDTH - 1), step)
    disk = table._memory.store
    assert np.count_nonzero(disk._where.values[table._memory.find(often)] >= 0) == 30  # type: ignore[attr-defined]


def test_what_was_looked_up_is_not_read_again_to_be_updated_whatever_is_saved_meanwhile(monkeypatch):
    disk = LocalDisk(memory=1).rows(WIDTH)
    disk.resize(1000)
    disk.write(np.arange(1000), torch.ones(1000, WIDTH))
    numbers = np.array([3, 500])
    first = disk.read(numbers, 2)
    for part in disk.runs(1000, 2):
        disk.read(part)
    with monkeypatch.context() as patch:
        patch.setattr(RowLog, "read", None)
        assert torch.equal(disk.read(numbers)[:, :2], first)
    disk.write(numbers, torch.zeros(2, WIDTH))
    assert torch.equal(disk.read(numbers), torch.zeros(2, WIDTH))


def test_a_directory_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match=r"directory='/none'.: .*No such file.*expected a dir"):
        LocalDisk(1, "/none").rows(WIDTH)
    with pytest.raises(ConfigurationError, match=r"memory=0.: expected the bytes"):
        LocalDisk(0)


def test_a_file_has_no_name(tmp_path):
    disk = LocalDisk(1, str(tmp_path)).rows(WIDTH)
    disk.resize(500)
    disk.write(np.arange(500), torch.ones(500, WIDTH))
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_named_and_rows_can_still_be_read(tmp_path):
    disk = LocalDisk(1, str(tmp_path)).rows(WIDTH)
    disk.resize(1 << 16)
    rows = torch.arange(WIDTH << 16, dtype=torch.float32).reshape(-1, WIDTH)
    disk.write(np.arange(200), rows[:200])
    refused = (
        rf"to {re.escape(str(tmp_path))}: \[Errno 27\] .*; their file has [1-9]\d+ bytes, and \d+ are "
        r"free there; expected room for .*: free some, or set .* in LocalDisk"
    )
    with no_room_beyond(1 << 18), pytest.raises(DiskFullError, match=refused):
        disk.write(np.arange(200, 1 << 16), rows[200:])
    assert torch.equal(disk.read(np.arange(200)), rows[:200])


RECORD = np.dtype((np.void, 4))


def records_of(*numbers: int) -> np.ndarray:
    return np.array(numbers, dtype=np.int32).view(RECORD)


def test_a_recent_read_is_found_until_it_is_forgotten_or_another_takes_its_place():
    subject = RecentReads(8, RECORD)
    assert not subject.find(np.array([0, 5]))[0].any()
    subject.keep(np.array([3, 5]), records_of(30, 50))
    kept, found = subject.find(np.array([5, 4, 3, 13]))
    assert kept.tolist() == [True, False, True, False]
    assert found.view(np.int32).tolist() == [50, 30]
    subject.forget(np.array([3, 13]))
    subject.keep(np.array([13]), records_of(130))
    kept, found = subject.find(np.array([3, 5, 13]))
    assert kept.tolist() == [False, False, True]
    assert found.view(np.int32).tolist() == [130]


def test_of_two_recent_reads_in_one_place_the_last_is_kept():
    subject = RecentReads(4, RECORD)
    subject.keep(np.array([1, 5, 9]), records_of(10, 50, 90))
    kept, found = subject.find(np.array([1, 5, 9]))
    assert kept.tolist() == [False, False, True]
    assert found.view(np.int32).tolist() == [90]


def test_recent_reads_that_do_not_fit_evict_none():
    subject = RecentReads(4, RECORD)
    subject.keep(np.array([2]), records_of(20))
    subject.keep(np.arange(5), records_of(*range(5)))
    assert subject.find(np.arange(5))[0].tolist() == [False, False, True, False, False]
