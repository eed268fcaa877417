"""`RowIndex.find` in C, where it was compiled."""

import ctypes
from collections.abc import Callable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from fleet.tables.kernels.library import array_of, library

__all__ = ["compiled_find"]

Find = Callable[[NDArray[np.uint32], int, NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]


@cache
def compiled_find() -> Find | None:
    """Return what finds the rows of ids; None where it was not compiled.

    It is called with the entries of an index (uint32[4 times a power of two, 8 at least]), the bits that the
    number of a row has in an entry, the id of each row (int64[rows]), and the ids that are looked for
    (int64[n]). It returns int64[n], -1 for an id without a row.
    """
    if (kernels := library()) is None:
        return None
    function = kernels.fleet_find_rows
    function.restype = None
    function.argtypes = [array_of(np.uint32), ctypes.c_uint64, ctypes.c_uint32, *[array_of(np.int64)] * 2]
    function.argtypes += [ctypes.c_int64, array_of(np.int64)]

    def find(
        entries: NDArray[np.uint32], number_bits: int, of_rows: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        ids, rows = np.ascontiguousarray(ids), np.empty(ids.size, dtype=np.int64)
        function(entries, entries.size // 4, number_bits, of_rows, ids, ids.size, rows)
        return rows

    return find
