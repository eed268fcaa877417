"""Records in a file: which of them are read past the system's cache."""

import errno
import sys
from typing import Any

import numpy as np
import pytest

from fleet.errors import FleetError
from fleet.tables import row_log
from fleet.tables.direct_reads import DirectReads
from fleet.tables.row_log import RowLog

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
    log.forget(places[:PER_SEGMENT])
    other = np.arange(10) + 5000
    assert log.append(other, records(other)).tolist() == list(range(10))
    direct.clear()
    assert np.array_equal(log.read(np.array([3])), records(other[3:4]))
    assert direct == []


@pytest.mark.parametrize("when", ["__init__", "settle", "read"])
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


def test_a_disk_that_fails_is_named(monkeypatch, direct):
    def fails(*_: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    log, places = filled(4)
    monkeypatch.setattr(DirectReads, "read", fails)
    with pytest.raises(
        FleetError, match=r"could not be read from /tmp: .*Input/output error; look at its disk"
    ):
        log.read(places[[7]])
