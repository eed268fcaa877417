"""`RowIndex.find` in C, where it was compiled when the package was installed."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["compiled_find"]

Find = Callable[[NDArray[np.uint32], int, NDArray[np.int64], NDArray[np.int64]], NDArray[np.int64]]


@cache
def compiled_find() -> Find | None:
    """Return what finds the rows of ids; None where it was not compiled.

    It is called with the entries of an index (uint32[4 times a power of two, 8 at least]), the bits that the
    number of a row has in an entry, the id of each row (int64[rows]), and the ids that are looked for
    (int64[n]). It returns int64[n], -1 for an id without a row.
    """
    try:
        library = ctypes.CDLL(str(Path(__file__).with_name("find_rows.so")))
    except OSError:
        return None
    function = library.fleet_find_rows
    function.restype = None
    function.argtypes = [_array(np.uint32), ctypes.c_uint64, ctypes.c_uint32, *[_array(np.int64)] * 2]
    function.argtypes += [ctypes.c_int64, _array(np.int64)]

    def find(
        entries: NDArray[np.uint32], number_bits: int, of_rows: NDArray[np.int64], ids: NDArray[np.int64]
    ) -> NDArray[np.int64]:
        ids, rows = np.ascontiguousarray(ids), np.empty(ids.size, dtype=np.int64)
        function(entries, entries.size // 4, number_bits, of_rows, ids, ids.size, rows)
        return rows

    return find


def _array(dtype: type[np.generic]) -> Any:
    """Return the type of an argument that is an array of one dimension, without gaps."""
    return np.ctypeslib.ndpointer(dtype, ndim=1, flags="C_CONTIGUOUS")
