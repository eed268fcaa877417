"""Records that are read past the cache, on a real disk."""

import errno
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import pytest

from fleet.tables import direct_reads
from fleet.tables.direct_reads import DirectReads

RECORD = np.dtype((np.void, 124))
PAGES = 300

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these system calls")


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
    found = DirectReads(file.fileno(), RECORD).read(offsets)
    assert [each.tobytes() for each in found] == [
        os.pread(file.fileno(), RECORD.itemsize, offset) for offset in offsets.tolist()
    ]


def test_records_may_have_many_pages(file):
    record, offsets = np.dtype((np.void, 10_000)), np.array([5, 8192, 40_000])
    found = DirectReads(file.fileno(), record).read(offsets)
    assert [each.tobytes() for each in found] == [
        os.pread(file.fileno(), record.itemsize, offset) for offset in offsets.tolist()
    ]


def test_what_has_no_end_in_the_file_is_an_error_and_the_next_read_is_right(file):
    reads = DirectReads(file.fileno(), RECORD)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        reads.read(np.concatenate([np.arange(500) * 124, [PAGES * 4096 - 10]]))
    assert reads.read(np.array([77]))[0].tobytes() == os.pread(file.fileno(), RECORD.itemsize, 77)


def test_a_read_that_is_interrupted_leaves_nothing_to_the_next_one(file, monkeypatch):
    reads, wait = DirectReads(file.fileno(), RECORD), DirectReads._wait
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
        os.pread(file.fileno(), RECORD.itemsize, offset) for offset in offsets[::-1].tolist()
    ]


def test_what_was_written_lies_on_the_disk_once_it_is_settled(file):
    reads = DirectReads(file.fileno(), RECORD)
    os.pwrite(file.fileno(), b"n" * 4096, 8192)
    reads.settle(8192, 4096)
    assert reads.read(np.array([8200]))[0].tobytes() == b"n" * RECORD.itemsize


def test_a_machine_whose_calls_are_not_known_has_none(file, monkeypatch):
    monkeypatch.setattr(direct_reads, "_CALLS", {})
    with pytest.raises(OSError, match=r"system calls of .* are not known"):
        DirectReads(file.fileno(), RECORD)


def test_no_descriptor_stays_open(file):
    before = len(list(Path("/proc/self/fd").iterdir()))
    reads = DirectReads(file.fileno(), RECORD)
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1
    del reads
    assert len(list(Path("/proc/self/fd").iterdir())) == before
