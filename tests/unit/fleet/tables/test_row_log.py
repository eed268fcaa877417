"""The file of rows, and its reads past the page cache on a real disk."""

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from fleet.errors import FleetError
from fleet.tables import row_log
from fleet.tables.row_log import DirectReads, RowLog

RECORD = np.dtype((np.void, 64))
PER_SEGMENT = 1 << 10

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has reads past the cache")


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return how many records each read past the cache has had."""
    monkeypatch.setattr(row_log, "_SEGMENT_BYTES", PER_SEGMENT * RECORD.itemsize)
    reads, read = list[int](), DirectReads.read

    def count(self: DirectReads, offsets: np.ndarray) -> np.ndarray:
        reads.append(offsets.size)
        return read(self, offsets)

    monkeypatch.setattr(DirectReads, "read", count)
    return reads


def records(numbers: np.ndarray) -> np.ndarray:
    return np.repeat(numbers.astype(np.int32)[:, None], 16, axis=1).view(RECORD)[:, 0]


def filled(segments: int) -> tuple[RowLog, np.ndarray]:
    """Return a log of so many full segments, and the place of each row."""
    log, numbers = RowLog(RECORD, None), np.arange(segments * PER_SEGMENT)
    return log, log.append(numbers, records(numbers))


def test_records_that_lie_alone_are_once_two_newer_segments_were_begun(direct):
    log, places = filled(4)
    direct.clear()
    some = np.arange(0, places.size, 400)
    assert np.array_equal(log.read(places[some]), records(some))
    assert direct == [np.count_nonzero(some < 2 * PER_SEGMENT)]


def test_many_of_one_page_are_read_from_the_cache(direct):
    log, places = filled(4)
    direct.clear()
    assert np.array_equal(log.read(places), records(np.arange(places.size)))
    assert direct == []


def test_a_segment_that_is_written_anew_is_read_from_the_cache_until_it_is_full_again(direct):
    log, places = filled(4)
    log.release(places[:PER_SEGMENT])
    other = np.arange(10) + 5000
    assert log.append(other, records(other)).tolist() == list(range(10))
    direct.clear()
    assert np.array_equal(log.read(np.array([3])), records(other[3:4]))
    assert direct == []


@pytest.mark.parametrize("when", ["__init__", "flush", "read"])
def test_a_disk_that_knows_no_such_reads_is_read_as_any_file_is(direct, monkeypatch, when):
    def refused(*_: Any) -> None:
        raise OSError(errno.EINVAL, "no O_DIRECT here")

    monkeypatch.setattr(DirectReads, when, refused)
    log, places = filled(4)
    assert np.array_equal(log.read(places[[7]]), records(np.array([7])))
    assert direct == []


@pytest.mark.parametrize("from_the_beginning", [False, True])
def test_a_kernel_without_room_for_more_reads_has_them_made_through_the_cache(
    direct, monkeypatch, from_the_beginning
):
    def refused(*_: Any) -> None:
        raise OSError(errno.EAGAIN, "Resource temporarily unavailable")

    with monkeypatch.context() as patch:
        if from_the_beginning:
            patch.setattr(DirectReads, "read", refused)
        log, places = filled(4)
    monkeypatch.setattr(DirectReads, "read", refused)
    assert np.array_equal(log.read(places[[7, 900]]), records(np.array([7, 900])))
    assert log.num_live == places.size


def test_a_segment_whose_flush_failed_is_flushed_again(monkeypatch, direct):
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log, _ = filled(3)
    begun = log._flushing
    assert begun is not None
    log._durable[begun] = False
    with monkeypatch.context() as patch:
        patch.setattr(DirectReads, "flush", fails)
        with pytest.raises(OSError, match="Input/output"):
            log._flush(begun + 1)
    log._flush(begun + 1)
    assert log._durable[begun]


def test_a_disk_that_fails_is_named(monkeypatch, direct):
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log, places = filled(4)
    monkeypatch.setattr(DirectReads, "read", fails)
    with pytest.raises(
        FleetError, match=r"could not be read from /tmp: .*Input/output error; check its disk"
    ):
        log.read(places[[7]])


ODD_RECORD = np.dtype((np.void, 124))
PAGES = 300


@pytest.fixture
def file(tmp_path) -> Iterator[IO[bytes]]:
    with tempfile.TemporaryFile(dir=tmp_path) as opened:
        opened.write(np.random.default_rng(0).bytes(PAGES * 4096))
        opened.flush()
        os.fsync(opened.fileno())
        yield opened


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 3000])
def test_records_are_those_of_the_file_wherever_they_lie(file, count):
    offsets = np.random.default_rng(1).integers(0, (PAGES - 1) * 4096, count)
    offsets[: count // 4] = offsets[: count // 4] // 4096 * 4096 + 4090  # over two pages
    found = DirectReads(file.fileno(), ODD_RECORD).read(offsets)
    assert [each.tobytes() for each in found] == [
        os.pread(file.fileno(), ODD_RECORD.itemsize, offset) for offset in offsets.tolist()
    ]


def test_records_may_have_many_pages(file):
    record, offsets = np.dtype((np.void, 10_000)), np.array([5, 8192, 40_000])
    found = DirectReads(file.fileno(), record).read(offsets)
    assert [each.tobytes() for each in found] == [
        os.pread(file.fileno(), record.itemsize, offset) for offset in offsets.tolist()
    ]


def test_what_has_no_end_in_the_file_is_an_error_and_the_next_read_is_right(file):
    reads = DirectReads(file.fileno(), ODD_RECORD)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        reads.read(np.concatenate([np.arange(500) * 124, [PAGES * 4096 - 10]]))
    assert reads.read(np.array([77]))[0].tobytes() == os.pread(file.fileno(), ODD_RECORD.itemsize, 77)


def test_a_read_that_is_interrupted_leaves_nothing_to_the_next_one(file, monkeypatch):
    reads, wait = DirectReads(file.fileno(), ODD_RECORD), DirectReads._wait
    offsets = np.arange(1000) * 1000

    def interrupted(self: DirectReads, count: int) -> np.ndarray:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(DirectReads, "_wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reads.read(offsets)
    assert DirectReads._wait is wait
    found = reads.read(offsets[::-1])
    assert [each.tobytes() for each in found] == [
        os.pread(file.fileno(), ODD_RECORD.itemsize, offset) for offset in offsets[::-1].tolist()
    ]


def test_what_was_written_lies_on_the_disk_once_it_is_settled(file):
    reads = DirectReads(file.fileno(), ODD_RECORD)
    os.pwrite(file.fileno(), b"n" * 4096, 8192)
    reads.flush(8192, 4096)
    assert reads.read(np.array([8200]))[0].tobytes() == b"n" * ODD_RECORD.itemsize


def test_a_machine_whose_calls_are_not_known_has_none(file, monkeypatch):
    monkeypatch.setattr(row_log, "_CALLS", {})
    with pytest.raises(OSError, match=r"system calls of .* are not known"):
        DirectReads(file.fileno(), ODD_RECORD)


def test_no_descriptor_stays_open(file):
    before = len(list(Path("/proc/self/fd").iterdir()))
    reads = DirectReads(file.fileno(), ODD_RECORD)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    del reads
    assert len(list(Path("/proc/self/fd").iterdir())) == before
