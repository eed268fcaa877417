"""Loops in C over ids and rows, used if they were compiled when the package was installed.

Each has a NumPy or torch equivalent with bitwise-identical results, which is used if the library is missing.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["add_rows", "add_rows_by_torch", "compiled_find", "distinct_by_numpy", "distinct_ids", "library"]

_MAX_IDS: Final = 2**31 - 1
"""The C code counts ids as uint32."""

Ids = NDArray[np.int64]
AddRows = Callable[[Tensor, Tensor, Tensor], Tensor]
DistinctIds = Callable[[Ids], tuple[Ids, NDArray[np.int64]]]
FindRows = Callable[[NDArray[np.uint32], int, Ids, Ids], NDArray[np.int64]]


@cache
def library() -> ctypes.CDLL | None:
    """Return the compiled library; None if there is none for this machine."""
    try:
        return ctypes.CDLL(str(Path(__file__).with_name("kernels.so")))
    except OSError:
        return None


def add_rows(totals: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Add each row to the total at its position, in order; return the totals.

    Parameters
    ----------
    totals : float[m, dimension]
        Changed in place.
    places : int64[n]
        0 to m - 1; not checked.
    rows : float[n, dimension]
    """
    compiled, places = _compiled_add(), places.contiguous()
    if (
        compiled is not None
        and _is_plain(places, torch.int64)
        and _is_plain(totals, torch.float32)
        and _is_plain(rows, torch.float32)
        and (places.shape[0], totals.shape[1]) == rows.shape
    ):
        return compiled(totals, places, rows)
    return add_rows_by_torch(totals, places, rows)


def add_rows_by_torch(totals: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """Do what `add_rows` does, without compiled code."""
    return totals.index_add_(0, places, rows)


def distinct_ids(ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
    """Return the distinct ids, ascending, and the position of each given id among them.

    Parameters
    ----------
    ids : int64[n]

    Returns
    -------
    int64[m], int64[n]
    """
    ids, compiled = np.asarray(ids, dtype=np.int64).reshape(-1), _compiled_distinct()
    return compiled(ids) if compiled is not None and ids.size <= _MAX_IDS else distinct_by_numpy(ids)


def distinct_by_numpy(ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
    """Return what `distinct_ids` returns, without compiled code."""
    distinct, positions = np.unique(ids, return_inverse=True)
    return distinct, positions.astype(np.int64, copy=False)


@cache
def compiled_find() -> FindRows | None:
    """Return the compiled look-up of `RowIndex`; None if there is none.

    Its arguments are the entries of an index (uint32[4 times a power of two, at least 8]), the number of bits
    of a row number in an entry, the id of each row (int64[rows]) and the ids to find (int64[n]). It returns
    int64[n], -1 for an id without a row.
    """
    if (kernels := library()) is None:
        return None
    function = kernels.fleet_find_rows
    function.restype = None
    function.argtypes = [_array(np.uint32), ctypes.c_uint64, ctypes.c_uint32, *[_array(np.int64)] * 2]
    function.argtypes += [ctypes.c_int64, _array(np.int64)]

    def find(entries: NDArray[np.uint32], number_bits: int, ids_of_rows: Ids, ids: Ids) -> NDArray[np.int64]:
        ids, rows = np.ascontiguousarray(ids), np.empty(ids.size, dtype=np.int64)
        function(entries, entries.size // 4, number_bits, ids_of_rows, ids, ids.size, rows)
        return rows

    return find


@cache
def _compiled_add() -> AddRows | None:
    if (kernels := library()) is None:
        return None
    function = kernels.fleet_add_rows
    function.restype = None
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int64] * 2

    def add(totals: Tensor, places: Tensor, rows: Tensor) -> Tensor:
        function(totals.data_ptr(), places.data_ptr(), rows.data_ptr(), *rows.shape)
        return totals

    return add


@cache
def _compiled_distinct() -> DistinctIds | None:
    if (kernels := library()) is None:
        return None
    function = kernels.fleet_distinct_ids
    function.restype = ctypes.c_int64
    function.argtypes = [_array(np.int64), ctypes.c_int64, _array(np.uint64), _array(np.uint32)]
    function.argtypes += [_array(np.int64)] * 2

    def distinct(ids: Ids) -> tuple[Ids, NDArray[np.int64]]:
        ids, keys = np.ascontiguousarray(ids), np.empty(2 * ids.size, dtype=np.uint64)
        found, positions = np.empty(ids.size, dtype=np.int64), np.empty(ids.size, dtype=np.int64)
        places = np.empty(2 * ids.size, dtype=np.uint32)
        count = function(ids, ids.size, keys, places, found, positions)
        return found[:count].copy(), positions

    return distinct


def _array(dtype: type[np.generic]) -> Any:
    """Return the ctypes argument type of a contiguous one-dimensional array."""
    return np.ctypeslib.ndpointer(dtype, ndim=1, flags="C_CONTIGUOUS")


def _is_plain(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Return whether a tensor is a contiguous array in host memory."""
    return (
        tensor.is_cpu and tensor.dtype is dtype and tensor.layout is torch.strided and tensor.is_contiguous()
    )
