"""Arrays that grow: what they hold stays, what is new is zero, and no second copy is left."""

import re
from pathlib import Path

import numpy as np
import pytest

from fleet.tables.pages import PagedArray

RECORD = np.dtype((np.void, 84))


@pytest.mark.parametrize("dtype", [np.int64, np.int16, RECORD], ids=str)
def test_what_it_holds_stays_and_what_is_new_is_zero(dtype):
    itemsize = np.dtype(dtype).itemsize
    array = PagedArray(64, dtype)
    written = np.random.default_rng(0).integers(0, 256, (0, itemsize), dtype=np.uint8)
    # From what an allocator has to pages, within what these have room for, and past it.
    for num_bytes in (1 << 12, 3 << 20, 5 << 20, 12 << 20, 40 << 20, 170 << 20):
        size = num_bytes // itemsize
        array.resize(size)
        assert array.values.shape == (size,)
        assert array.values.dtype == dtype
        found = array.values.view(np.uint8).reshape(size, itemsize)
        assert np.array_equal(found[: len(written)], written)
        assert not found[len(written) :].any()
        written = np.random.default_rng(size).integers(0, 256, (min(size, 50_000), itemsize), dtype=np.uint8)
        found[: len(written)] = written
        found[len(written) :] = 0


def test_pages_begin_where_large_ones_may():
    array = PagedArray(5 << 20, np.uint8)
    assert array.values.ctypes.data % (2 << 20) == 0
    array.resize(100 << 20)
    assert array.values.ctypes.data % (2 << 20) == 0


def memory(field: str) -> int:
    return int(re.findall(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text())[0]) << 10


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.serial
def test_it_takes_the_memory_of_what_was_written_and_little_more_while_it_moves():
    before = memory("VmRSS")
    array = PagedArray(128 << 20, np.uint8)
    array.values[:] = 1
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    array.resize(600 << 20)
    assert memory("VmHWM") - before < 1.4 * (128 << 20)
    assert memory("VmRSS") - before < 1.1 * (128 << 20)
    assert (array.values[: 128 << 20] == 1).all()
