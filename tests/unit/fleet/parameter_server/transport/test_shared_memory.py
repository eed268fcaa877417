"""Memory that two processes share: both find each block at the same place, and nothing can shrink it."""

import mmap
import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fleet.errors import LocalProtocolError, RemoteProtocolError
from fleet.parameter_server.transport.arena import Extent, copy_bytes
from fleet.parameter_server.transport.shared_memory import SharedBlocks

BLOCKS = {7: 100, 3: 64, 5: 0}


@pytest.fixture
def descriptor() -> Iterator[int]:
    """Give memory that nobody has sealed, of the size of the blocks."""
    made = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(made, mmap.PAGESIZE)
    yield made
    os.close(made)


def test_both_ends_find_each_block_at_the_same_place():
    ours = SharedBlocks.create(BLOCKS)
    theirs = SharedBlocks.receive(ours.descriptor, dict(sorted(BLOCKS.items())), writable=False)
    assert bytes(theirs[7]) == bytes(100)
    copy_bytes(memoryview(b"a" * 100), ours[7])
    copy_bytes(memoryview(b"b" * 64), ours[3])
    assert (bytes(theirs[7]), bytes(theirs[3]), bytes(theirs[5])) == (b"a" * 100, b"b" * 64, b"")


def test_tensors_lie_in_the_memory_aligned_whatever_their_neighbours_sizes():
    ours = SharedBlocks.create(BLOCKS)
    extents = {
        3: Extent(torch.float64, (2, 4)),
        5: Extent(torch.float32, (0, 3)),
        7: Extent(torch.float32, (25,)),
    }
    tensors = ours.tensors(extents)
    tensors[7].fill_(2.0)
    assert np.frombuffer(ours[7], np.float32).tolist() == [2.0] * 25
    assert [tensors[block].shape for block in (3, 5, 7)] == [(2, 4), (0, 3), (25,)]
    assert tensors[7].data_ptr() % 64 == tensors[3].data_ptr() % 64 == 0


def test_copies_of_another_size_are_refused():
    with pytest.raises(LocalProtocolError, match="1 bytes are to be copied to a buffer of 64"):
        copy_bytes(memoryview(b"a"), SharedBlocks.create(BLOCKS)[3])


def test_memory_mapped_to_be_read_cannot_be_written():
    ours = SharedBlocks.create(BLOCKS)
    theirs = SharedBlocks.receive(ours.descriptor, BLOCKS, writable=False)
    with pytest.raises(TypeError, match="read-only"):
        theirs[3][0] = 1


def test_memory_cannot_change_its_size_and_lives_as_long_as_its_views():
    ours = SharedBlocks.create(BLOCKS)
    for size in (0, 2 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(ours.descriptor, size)
    descriptor, view = ours.descriptor, ours[3]
    del ours
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    assert bytes(view) == bytes(64)


@pytest.mark.parametrize("blocks", [BLOCKS, {3: 5000}], ids=["unsealed", "too-small"])
def test_memory_that_is_not_what_it_should_be_is_refused(descriptor, blocks):
    with pytest.raises(RemoteProtocolError, match=r"unsealed memory of 4096 bytes .* expected sealed"):
        SharedBlocks.receive(descriptor, blocks, writable=True)


def test_sealed_memory_of_another_size_is_refused():
    ours = SharedBlocks.create(BLOCKS)
    with pytest.raises(RemoteProtocolError, match="4096 bytes for 1 blocks, expected sealed memory of 8192"):
        SharedBlocks.receive(ours.descriptor, {3: 5000}, writable=True)


def test_a_descriptor_that_is_no_memory_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(mmap.PAGESIZE))
    with file.open("rb") as opened, pytest.raises(RemoteProtocolError, match="unsealed memory"):
        SharedBlocks.receive(opened.fileno(), BLOCKS, writable=False)
